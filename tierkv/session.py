"""One sequence of one worker: its page table, its tentative tokens, and what it asks of the daemon.

A step is `begin` (lay new tokens out), writing K/V into `slots`, reading `rows`, then `commit` (or `rollback`), maybe
`observe`, and `end`. Inside a step the table stands still; plans of the daemon are adopted at `begin`, and between
`end` and `begin` by the client's own thread, so that a paused session never keeps memory from being reused.

Reserved pages ("blanks") are taken in the order given. A commit names runs of (region, tokens) only; the daemon lays
them out by the same rule over the same blanks. Commits and observations are not waited for: they leave when the
step ends, and when one fails, the next `begin` raises.

Threads: a session belongs to one caller at a time; the client's thread joins in under the session's lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import (
    Backpressure,
    OwnerUnavailable,
    PagesLost,
    RequestError,
    TierKVError,
    UnknownSession,
    from_wire,
)
from tierkv.geometry import Geometry
from tierkv.labels import Labels, Span
from tierkv.line import Call
from tierkv.pool import checksum, codec_state
from tierkv.protocol import (
    Audit,
    BlankPage,
    Close,
    Commit,
    Crop,
    Done,
    Failure,
    Fork,
    GeometryFields,
    Observe,
    Open,
    PageEntry,
    Pin,
    Plan,
    Ready,
    Recall,
    Reserve,
    Reserved,
    Result,
    SessionOptions,
    SessionState,
    Table,
    TableState,
)
from tierkv.regions import Region, Run, parse_region
from tierkv.rows import ColdRows, PageRows, PageTable
from tierkv.table import Kind, lay_out, pages_needed
from tierkv.waiting import failed, give, refuse
from tierkv.waiting import wait as wait_for

if (
    TYPE_CHECKING
):  # attention imports torch and codecs numba: seconds, which a worker's other calls need not pay
    from tierkv.attention.contract import PoolView

MAX_UNANSWERED = 256
"""Commits and observations in flight; `begin` waits beyond."""

LEAST_RETRY_SECONDS = 0.001
UNTOLD_RETRY_SECONDS = 0.05
"""Wait before asking again where the daemon named none."""

DAMAGE_SECONDS = 1.0
"""How long the daemon looks for room to bring a damaged page back, by which it finds the damage."""

RETRYABLE = (Backpressure, OwnerUnavailable)


class Daemon(Protocol):
    """What a session needs of its client."""

    timeout: float
    reserve_ahead: int

    @property
    def page_tokens(self) -> int: ...

    @property
    def straddle(self) -> bool: ...

    @property
    def observe_every(self) -> int: ...

    @property
    def codec(self) -> str: ...

    def check_process(self) -> None: ...

    def submit(self, call: Call, wake: bool = True) -> None: ...

    def flush(self) -> None:
        """Send what was submitted without `wake`."""
        ...

    def adopted(self, session: int, version: int) -> None:
        """A plan is in use: acknowledge it soon."""
        ...

    @property
    def digest_layers(self) -> int: ...

    def hbm(self) -> NDArray[np.uint8]: ...

    def host(self) -> NDArray[np.uint8]: ...

    def forget(self, session: int) -> None: ...

    def enroll(self, session: Session) -> None: ...

    def unavailable(self, what: str) -> OwnerUnavailable:
        """The error for a wait that ended without an answer."""
        ...


NO_COLD_ROWS = ColdRows(
    np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int8),
    np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.bool_),
)  # fmt: skip


class Session:
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
        self.observe_every = daemon.observe_every
        self.step = step
        """Decode steps so far (MemDecay's t)."""
        self.lost: list[tuple[int, int]] = []
        """Token ranges that no replica holds: `crop` below them and prefill again."""
        self._daemon = daemon
        self._changed = threading.Condition(threading.RLock())
        self._labels = Labels()
        self._plans: list[Plan] = []
        self._pins: list[Pin] = []
        self._in_step = False
        self._closed = False
        self._error: TierKVError | None = None
        self._broken: TierKVError | None = None
        self._numbers = 0
        self._unanswered = 0
        self._reserving = False
        self._cropping = False
        self._refusal: TierKVError | None = None
        self._retry_at = 0.0
        self._view: PoolView | None = None
        self._horizon = 0
        self._table = PageTable()
        self._install(table)

    # Table -------------------------------------------------------------------------------------------------------

    @property
    def horizon(self) -> int:
        """Committed tokens."""
        return self._horizon

    @property
    def length(self) -> int:
        """Committed and tentative tokens."""
        return self._table.tokens

    @property
    def hbm_budget(self) -> int:
        """Most bytes of HBM that the session may hold; 0: no bound of its own."""
        return self.options.hbm_budget

    @property
    def version(self) -> int:
        """Version of the page table in use."""
        return self._version

    @property
    def pool(self) -> PoolView:
        """The HBM pool as attention reads it."""
        view = self._view
        if view is None:
            from tierkv import quant
            from tierkv.attention.contract import PoolView

            codec = quant.get(self._daemon.codec)
            data = self._daemon.hbm()
            state = codec_state(data, self._codec_state, codec.state_floats(self.geometry))
            layers = min(self._daemon.digest_layers, self.geometry.num_layers)
            view = self._view = PoolView(data, self.geometry, codec, state, layers)
        return view

    @property
    def host(self) -> PoolView:
        """The host pool, read-only, as attention reads cold pages in place."""
        return self.pool._replace(data=self._daemon.host())

    def slots(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """For each token of `[start, stop)`: byte offset of its page in the pool, and its slot in the page.

        Raises:
            ValueError: a token is not in an exact HBM page (newly begun ones always are).
        """
        with self._changed:
            if not 0 <= start <= stop <= self.length:
                raise ValueError(f"tokens [{start}, {stop}) are not within the session's {self.length}")
            return self._table.slots(start, stop)

    def rows(self, stop: int) -> PageRows:
        """Attendable pages that hold tokens `[0, stop)`, in token order; the arrays are the caller's."""
        with self._changed:
            return self._table.rows(stop)

    @property
    def has_cold(self) -> bool:
        """Some page has no replica in HBM."""
        return self._table.away > 0

    @property
    def cold_pages(self) -> int:
        """Pages without a replica in HBM."""
        return self._table.away

    def cold(self, stop: int) -> ColdRows:
        """Cold pages that hold tokens `[0, stop)` and can be read in host memory, in token order.

        Their bytes are verified against the checksum the first time. A damaged page is left out, and the daemon is
        asked to bring it back, which makes it find the damage too and count the page as lost.
        """
        with self._changed:
            if not self._table.away:
                return NO_COLD_ROWS
            return self._table.cold(stop, self._verify)

    def exact(self, stop: int, most: int) -> tuple[PageRows, ColdRows] | None:
        """Pages of tokens `[0, stop)` that are exact in HBM, and those to be read from host, where low-bit pages lie
        exactly, too. `None` where the latter are more than `most`, or none.
        """
        with self._changed:
            found = self._table.exact(stop, self._verify, most)
            return None if found is None or not len(found[1].pages) else found

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
            self._lay_out(spans, runs)

    def commit(self, token_ids: NDArray[np.int32] | None = None, *, steps: int = 0) -> None:
        """All tentative tokens become final. Not waited for.

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
            self._submit(Commit(self.id, self._horizon, runs, steps, ids), [], fatal=True)

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
                self._submit(Observe(self.id, self.step, self._horizon, audit), [raw], fatal=False)

    def end(self) -> None:
        """The step is over: until the next `begin`, the client's thread may adopt plans."""
        with self._changed:
            self._in_step = False
            self._adopt()
            self._reserve_ahead()
            self._daemon.flush()
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
            gone = self._table.cut(length)
            self._blanks.extendleft(BlankPage(page, offset) for page, offset in reversed(gone))

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
                self._settle(deadline)
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
        deadline = time.monotonic() + self._daemon.timeout + seconds
        answer: Future[Result] = Future()
        with self._changed:
            self._check()
            op = Recall(self.id, list(pages), list(masses), seconds)
            if not wait:
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
            while self._version < result.version and self._broken is None and time.monotonic() < deadline:
                self._changed.wait(max(LEAST_RETRY_SECONDS, deadline - time.monotonic()))
                self._adopt()

    def fork(self) -> Session:
        """A session that shares the committed pages and goes its own way. Tentative tokens are not in it."""
        with self._changed:
            self._check()
            self._raise_earlier()
            step, pins, verified = self.step, list(self._pins), self._table

        def child(table: TableState) -> Session:
            session = Session(self._daemon, table, self.geometry, self.model_id, self.options, step)
            session._table.trust(verified)
            session._pins = [Pin(session.id, pin.start, pin.stop, pin.level) for pin in pins]
            return session

        return make_session(self._daemon, Fork(self.id), child, self.id)

    def pin(self, start: int, stop: int, level: str = "attendable") -> None:
        """Keep pages that hold tokens `[start, stop)` `attendable` or `exact`; `none` lifts the pin."""
        deadline = time.monotonic() + self._daemon.timeout
        answer: Future[Result] = Future()
        with self._changed:
            self._check()
            op = Pin(self.id, start, stop, level)
            self._daemon.submit(Call(op, partial(give, answer), self.id))
        self._result(answer, deadline, "pin")
        with self._changed:
            self._pins = [p for p in self._pins if not start <= p.start <= p.stop <= stop]
            if level != "none":
                self._pins.append(op)

    def close(self) -> None:
        """Give every page back. Not waited for; closing twice does nothing."""
        with self._changed:
            if self._closed:
                return
            self._daemon.check_process()
            self._closed = True
            self._in_step = False
            self._daemon.forget(self.id)
            if self._broken is None or not isinstance(self._broken, PagesLost):
                self._daemon.submit(Call(Close(self.id), lambda result: None, self.id))
            self._changed.notify_all()

    # For the client's thread -------------------------------------------------------------------------------------

    def offer(self, plan: Plan) -> None:
        """A plan arrived: adopted now when the session is between steps, else at the next `begin`."""
        with self._changed:
            self._plans.append(plan)
            if not self._in_step:
                self._adopt()
            self._changed.notify_all()

    def state(self) -> tuple[SessionState, int]:
        """What a new owner adopts, and the number of the last commit or observation that it contains.

        Plans of the dead owner that were not adopted are dropped: nobody will reuse what they would have freed.
        """
        with self._changed:
            self._plans.clear()
            rows = self._table.entries(self._horizon)
            blanks = [BlankPage(page, offset) for page, offset in self._table.after(self._horizon)]
            table = TableState(
                self.id, self._version, self._horizon, rows, blanks + list(self._blanks), self._codec_state,
                len(rows) > self._sealed_rows,
            )  # fmt: skip
            g = self.geometry
            fields = GeometryFields(g.num_layers, g.num_kv_heads, g.head_dim, g.dtype, g.page_tokens)
            return SessionState(table, self.model_id, fields, self.options, self.step), self._numbers

    def carried_over(self, lost: Iterable[tuple[int, int]]) -> None:
        """A new owner adopted the session, but for `lost`. Pins of token ranges are told again."""
        with self._changed:
            self.lost += lost
            for pin in self._pins:
                self._daemon.submit(Call(pin, lambda result: None, self.id))

    def break_off(self, error: TierKVError) -> None:
        """Nothing of the session is left: every further step raises `error`."""
        with self._changed:
            self._broken = error
            self._plans.clear()
            self._changed.notify_all()

    # Inside ------------------------------------------------------------------------------------------------------

    def _install(self, table: TableState) -> None:
        before, self._table = self._table, PageTable()
        for entry in table.pages:
            self._table.append(entry)
        self._table.trust(before)
        self._sealed_rows = self._table.length - int(table.tail_open)
        self._horizon = table.length
        self._blanks: deque[BlankPage] = deque(table.blanks)
        self._version = table.version
        self._codec_state = table.codec_state
        self._view = None
        self._plans = [plan for plan in self._plans if plan.version > self._version]

    def _adopt(self) -> None:
        if not self._plans:
            return
        for plan in self._plans:
            if plan.version <= self._version:
                continue
            for change in plan.changes:
                self._table.change(change)
            self._version = plan.version
            if plan.codec_state != self._codec_state:
                self._codec_state = plan.codec_state
                self._view = None
        self._plans.clear()
        self._daemon.adopted(self.id, self._version)

    def _verify(self, page: int, kind: int, offset: int, expected: int) -> bool:
        """Whether a host replica's bytes are what was stored under the page's id."""
        from tierkv import quant

        geometry = self.geometry
        exact = kind == Kind.EXACT
        size = geometry.page_bytes if exact else quant.get(self._daemon.codec).page_bytes(geometry)
        good = checksum(self._daemon.host()[offset : offset + size], page) == expected
        if not good:
            op = Recall(self.id, [page], [1.0], DAMAGE_SECONDS)  # a mass for which others give way
            self._daemon.submit(Call(op, lambda result: None, self.id), wake=not self._in_step)
        return good

    def _check(self) -> None:
        self._daemon.check_process()
        if self._closed:
            raise UnknownSession(f"session {self.id} is closed")

    def _raise_earlier(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self.lost:
            raise PagesLost(
                f"the daemon lost tokens {self.lost} of session {self.id}: crop to {self.lost[0][0]} and prefill again",
                tuple(self.lost),
            )
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _rule(self) -> tuple[int, bool]:
        return self._daemon.page_tokens, self._daemon.straddle

    def _tail(self) -> tuple[Region | None, int]:
        return self._table.last() if self._table.length > self._sealed_rows else (None, 0)

    def _lay_out(self, spans: list[Span], runs: list[Run]) -> None:
        self._labels.take(spans)
        for place in lay_out(*self._tail(), runs, *self._rule()):
            if place.fresh:
                blank = self._blanks.popleft()
                self._table.append(PageEntry(blank.page, place.region, 0, Kind.EXACT, blank.offset))
            self._table.grow_last(place.tokens)

    def _ready(self, tokens: int, deadline: float, regions: Sequence[Run]) -> tuple[list[Span], list[Run]]:
        """Adopt plans and wait until the pages of `tokens` new tokens are reserved; how they will be laid out."""
        self._refusal = None
        while True:
            self._check()
            self._raise_earlier()
            self._adopt()
            spans = self._labels.preview(tokens, regions)
            runs = [Run(span.region, span.tokens) for span in spans]
            missing = pages_needed(*self._tail(), runs, *self._rule()) - len(self._blanks)
            if missing <= 0 and self._unanswered < MAX_UNANSWERED:
                return spans, runs
            self._wait_for_pages(missing, deadline)

    def _wait_for_pages(self, missing: int, deadline: float) -> None:
        """Ask for pages, or wait for what was asked; one request at a time, so that blanks keep their order."""
        now = time.monotonic()
        if self._refusal is not None and not isinstance(self._refusal, RETRYABLE):
            raise self._refusal
        if now >= deadline:
            raise self._refusal or self._daemon.unavailable(f"{missing} pages for session {self.id}")
        if missing > 0 and not self._reserving and now >= self._retry_at:
            self._reserve(missing)
        self._daemon.flush()
        wake = deadline if self._reserving or missing <= 0 else min(deadline, self._retry_at)
        self._changed.wait(max(LEAST_RETRY_SECONDS, wake - now))

    def _reserve_ahead(self) -> None:
        missing = self._daemon.reserve_ahead - len(self._blanks)
        usable = not (self._closed or self._cropping or self._reserving or self._broken)
        if missing > 0 and usable and time.monotonic() >= self._retry_at:
            self._reserve(missing)

    def _reserve(self, pages: int) -> None:
        self._reserving = True
        self._daemon.submit(Call(Reserve(self.id, pages), self._reserved, self.id))

    def _reserved(self, result: Result) -> None:
        with self._changed:
            self._reserving = False
            if isinstance(result, Reserved):
                self._blanks.extend(result.blanks)
                self._refusal = None
            else:
                self._refusal = failed(result)
                told = (
                    self._refusal.retry_after
                    if isinstance(self._refusal, Backpressure)
                    else UNTOLD_RETRY_SECONDS
                )
                self._retry_at = time.monotonic() + max(told, LEAST_RETRY_SECONDS)
            self._changed.notify_all()

    def _submit(self, op: Commit | Observe, buffers: list[bytes], fatal: bool) -> None:
        self._numbers += 1
        self._unanswered += 1
        call = Call(op, lambda result: self._answered(result, fatal), self.id, self._numbers, buffers)
        self._daemon.submit(call, wake=not self._in_step)  # `end` wakes the line once for the whole step

    def _answered(self, result: Result, fatal: bool) -> None:
        """A failed commit breaks the session, whose table is not the daemon's any more; an observation is told once."""
        with self._changed:
            self._unanswered -= 1
            if isinstance(result, Failure) and not self._closed:
                error = from_wire(result.code, result.message, result.retry_after)
                if fatal:
                    self._broken = self._broken or error
                else:
                    self._error = error
            self._changed.notify_all()

    def _settle(self, deadline: float) -> None:
        """Wait until everything that was asked before is answered."""
        self._daemon.flush()
        while self._reserving or self._unanswered:
            if time.monotonic() >= deadline:
                raise self._daemon.unavailable(f"earlier requests of session {self.id}")
            self._changed.wait(max(LEAST_RETRY_SECONDS, deadline - time.monotonic()))

    def _cropped(self, result: Result, answer: Future[Result]) -> None:
        with self._changed:
            self._cropping = False
            if isinstance(result, Table):
                self._install(result.table)
                self.lost = [
                    (start, min(stop, self._horizon)) for start, stop in self.lost if start < self._horizon
                ]
                self._pins = [p for p in self._pins if p.start < self._horizon]
                self._daemon.adopted(self.id, self._version)
        give(answer, result)

    def _result(self, answer: Future[Result], deadline: float, what: str) -> None:
        result = wait_for(answer, deadline, self._daemon, what)
        if not isinstance(result, (Done, Table)):
            raise failed(result)


def make_session(
    daemon: Daemon, op: Open | Fork, make: Callable[[TableState], Session], parent: int = -1
) -> Session:
    """Ask for a session until there is room for it or the client's timeout passes."""
    deadline = time.monotonic() + daemon.timeout
    while True:
        answer: Future[Session] = Future()

        def answered(result: Result, answer: Future[Session] = answer) -> None:
            if not isinstance(result, Table):
                refuse(answer, failed(result))
                return
            session = make(result.table)
            daemon.enroll(session)
            if not give(answer, session):  # the caller has stopped waiting
                session.close()

        daemon.submit(Call(op, answered, parent, deadline=deadline))
        try:
            return wait_for(answer, deadline, daemon, "fork" if isinstance(op, Fork) else "open")
        except Backpressure as refusal:
            if time.monotonic() + refusal.retry_after >= deadline:
                raise
            time.sleep(max(refusal.retry_after, LEAST_RETRY_SECONDS))
