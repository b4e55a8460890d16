"""The worker's side of the daemon: `connect`, and the client that holds the pools and the sessions.

A client attaches once and stays attached: when the owner dies, its line finds the next one, hands the HBM descriptor
and every session's table back, and goes on. Only what truly is lost is told, by `PagesLost` at the next `begin` of the
session concerned. A client belongs to the process that made it; in a forked child every call raises.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from concurrent.futures import Future
from functools import partial
from operator import index
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from tierkv import handshake
from tierkv.calls import Attachment, Call
from tierkv.errors import OwnerUnavailable, PagesLost, ProtocolError, RequestError, TierKVError
from tierkv.fence import Fence
from tierkv.figures import SessionFigures
from tierkv.geometry import Geometry
from tierkv.line import Line
from tierkv.opening import make_session
from tierkv.pool import HbmMapping, MappedPool
from tierkv.protocol import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Done,
    Drain,
    Explain,
    Explained,
    GeometryFields,
    Observing,
    Open,
    Operation,
    Ping,
    Plan,
    Reserve,
    Result,
    SessionOptions,
    Sessions,
    SessionsResult,
    SessionState,
    Stats,
    StatsResult,
    TableState,
)
from tierkv.session import Session
from tierkv.waiting import failed, give, wait

TIMEOUT_SECONDS = 10.0
"""How long a call waits for the daemon, for room, or for a new owner."""

RESERVE_AHEAD = 1
"""Pages that a session keeps reserved beyond its need, so that a decode step does not wait."""

DRIVE_SECONDS = 0.02
"""How long a caller that waits does the line's work itself; an answer that takes longer does not miss a wake-up."""

CONNECT_RETRY_SECONDS = 0.02


def connect(
    state_dir: str | Path | None = None,
    timeout: float = TIMEOUT_SECONDS,
    *,
    reserve_ahead: int = RESERVE_AHEAD,
) -> Client:
    """Attach to this node's daemon.

    Args:
        state_dir: of the daemon; default `$TIERKV_STATE_DIR`, else `/dev/shm/tierkv-<uid>`.
        timeout: seconds that this and every later call waits at most.
        reserve_ahead: pages kept reserved beyond the need of each session; 0 where the HBM pool is tiny.

    Raises:
        OwnerUnavailable: no daemon answered in time.
        ProtocolError: the daemon speaks another version.
    """
    return Client(
        Path(state_dir) if state_dir is not None else handshake.default_state_dir(), timeout, reserve_ahead
    )


class Client:
    """Any thread may call. `close` (or leaving the `with` block) gives everything back."""

    def __init__(self, state_dir: Path, timeout: float, reserve_ahead: int) -> None:
        self.state_dir = state_dir
        self.timeout = timeout
        self.reserve_ahead = reserve_ahead
        self.id = uuid.uuid4().hex
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._sessions: dict[int, Session] = {}
        self._seen: dict[int, tuple[int, Fence | None]] = {}
        self._hbm: HbmMapping | None = None
        self._host: MappedPool | None = None
        self._closed = False
        self._terms: Attached
        self._line = Line(self.id, self, self._first_attachment(timeout))

    # What the daemon said ----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Of the owner attached to now (or last)."""
        return self._terms.epoch

    @property
    def connected(self) -> bool:
        """Attached to a living owner."""
        return self._line.connected and not self._closed

    @property
    def codec(self) -> str:
        return self._terms.codec

    @property
    def middle(self) -> str:
        """Codec of the form between exact and low-bit pages; empty where there is none."""
        return self._terms.middle

    @property
    def page_tokens(self) -> int:
        return self._terms.page_tokens

    @property
    def straddle(self) -> bool:
        return self._terms.straddle

    @property
    def observing(self) -> Observing:
        return self._terms.observing

    @property
    def digest_layers(self) -> int:
        return self._terms.digest_layers

    @property
    def hbm_bytes(self) -> int:
        return self._terms.hbm_bytes

    @property
    def host_bytes(self) -> int:
        return self._terms.host_bytes

    def mapped(self) -> HbmMapping:
        """The HBM pool."""
        assert self._hbm is not None
        return self._hbm

    def hbm(self) -> NDArray[np.uint8]:
        """The HBM pool, `[hbm_bytes]`, writable; empty where it is on a GPU (then `mapped().tensor` is it)."""
        return self.mapped().data

    def host(self) -> NDArray[np.uint8]:
        """The host pool, `[host_bytes]`, read-only."""
        assert self._host is not None
        return self._host.data

    # Calls -------------------------------------------------------------------------------------------------------

    def open(
        self,
        geometry: Geometry,
        model_id: str,
        *,
        ladder: str = "tiered",
        hbm_budget: int = 0,
        pins: dict[str, str] | None = None,
    ) -> Session:
        """A new, empty session.

        Args:
            model_id: names the weights; pages of different ids never mix.
            ladder: what the daemon may do under pressure: `tiered` (exact, low-bit, host), `drop` or `exact`.
            hbm_budget: most HBM bytes of the session's replicas; 0 for no bound of its own.
            pins: levels (`exact`, `attendable`) by region; None takes the daemon's.

        Raises:
            GeometryMismatch: pages of another token count than the daemon's, or a shape that cannot be packed.
            BudgetTooSmall: the pool or the budget holds too few pages of this geometry.
            OutOfCapacity, Backpressure, OwnerUnavailable: no room, or nobody there.
        """
        options = SessionOptions(ladder=ladder, hbm_budget=hbm_budget, pins=pins)
        g = geometry
        fields = GeometryFields(g.num_layers, g.num_kv_heads, g.head_dim, g.dtype, g.page_tokens)

        def make(table: TableState) -> Session:
            session = Session(self, table, geometry, model_id, options)
            self.enroll(session)
            return session

        return make_session(self, Open(model_id, fields, options), make)

    def stats(self, session: int = -1) -> dict[str, float]:
        """Numbers of the whole daemon, or of one session."""
        result = self._ask(Stats(session), "stats")
        if not isinstance(result, StatsResult):
            raise failed(result)
        return result.values

    def sessions(self) -> list[SessionFigures]:
        """Every session of the daemon, also those of other workers: what it holds, and what recall did for it."""
        result = self._ask(Sessions(), "sessions")
        if not isinstance(result, SessionsResult):
            raise failed(result)
        return result.sessions

    def explain(self, session: int, page: int | None = None, *, token: int | None = None) -> Explained:
        """Why a page of a session is where it is, and what would move it next.

        Args:
            session: its id; any session of the daemon, not only this client's.
            page: row in the session's page table, from 0.
            token: or a token instead: the page that holds it.

        Raises:
            UnknownSession: it is not open; the message names some that are.
            RequestError: no such page or token, or not exactly one of the two is given.
        """
        if (page is None) == (token is None):
            raise RequestError("name either a page or a token, by a number from 0 on")
        numbers = [index(number) for number in (session, page, token) if number is not None]
        if not all(0 <= number < 2**63 for number in numbers):
            raise RequestError(
                f"there is no {'page' if token is None else 'token'} {numbers[1]} of session {numbers[0]}"
            )
        found = (
            Explain(numbers[0], page=numbers[1]) if token is None else Explain(numbers[0], token=numbers[1])
        )
        result = self._ask(found, "explain")
        if not isinstance(result, Explained):
            raise failed(result)
        return result

    def ping(self) -> float:
        """Seconds that an answer of the daemon took."""
        start = time.perf_counter()
        result = self._ask(Ping(), "ping")
        if not isinstance(result, Done):
            raise failed(result)
        return time.perf_counter() - start

    def drain(self) -> None:
        """Tell the daemon to admit no more sessions and pages."""
        self._ask(Drain(), "drain")

    def close(self) -> None:
        """Detach: every page of every session goes back. Closing twice does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        was_connected = self._line.connected
        self._closed = True
        for session in list(self._sessions.values()):
            session.break_off(OwnerUnavailable("the client is closed"))
        try:
            if self._hbm is not None:
                self._hbm.settle()  # what kernels still read is about to be somebody else's
        finally:
            self._line.close()
        if not was_connected:
            handshake.leave(self.state_dir, self.id)
        for pool in (self._hbm, self._host):
            if pool is not None:
                pool.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # For sessions ------------------------------------------------------------------------------------------------

    def check_process(self) -> None:
        """Raises `TierKVError` in a forked child."""
        if os.getpid() != self._pid:
            raise TierKVError(
                f"this client belongs to process {self._pid}, not to its fork {os.getpid()}: connect again in the child"
            )

    def submit(self, call: Call, wake: bool = True) -> None:
        """Hand a call to the line. Those of a session speak of pages, so they leave when kernels launched before are
        done with them, and in order; but a reservation only asks for more.
        """
        self.check_process()
        if call.session >= 0 and not isinstance(call.op, Reserve):
            call.after = self.fence()
        self._line.submit(call, wake)

    def flush(self) -> None:
        self._line.flush()

    def fence(self) -> Fence | None:
        return None if self._hbm is None else self._hbm.fence()

    def adopted(self, session: int, version: int, fence: Fence | None) -> None:
        """Session `session` reads table `version` from now on: the daemon is told soon after `fence`."""
        with self._lock:
            self._seen[session] = version, fence
        self._line.acknowledge_soon()

    def forget(self, session: int) -> None:
        with self._lock:
            self._sessions.pop(session, None)
            self._seen.pop(session, None)

    def enroll(self, session: Session) -> None:
        with self._lock:
            self._sessions[session.id] = session

    def unavailable(self, what: str) -> OwnerUnavailable:
        """The error for a wait that ended without an answer."""
        if self._line.connected:
            why = f"it was last heard {self._line.silence():.1f} s ago"
        else:
            why = self._line.problem or "its owner is gone and no new one was found"
        return OwnerUnavailable(
            f"the daemon did not answer in time ({what}): {why}; retry, or check `tierkv status`"
        )

    # For the line ------------------------------------------------------------------------------------------------

    def attach(self, timeout: float) -> Attachment:
        """Attach to a new owner with everything this client holds; give up what it cannot adopt."""
        with self._lock:
            sessions = dict(self._sessions)
            self._seen.clear()
        states, folded = [], {}
        for session in sessions.values():
            state, folded[session.id] = session.state()
            states.append(state)
        if self._hbm is not None:
            self._hbm.settle()  # what the tables say is written
        try:
            stream, reply = self._handshake(states, timeout)
        except PagesLost as error:  # another memory than ours: nothing of it can be kept
            for session in sessions.values():
                everything = ((0, session.horizon),)
                session.break_off(
                    PagesLost(f"session {session.id} is lost with its owner: {error}", everything)
                )
                self.forget(session.id)
            self._drop_pools()
            raise OwnerUnavailable(str(error)) from None
        for session in sessions.values():
            session.carried_over([(first, stop) for owner, first, stop in reply.lost if owner == session.id])
        return Attachment(stream, reply, folded)

    def plans(self, plans: list[Plan]) -> None:
        for plan in plans:
            session = self._sessions.get(plan.session)
            if session is not None:  # else it was closed meanwhile
                session.offer(plan)

    def take_seen(self) -> dict[int, int]:
        with self._lock:
            seen = {
                session: version
                for session, (version, fence) in self._seen.items()
                if fence is None or fence.query()
            }
            for session in seen:
                del self._seen[session]
        return seen

    def unseen(self) -> bool:
        return bool(self._seen)

    # Inside ------------------------------------------------------------------------------------------------------

    def _ask(self, op: Operation, what: str) -> Result:
        deadline = time.monotonic() + self.timeout
        answer: Future[Result] = Future()
        self.submit(Call(op, partial(give, answer), deadline=deadline), wake=False)
        self._line.drive(answer.done, min(DRIVE_SECONDS, self.timeout))
        result = wait(answer, deadline, self, what)
        return result

    def _first_attachment(self, timeout: float) -> Attachment:
        deadline = time.monotonic() + timeout
        while True:
            try:
                stream, reply = self._handshake([], max(CONNECT_RETRY_SECONDS, deadline - time.monotonic()))
                return Attachment(stream, reply, {})
            except OwnerUnavailable:
                if time.monotonic() + CONNECT_RETRY_SECONDS > deadline:
                    raise
                time.sleep(CONNECT_RETRY_SECONDS)

    def _handshake(self, states: list[SessionState], timeout: float) -> tuple[socket.socket, Attached]:
        mine = None if self._hbm is None else self._hbm.descriptor
        forms = (self.codec, self.middle) if states else ()
        message = Attach(PROTOCOL_VERSION, self.id, states, *forms)
        stream, reply, hbm, host = handshake.attach(self.state_dir, message, mine, timeout)
        try:
            self._map(reply, hbm, host)
        except BaseException:
            handshake.say_farewell(stream)
            stream.close()
            raise
        self._terms = reply
        return stream, reply

    def _map(self, reply: Attached, hbm: int, host: int) -> None:
        if self._hbm is not None:
            same = self._hbm.same(hbm)
            os.close(hbm)
            if not same:
                os.close(host)
                raise ProtocolError("the new owner adopted another HBM pool than the one handed back")
        else:
            try:
                self._hbm = _map_hbm(reply, hbm)
            except BaseException:
                os.close(host)
                raise
        if self._host is not None:
            self._host.close()
        self._host = MappedPool(host, reply.host_bytes, writable=False)

    def _drop_pools(self) -> None:
        """Forget mappings; arrays that sessions still hold keep the memory until they go."""
        for pool in (self._hbm, self._host):
            if pool is not None:
                pool.close()
        self._hbm = self._host = None


def _map_hbm(reply: Attached, descriptor: int) -> HbmMapping:
    """Map the pool behind `descriptor`, which it takes."""
    if not reply.device:
        return MappedPool(descriptor, reply.hbm_bytes, writable=True)
    from tierkv.device_pool import map_device

    return map_device(descriptor, reply.hbm_bytes, reply.device)
