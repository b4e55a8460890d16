"""One sequence of one worker: its steps, its tentative tokens, and what it asks of the daemon.

A step is `begin` (lay new tokens out), writing K/V into `slots`, reading `rows`, then `commit` (or `rollback`), maybe
`observe`, and `end`. Inside a step the table stands still; plans of the daemon are adopted at `begin`, and between
`end` and `begin` by the client's own thread, so that a paused session never keeps memory from being reused.

Commits and observations are not waited for: they leave when the step ends, but a decode step's commit only with the
next message, or when the line looks by itself. When one fails, the next `begin` raises. Where tokens lie is
`residency.py`'s, what is asked and not yet answered `in_flight.py`'s; this file says when either may change.

On a device a step is over for the caller before its kernels are: what is told of it then waits for its fence, not the
caller (`Daemon.adopted`, `Client.submit`).

Threads: a session belongs to one caller at a time; the client's thread joins in under the session's lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tierkv.calls import Call
from tierkv.errors import RequestError, TierKVError, UnknownSession
from tierkv.fence import Fence
from tierkv.geometry import Geometry
from tierkv.hint_messages import AgentHint, HintKind
from tierkv.hinting import Hinting
from tierkv.in_flight import LEAST_RETRY_SECONDS, InFlight
from tierkv.labels import Labels, Span
from tierkv.opening import make_session
from tierkv.protocol import (
    Audit,
    Close,
    Commit,
    Crop,
    Done,
    Fork,
    GeometryFields,
    Hint,
    Observe,
    Pin,
    Plan,
    Ready,
    Recall,
    Result,
    SessionOptions,
    SessionState,
    Table,
    TableState,
)
from tierkv.regions import Region, Run, parse_region
from tierkv.residency import Residency
from tierkv.session_contract import Daemon
from tierkv.session_view import SessionView
from tierkv.troubles import Troubles
from tierkv.waiting import failed, give
from tierkv.waiting import wait as wait_for

DAMAGE_SECONDS = 1.0
"""How long the daemon looks for room to bring a damaged page back, by which it finds the damage."""


class Session(SessionView, Hinting):
    """Made by `Client.open` and `Session.fork`."""

    def __init__(
        self,
        daemon: Daemon,
        table: TableState,
        geometry: Geometry,
        model_id: str,
        options: SessionOptions,
        step: int = 0,
    ) -> None:
        self.id = table.session
        self.geometry = geometry
        self.model_id = model_id
        self.options = options
        self.observing = daemon.observing
        """When attention mass is looked at: the daemon's settings, which may be replaced between steps."""
        self.step = step
        """Decode steps so far (MemDecay's t)."""
        self._daemon = daemon
        self._labels = Labels()
        self._pins: list[Pin] = []
        self._in_step = False
        self._fence: Fence | None = None  # of the latest step's kernels
        self._pressing = False  # the step has told more than that it was a decode step
        self._expected = 0  # tokens of the next step, where the caller said so
        self._closed = False
        self._troubles = Troubles(self.id)
        self._cropping = False
        residency = Residency(daemon, geometry, table, self._damaged)
        super().__init__(threading.Condition(threading.RLock()), residency, table.length)
        self._in_flight = InFlight(daemon, self.id, self._changed, self._residency.add_blanks)

    @property
    def lost(self) -> list[tuple[int, int]]:
        """Token ranges that no replica holds: `crop` below them and prefill again."""
        return self._troubles.lost

    @property
    def hbm_budget(self) -> int:
        """Most bytes of HBM that the session may hold; 0: no bound of its own."""
        return self.options.hbm_budget

    # Steps -------------------------------------------------------------------------------------------------------

    def label(self, region: str | Region, tokens: int) -> None:
        """Region of the next `tokens` tokens, after those labelled already. Raises `UnknownRegion`."""
        if tokens > 0:
            with self._changed:
                self._labels.add(parse_region(region), tokens)

    def unlabel(self) -> None:
        """Forget labels that no token has taken yet."""
        with self._changed:
            self._labels.clear()

    def reserve(self, tokens: int, regions: Sequence[Run] = ()) -> None:
        """Take the pages of a coming `begin` of the same, waiting for room; the session stays between steps meanwhile.

        Rows of one batch reserve before any of them begins: a row in a step acknowledges nothing, so memory that it
        could still read would never become room for the next row. Raises what `begin` does.
        """
        self._daemon.check_process()  # before the lock: a forked child may have inherited it locked
        deadline = time.monotonic() + self._daemon.timeout
        with self._changed:
            self._ready(tokens, deadline, regions)

    def expect(self, tokens: int) -> None:
        """The next step will have so many tokens: the daemon makes room for them while this one runs. Not waited for.

        What a step reads is not reused before its `end`, which asks for what could not be had before. Under a budget
        of its own a session asks for nothing: low-bit pages would leave HBM to make room for two steps at a time.
        """
        with self._changed:
            self._check()
            if self.hbm_budget:
                return
            self._expected = tokens
            self._in_flight.reserve_ahead(self._lacking())

    def begin(self, tokens: int, regions: Sequence[Run] = ()) -> None:
        """A step of `tokens` new tentative tokens: adopt plans, and take (or wait for) reserved pages.

        Args:
            regions: of the new tokens from the first one on, where no label names them.

        Raises:
            PagesLost: ranges that must be prefilled again, until `crop` removes them.
            Backpressure: no room was made before the client's timeout.
            OutOfCapacity: there will be none.
            OwnerUnavailable: no daemon answered before the client's timeout.
            TierKVError: an earlier commit or observation of this session failed.
        """
        self._daemon.check_process()  # before the lock: a forked child may have inherited it locked
        deadline = time.monotonic() + self._daemon.timeout
        with self._changed:
            spans, runs = self._ready(tokens, deadline, regions)
            self._in_step = True
            self._labels.take(spans)
            self._residency.lay_out(runs)

    def commit(self, token_ids: NDArray[np.int32] | None = None, *, steps: int = 0) -> None:
        """All tentative tokens become final. Not waited for; after a decode step it may leave half a second later.

        Args:
            token_ids: int32 ids of the tokens committed, for prefix sharing.
            steps: decode steps that this took; 0 for a prefill chunk, 1 for a decode step.
        """
        with self._changed:
            self._check()
            fresh = self.length - self._horizon
            if token_ids is not None and len(token_ids) != fresh:
                raise RequestError(
                    f"{len(token_ids)} token ids for {fresh} tentative tokens; give one each, or none"
                )
            if not fresh and not steps:
                return
            ids = b"" if token_ids is None else np.ascontiguousarray(token_ids, "<i4").tobytes()
            runs = self._labels.commit()
            self._horizon = self.length
            self.step += steps
            op = Commit(self.id, self._horizon, runs, steps, ids)
            self._pressing |= not steps
            self._in_flight.tell(op, [], self._commit_failed, wake=not self._in_step)

    def observe(self, mass: NDArray[np.float32], audit: Audit | None = None) -> None:
        """Report attention mass of tokens `[0, length)`, averaged over heads and layers; NaN where it is not known.

        A token of a cold page has its share of the page's estimate. Not waited for. Only committed tokens are reported,
        and one observation a decode step counts.
        """
        with self._changed:
            self._check()
            if len(mass) != self.length:
                raise RequestError(f"mass of {len(mass)} tokens for a session of {self.length}")
            if self._horizon:
                raw = np.ascontiguousarray(mass[: self._horizon], "<f2").tobytes()
                blocked, self._in_flight.blocked_seconds = self._in_flight.blocked_seconds, 0.0
                op = Observe(self.id, self.step, self._horizon, audit, blocked)
                self._pressing = True
                self._in_flight.tell(op, [raw], self._observation_failed, wake=not self._in_step)

    def end(self) -> None:
        """The step is over: until the next `begin`, the client's thread may adopt plans."""
        with self._changed:
            self._in_step = False
            self._fence = self._daemon.fence()
            self._adopt()
            if not (self._closed or self._cropping or self._troubles.broken):
                self._in_flight.reserve_ahead(self._lacking())
            if self._pressing:
                self._daemon.flush()
                self._pressing = False
            self._changed.notify_all()

    def rollback(self, length: int) -> None:
        """Forget tentative tokens from `length` on. Labels that the caller gave them wait for the next tokens again."""
        with self._changed:
            self._check()
            if not self._horizon <= length <= self.length:
                raise RequestError(
                    f"rollback to {length}; tentative are tokens [{self._horizon}, {self.length}): use crop below"
                )
            self._labels.give_back(self.length - length)
            self._residency.cut(length)
            self._expected = 0

    # Requests that are waited for --------------------------------------------------------------------------------

    def crop(self, length: int) -> None:
        """Forget tokens from `length` on, below the horizon too: a page that is cut stays and is read short."""
        deadline = time.monotonic() + self._daemon.timeout
        answer: Future[Result] = Future()
        with self._changed:
            self._check()
            if not 0 <= length <= self.length:
                raise RequestError(f"crop to {length} of {self.length} tokens")
            if length >= self._horizon:
                self.rollback(length)
                return
            self.rollback(self._horizon)
            self._cropping = True
            try:
                self._in_flight.settle(deadline)
                self._daemon.submit(
                    Call(Crop(self.id, length), lambda result: self._cropped(result, answer), self.id)
                )
            except BaseException:
                self._cropping = False
                raise
        self._result(answer, deadline, "crop")

    def recall(
        self, pages: Sequence[int], masses: Sequence[float], seconds: float, wait: bool = True
    ) -> None:
        """Bring cold pages (ids, most wanted first) back as low-bit replicas.

        Pages that cannot be had (no room that colder pages could make, or `seconds` are over) stay cold: no error.

        Args:
            masses: estimated shares of attention; only pages with less give way.
            seconds: how long it may take.
            wait: for them, between steps; else they come as a plan, which a later `begin` adopts.
        """
        began = time.monotonic()
        deadline = began + self._daemon.timeout + seconds
        answer: Future[Result] = Future()
        with self._changed:
            self._check()
            op = Recall(self.id, list(pages), list(masses), seconds)
            if not wait:
                self._pressing = True
                self._daemon.submit(Call(op, lambda result: None, self.id), wake=not self._in_step)
                return
            if self._in_step:
                raise RequestError("pages are waited for between steps: end() or roll back first")
            self._daemon.submit(Call(op, partial(give, answer), self.id))
        result = wait_for(answer, deadline, self._daemon, "recall")
        if not isinstance(result, Ready):
            raise failed(result)
        with self._changed:
            self._adopt()
            while (
                self.version < result.version
                and self._troubles.broken is None
                and time.monotonic() < deadline
            ):
                self._changed.wait(max(LEAST_RETRY_SECONDS, deadline - time.monotonic()))
                self._adopt()
            self._in_flight.blocked_seconds += time.monotonic() - began

    def fork(self) -> Session:
        """A session that shares the committed pages and goes its own way. Tentative tokens are not in it."""
        with self._changed:
            self._check()
            self._troubles.check()
            step, pins, verified = self.step, list(self._pins), self._residency.table

        def child(table: TableState) -> Session:
            session = Session(self._daemon, table, self.geometry, self.model_id, self.options, step)
            session._residency.table.trust(verified)
            session._pins = [Pin(session.id, pin.start, pin.stop, pin.level) for pin in pins]
            self._daemon.enroll(session)
            return session

        return make_session(self._daemon, Fork(self.id), child, self.id)

    def pin(self, start: int, stop: int, level: str = "attendable") -> None:
        """Keep pages that hold tokens `[start, stop)` `attendable` or `exact`; `none` lifts the pin."""
        op = Pin(self.id, start, stop, level)
        self._ask(op, "pin")
        with self._changed:
            self._pins = [p for p in self._pins if not start <= p.start <= p.stop <= stop]
            if level != "none":
                self._pins.append(op)

    def _hint(self, hint: HintKind | None, agent: AgentHint | None = None) -> None:
        self._ask(Hint(self.id, hint, agent), "hint")

    def close(self) -> None:
        """Give every page back. Not waited for; closing twice does nothing."""
        with self._changed:
            if self._closed:
                return
            self._daemon.check_process()
            self._closed = True
            self._in_step = False
            self._daemon.forget(self.id)
            if not self._troubles.everything_lost:
                self._daemon.submit(Call(Close(self.id), lambda result: None, self.id))
            self._changed.notify_all()

    # For the client's thread -------------------------------------------------------------------------------------

    def offer(self, plan: Plan) -> None:
        """A plan arrived: adopted now when the session is between steps, else at the next `begin`."""
        with self._changed:
            self._residency.offer(plan)
            if not self._in_step:
                self._adopt()
            self._changed.notify_all()

    def state(self) -> tuple[SessionState, int]:
        """What a new owner adopts, and the number of the last commit or observation that it contains.

        Plans of the dead owner that were not adopted are dropped: nobody will reuse what they would have freed.
        """
        with self._changed:
            self._residency.drop_plans()
            table = self._residency.state(self.id, self._horizon)
            g = self.geometry
            fields = GeometryFields(g.num_layers, g.num_kv_heads, g.head_dim, g.dtype, g.page_tokens)
            return SessionState(table, self.model_id, fields, self.options, self.step), self._in_flight.told

    def carried_over(self, lost: Iterable[tuple[int, int]]) -> None:
        """A new owner adopted the session, but for `lost`. Pins of token ranges are told again."""
        with self._changed:
            self._troubles.lost += lost
            for pin in self._pins:
                self._daemon.submit(Call(pin, lambda result: None, self.id))

    def break_off(self, error: TierKVError) -> None:
        """Nothing of the session is left: every further step raises `error`."""
        with self._changed:
            self._troubles.broken = error
            self._residency.let_go()
            self._changed.notify_all()

    # Inside ------------------------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        if self._residency.adopt():
            self._daemon.adopted(self.id, self._residency.version, self._fence)

    def _damaged(self, page: int) -> None:
        op = Recall(self.id, [page], [1.0], DAMAGE_SECONDS)  # a mass for which others give way
        self._pressing = True
        self._daemon.submit(Call(op, lambda result: None, self.id), wake=not self._in_step)

    def _check(self) -> None:
        self._daemon.check_process()
        if self._closed:
            raise UnknownSession(f"session {self.id} is closed")

    def _ready(self, tokens: int, deadline: float, regions: Sequence[Run]) -> tuple[list[Span], list[Run]]:
        """Adopt plans and wait until the pages of `tokens` new tokens are reserved; how they will be laid out."""
        self._in_flight.forget_refusal()
        self._expected = 0  # this is the step, even if it fails
        while True:
            self._check()
            self._troubles.check()
            self._adopt()
            spans = self._labels.preview(tokens, regions)
            runs = [Run(span.region, span.tokens) for span in spans]
            missing = self._residency.missing(runs)
            if missing <= 0 and not self._in_flight.full:
                return spans, runs
            self._in_flight.wait_for_pages(missing, deadline)

    def _lacking(self) -> int:
        """Pages to ask for ahead: of the step that is expected, else those that a session keeps beyond its need."""
        if not self._expected:
            return self._daemon.reserve_ahead - len(self._residency.blanks)
        return self._residency.missing(
            Run(span.region, span.tokens) for span in self._labels.preview(self._expected)
        )

    def _commit_failed(self, error: TierKVError) -> None:
        if not self._closed:
            self._troubles.broke(error)

    def _observation_failed(self, error: TierKVError) -> None:
        if not self._closed:
            self._troubles.told(error)

    def _cropped(self, result: Result, answer: Future[Result]) -> None:
        with self._changed:
            self._cropping = False
            if isinstance(result, Table):
                self._residency.install(result.table)
                self._horizon = result.table.length
                self._troubles.cropped(self._horizon)
                self._pins = [p for p in self._pins if p.start < self._horizon]
                self._daemon.adopted(self.id, self._residency.version, self._fence)
        give(answer, result)

    def _ask(self, op: Pin | Hint, what: str) -> None:
        """One request that is waited for and changes no table."""
        deadline = time.monotonic() + self._daemon.timeout
        answer: Future[Result] = Future()
        with self._changed:
            self._check()
            self._daemon.submit(Call(op, partial(give, answer), self.id))
        self._result(answer, deadline, what)

    def _result(self, answer: Future[Result], deadline: float, what: str) -> None:
        result = wait_for(answer, deadline, self._daemon, what)
        if not isinstance(result, (Done, Table)):
            raise failed(result)
