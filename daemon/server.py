"""The owner's loop: the only thread that calls the brain.

In come requests (ZeroMQ ROUTER), events of the attach and mover threads, and ticks; out go answers, plans and moves.
The loop copies nothing, encodes nothing and waits for nobody. A request that cannot be read is dropped and counted,
one that cannot be right is refused, and an exception in a handler is answered, counted and survived.

Epochs: a request that names another epoch is answered `owner-unavailable`, which makes its worker attach again.
`Ping`, `Stats`, `Explain` and `Drain` are answered to anyone who may open the socket; epoch 0 means "whichever".
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import zmq

from tierkv import errors
from tierkv.daemon import events
from tierkv.daemon.at_once import AT_ONCE, answer
from tierkv.daemon.failures import fault, refusal
from tierkv.daemon.loop_contract import BrainLike, MoveSink, NoMetrics, ServerMetrics
from tierkv.daemon.peers import MAX_PENDING, Peer
from tierkv.daemon.requests import MAX_ID, to_event
from tierkv.daemon.snapshot import Snapshot
from tierkv.errors import ConfigError, TierKVError
from tierkv.protocol import (
    MAX_HEADER_BYTES,
    Drain,
    Failure,
    Fork,
    Open,
    Operation,
    Reply,
    Request,
    Result,
    SessionState,
    Table,
    decode_request,
    encode,
)

log = logging.getLogger(__name__)

TICK_SECONDS = 0.05
SNAPSHOT_SECONDS = 1.0
"""A snapshot looks at every page, so it is not taken at every tick."""

FRAMES_PER_TURN = 64
"""Requests read before events of other threads get their turn."""

EVENTS, RCVMORE, POLLIN = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN)
"""As plain integers, which pyzmq reads faster than its enumerations."""

HIGH_WATER_MARK = 1000
"""Messages that ZeroMQ holds a worker; what is beyond waits, merged, in `Peer`."""

MAX_OUTBOX = 1 << 14
"""Unsent messages of a worker beyond which its requests are not read."""

MAX_SEEN = 1 << 16
GAP_SECONDS = 1.0
"""A loop that did not run for so long (stopped, swapped) cannot blame workers for silence: leases restart."""

Lost = tuple[tuple[int, int, int], ...]


@dataclass(slots=True)
class _Pending:
    """A request whose answer is the brain's to give. `client` is empty for a peer that has not attached."""

    client: str
    request: int
    op: Operation
    read_at: float
    deadline: float  # absolute, 0: none
    abandoned: bool = False


class OwnerLoop:
    """One thread around one brain. `start` binds the socket; every other public method may be called by any thread."""

    def __init__(
        self,
        socket_path: str,
        brain: BrainLike,
        mover: MoveSink,
        epoch: int,
        lease_seconds: float,
        metrics: ServerMetrics | None = None,
    ) -> None:
        self._path = socket_path
        self.endpoint = f"ipc://{socket_path}"
        self._brain = brain
        self._mover = mover
        self._epoch = epoch
        self._lease = lease_seconds
        self._metrics: ServerMetrics = metrics or NoMetrics()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._peers: dict[str, Peer] = {}
        self._pending: dict[int, _Pending] = {}
        self._tokens = 0
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._adopted: Lost = ()
        self.ticks = 0
        self.last_tick = time.monotonic()
        self.errors = 0
        self.malformed = 0
        self.snapshot: Snapshot | None = None
        """The brain's numbers, at most `SNAPSHOT_SECONDS` old, for threads that must not wait."""
        self._snapshot_at = 0.0

    # Any thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Raises `ConfigError` when the socket cannot be bound."""
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.set(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # tell when a worker's queue is full, instead of dropping
        self._socket.set(zmq.ROUTER_HANDOVER, 1)  # a worker that attaches again takes its identity over
        try:
            self._socket.bind(self.endpoint)
            os.chmod(self._path, 0o600)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"the request socket {self._path} cannot be bound: {error}") from None
        self._thread = threading.Thread(target=self._run, name="tierkv-loop", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        if self._thread is not None:
            self._stopping = True
            self._signal()
            self._thread.join(timeout)
        if self._context is not None:
            self._context.destroy(linger=0)
            Path(self._path).unlink(missing_ok=True)
        if self._wake >= 0:
            wake, self._wake = self._wake, -1
            os.close(wake)

    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def post(self, event: events.Event) -> None:
        """Hand the brain an event."""
        self._call(lambda: self._feed(event))

    def attach(self, client: str, sessions: tuple[SessionState, ...]) -> Future[Lost]:
        """Make the worker known; the result is what adoption could not save."""
        future: Future[Lost] = Future()
        self._call(lambda: self._attach(client, sessions, future))
        return future

    def detach(self, client: str) -> None:
        """The worker is gone: everything it held comes back."""
        self._call(lambda: self._detach(client))

    def workers(self) -> int:
        return len(self._peers)

    def _call(self, function: Callable[[], None]) -> None:
        self._inbox.append(function)
        self._signal()

    def _signal(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    # The loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._socket is not None
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        next_tick = time.monotonic()
        while not self._stopping:
            try:
                wait = max(0.0, next_tick - time.monotonic())
                ready = dict(poller.poll(math.ceil(wait * 1000)))  # rounded down, it would be a busy wait
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._socket in ready:
                    self._read_frames()
                for _ in range(len(self._inbox)):
                    self._inbox.popleft()()
                if time.monotonic() >= next_tick:
                    self._tick()
                    next_tick = time.monotonic() + TICK_SECONDS
                self._send_all()
            except Exception:
                self._survive("the loop met an error and goes on")

    def _survive(self, what: str) -> None:
        self.errors += 1
        self._metrics.handler_error()
        log.exception(what)

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self.last_tick > GAP_SECONDS:
            for peer in self._peers.values():
                peer.heard_at = max(peer.heard_at, now - self._lease / 2)
        self.last_tick = now
        self.ticks += 1
        self._metrics.tick()
        for peer in list(self._peers.values()):
            if not peer.lease_expired and now - peer.heard_at > self._lease:
                peer.lease_expired = True
                self._metrics.lease_expired()
                log.warning(
                    "worker %s has been silent for %.1f s: quarantined", peer.client, now - peer.heard_at
                )
                self._feed(events.LeaseExpired(peer.client))
        for pending in list(self._pending.values()):
            late = pending.deadline and pending.deadline < now and not pending.abandoned
            if late and isinstance(
                pending.op, (Open, Fork)
            ):  # what else was begun cannot be undone: answered late
                self._abandon(pending)
        self._mover.revive()
        self._feed(events.Tick())
        if now - self._snapshot_at >= SNAPSHOT_SECONDS:
            self._snapshot_at = now
            self.snapshot = self._brain.snapshot()

    # Workers -----------------------------------------------------------------------------------------------------

    def _attach(self, client: str, sessions: tuple[SessionState, ...], future: Future[Lost]) -> None:
        try:
            self._peers[client] = Peer(client, time.monotonic())
            self._metrics.workers(len(self._peers))
            self._adopted = ()
            self._dispatch(self._brain.handle(events.Attached(client, sessions), time.monotonic()))
            future.set_result(self._adopted)
        except Exception as error:
            self._survive(f"worker {client} could not be admitted")
            self._detach(client)
            future.set_exception(error)

    def _detach(self, client: str) -> None:
        if self._peers.pop(client, None) is not None:
            self._metrics.workers(len(self._peers))
            self._feed(events.WorkerDied(client))
            for token in [token for token, pending in self._pending.items() if pending.client == client]:
                del self._pending[token]

    def _heard(self, peer: Peer, now: float) -> None:
        peer.heard_at = now
        if peer.lease_expired:
            peer.lease_expired = False
            self._feed(events.LeaseRenewed(peer.client))

    # Requests ----------------------------------------------------------------------------------------------------

    def _read_frames(self) -> None:
        """Messages that wait. Asking first is cheaper than an exception for each last one."""
        assert self._socket is not None
        for _ in range(FRAMES_PER_TURN):
            if not cast(int, self._socket.getsockopt(EVENTS)) & POLLIN:
                return
            identity = self._socket.recv(zmq.NOBLOCK)
            header = self._socket.recv(zmq.NOBLOCK)  # a ROUTER's message is never an identity alone
            buffers = []
            while self._socket.getsockopt(RCVMORE):
                buffers.append(self._socket.recv(zmq.NOBLOCK, copy=False).buffer)
            try:
                self._read(identity, header, buffers)
            except Exception:
                self._survive("a frame could not be handled")

    def _read(self, identity: bytes, header: bytes, buffers: list[memoryview]) -> None:
        now = time.monotonic()
        peer = self._peers.get(identity.decode("ascii", "replace"))
        try:
            request = decode_request(header)
            if (
                not 1 <= request.id <= MAX_ID
                or len(request.seen) > MAX_SEEN
                or not 0 <= request.deadline < 1e9
            ):
                raise errors.ProtocolError("request id, seen or deadline is out of range")
        except errors.ProtocolError as error:
            self.malformed += 1
            self._metrics.malformed()
            log.info("a malformed frame was dropped: %s", error)
            return
        if peer is not None:
            self._heard(peer, now)
        if isinstance(request.op, AT_ONCE) and (peer is None or request.epoch in (0, self._epoch)):
            self._acknowledge(peer, request, now)
            self._answer_now(identity, peer, request, len(buffers), now)
            return
        if request.epoch != self._epoch or peer is None:
            why = (
                f"epoch {request.epoch} is over, this is {self._epoch}"
                if request.epoch != self._epoch
                else "this worker is not attached"
            )
            self._send_raw(
                identity, self._reply(request.id, refusal(errors.OwnerUnavailable(f"{why}; attach again")))
            )
            return
        if peer.is_pending(request.id):
            return
        if (remembered := peer.replies.get(request.id)) is not None:
            peer.outbox.append(remembered)
            return
        if request.id <= peer.forgotten:
            self._fail(
                peer, request, errors.ProtocolError(f"request {request.id} is too old to be answered again")
            )
            return
        if len(peer.outbox) >= MAX_OUTBOX:  # it asks without reading answers: it will ask again
            return
        self._acknowledge(peer, request, now)
        self._execute(peer, request, buffers, now)

    def _acknowledge(self, peer: Peer | None, request: Request, now: float) -> None:
        if peer is not None and request.epoch == self._epoch:
            for session, version in request.seen.items():
                self._feed(events.Acked(peer.client, session, version))

    def _answer_now(
        self, identity: bytes, peer: Peer | None, request: Request, buffers: int, now: float
    ) -> None:
        try:
            if buffers:
                raise errors.ProtocolError(f"{buffers} buffers came with an operation that has none")
            if isinstance(request.op, Drain):
                self._feed(events.Draining())
            result = answer(self._brain, request.op)
        except TierKVError as error:
            result = refusal(error)
        except Exception as error:
            self._survive(f"{_name(request.op)} failed")
            result = fault(error)
        raw = self._reply(request.id, result)
        if peer is not None:
            peer.outbox.append(raw)
        else:
            self._send_raw(identity, raw)
        self._metrics.request(_name(request.op), time.monotonic() - now)

    def _execute(self, peer: Peer, request: Request, buffers: list[memoryview], now: float) -> None:
        if len(peer.pending) >= MAX_PENDING:
            self._fail(peer, request, errors.Backpressure(f"{MAX_PENDING} requests wait already", 0.05))
            return
        deadline = now + request.deadline if request.deadline else 0.0
        if deadline and time.monotonic() > deadline:
            self._fail(
                peer, request, errors.OwnerUnavailable("the deadline passed before the request was handled")
            )
            return
        self._tokens += 1
        token = self._tokens
        try:
            event = to_event(peer.client, token, request.op, buffers)
        except TierKVError as error:
            self._fail(peer, request, error)
            return
        self._pending[token] = _Pending(peer.client, request.id, request.op, now, deadline)
        peer.pending.add(request.id)
        self._feed(event, token)

    def _fail(self, peer: Peer, request: Request, error: TierKVError) -> None:
        self._metrics.refused(_name(request.op), error.code)
        peer.remember(Reply(request.id, self._epoch, refusal(error)))

    # The brain ---------------------------------------------------------------------------------------------------

    def _feed(self, event: events.Event, token: int = 0) -> None:
        """Hand an event over and carry out what follows; an exception fails the event's own request only."""
        try:
            self._dispatch(self._brain.handle(event, time.monotonic()))
        except Exception as error:
            self._survive(f"the brain failed on {type(event).__name__}")
            if token in self._pending:
                self._answer(token, fault(error))

    def _dispatch(self, instructions: list[events.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case events.Answer(token, result):
                    self._answer(token, result)
                case events.SendPlan(client, plan):
                    if (peer := self._peers.get(client)) is not None:
                        peer.queue_plan(plan)
                case events.Adopted(_, lost):
                    self._adopted = lost
                case _:
                    self._mover.submit(instruction)

    def _answer(self, token: int, result: Result) -> None:
        pending = self._pending.pop(token, None)
        if pending is None:
            return
        if pending.abandoned:
            self._undo(pending, result)
            return
        peer = self._peers.get(pending.client)
        if peer is not None:
            peer.remember(Reply(pending.request, self._epoch, result))
        name = _name(pending.op)
        self._metrics.request(name, time.monotonic() - pending.read_at)
        if isinstance(result, Failure):
            self._metrics.refused(name, result.code)

    def _abandon(self, pending: _Pending) -> None:
        """The deadline passed while the brain made room: answer now, undo when it is done."""
        pending.abandoned = True
        peer = self._peers.get(pending.client)
        if peer is not None:
            late = errors.OwnerUnavailable("the deadline passed before the answer was there")
            peer.remember(Reply(pending.request, self._epoch, refusal(late)))

    def _undo(self, pending: _Pending, result: Result) -> None:
        """A session that nobody waits for any more is closed again."""
        if isinstance(result, Table):
            self._feed(events.Closed(0, pending.client, result.table.session))

    # Sending -----------------------------------------------------------------------------------------------------

    def _reply(self, request: int, result: Result) -> bytes:
        return encode(Reply(request, self._epoch, result))

    def _send_all(self) -> None:
        for peer in self._peers.values():
            while (raw := peer.frame(self._epoch)) is not None and self._send_raw(peer.identity, raw):
                peer.sent()

    def _send_raw(self, identity: bytes, raw: bytes) -> bool:
        """False when the worker is not connected (yet) or takes no more: it is tried again."""
        assert self._socket is not None
        try:
            self._socket.send_multipart([identity, raw], zmq.NOBLOCK)
            return True
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False


def _name(op: Operation) -> str:
    """The operation's name as metrics show it, which is its tag on the wire."""
    return str(type(op).__struct_config__.tag)
