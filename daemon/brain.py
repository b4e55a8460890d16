"""The brain: events in, instructions out. It does no I/O, reads no clock, starts no thread; the same events give the
same instructions, so a log of events is a replay (`replay`).

    reserved -> open (worker writes) -> sealed -> {hbm} -> {hbm, host} -> {quantized, host} -> {host} -> {} dropped
                                         ^________________ promote: re-creates an HBM replica ________|

`handle(event, now)` changes the state, lets `Pressure` start the moves that are due, and returns what the shell must
do: copy bytes (answered by `MoveDone` or `MoveFailed`), send plans, answer requests. One thread calls it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tierkv.daemon import events, late
from tierkv.daemon.acts import Act
from tierkv.daemon.adoption import Adoption
from tierkv.daemon.brain_config import BrainConfig
from tierkv.daemon.events import Answer, Event, Instruction
from tierkv.daemon.explain import explain
from tierkv.daemon.failures import refusal
from tierkv.daemon.frames import RETRY_AFTER_SECONDS, Frames
from tierkv.daemon.hints import Hints
from tierkv.daemon.integrity import check_integrity
from tierkv.daemon.model_states import open_model
from tierkv.daemon.moves import Moves
from tierkv.daemon.pages import Guard, Ladder
from tierkv.daemon.pins import PIN_LEVELS, Pins
from tierkv.daemon.pressure import Pressure
from tierkv.daemon.promotion import Promotion
from tierkv.daemon.recall import Recall
from tierkv.daemon.returns import Returns
from tierkv.daemon.scoring import Scores
from tierkv.daemon.sessions import Client, Session
from tierkv.daemon.snapshot import Snapshot, figures, session_stats, take_snapshot
from tierkv.daemon.state import State
from tierkv.errors import (
    Backpressure,
    BudgetTooSmall,
    ConfigError,
    OutOfCapacity,
    RequestError,
    TierKVError,
)
from tierkv.figures import SessionFigures
from tierkv.protocol import BlankPage, Done, Explained, Failure, Reserved, Table
from tierkv.regions import Region, parse_region
from tierkv.table import NOWHERE, lay_out, pages_needed

LEAST_BUDGET_PAGES = 3
"""One written, one that becomes low-bit, one to write next: with less a session would stop."""

LADDERS = {"exact": Ladder.EXACT, "drop": Ladder.DROP, "tiered": Ladder.TIERED}


class Brain:
    """The state machine of one owner.

    With `validate=True` every event is followed by `check_integrity` (tests, simulations).
    """

    def __init__(self, config: BrainConfig, validate: bool = False) -> None:
        self.config = config
        self.state = State(config)
        self.moves = Moves(self.state)
        self.pins = Pins(self.state)
        self.scores = Scores(self.state)
        self.pressure = Pressure(self.state, self.moves, self.scores)
        self.frames = Frames(self.state, self.pressure)
        self.recall = Recall(self.state, self.moves, self.pressure, self.scores)
        self.promotion = Promotion(self.state, self.moves, self.pressure, self.scores, self.recall)
        self.returns = Returns(self.state, self.moves, self.pressure, self.scores, self.recall)
        self.hints = Hints(self.state, self.pins, self.returns)
        self.adoption = Adoption(self.state)
        self.log: deque[tuple[float, Event]] = deque(maxlen=config.log_events)
        self._validate = validate
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.Attached: self._attached,
            events.AdoptionEnded: self._adoption_ended,
            events.Opened: self._opened,
            events.Forked: self._forked,
            events.Cropped: self._cropped,
            events.Closed: self._closed,
            events.Reserved: self._reserved,
            events.Committed: self._committed,
            events.Observed: self._observed,
            events.Recalled: self._recalled,
            events.Pinned: self._pinned,
            events.Hinted: self._hinted,
            events.Acked: self._acked,
            events.LeaseExpired: self._lease_expired,
            events.LeaseRenewed: self._lease_renewed,
            events.WorkerDied: self._worker_died,
            events.Draining: self._draining,
            events.MoveDone: self._move_done,
            events.MoveFailed: self._move_failed,
            events.Tick: self._tick,
        }

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """One event at `now` (seconds, monotonic). A request that cannot be served is answered with a `Failure`."""
        self.log.append((now, event))
        state = self.state
        state.now = now
        try:
            self._handlers[type(event)](event)
        except TierKVError as error:
            self._answer(getattr(event, "request", 0), refusal(error))
        if not self.adoption.pending:
            self.pressure.relieve()
            self.recall.advance()
            if isinstance(event, events.MoveDone):
                self.promotion.resume()
            self.returns.advance()
        state.flush()
        out, state.out = state.out, []
        if self._validate:
            self.check_integrity()
        return out

    @classmethod
    def replay(cls, config: BrainConfig, log: Iterable[tuple[float, Event]]) -> Brain:
        """A brain that has seen the events of a log (post-mortem)."""
        brain = cls(config)
        for now, event in log:
            brain.handle(event, now)
        return brain

    def check_integrity(self) -> None:
        """Every byte is free, owned by exactly one replica, or retiring; raises AssertionError otherwise."""
        check_integrity(self.state, self.moves)

    def snapshot(self) -> Snapshot:
        """Numbers for metrics and `stats`, as of the last event."""
        return take_snapshot(self.state, self.moves, adopting=self.adoption.pending)

    def session_stats(self, session: int) -> dict[str, float]:
        """The same for one session. Raises `UnknownSession`."""
        return session_stats(self.state, session)

    def sessions(self) -> list[SessionFigures]:
        """Every session's figures, in the order of their ids."""
        return [figures(self.state, session) for _, session in sorted(self.state.sessions.items())]

    def explain(self, session: int, page: int = -1, token: int = -1) -> Explained:
        """Why one page is where it is, as of the last event (`explain.explain`). Changes nothing, and is in no log."""
        return explain(self.state, session, page, token)

    def _answer(self, request: int, result: Any) -> None:
        if request:
            self.state.out.append(Answer(request, result))

    # Workers -------------------------------------------------------------------------------------------------

    def _attached(self, event: events.Attached) -> None:
        self.state.clients.setdefault(event.client, Client(event.client))
        lost: list[tuple[int, int, int]] = []
        fitted_first = sorted(event.sessions, key=lambda handed: handed.table.codec_state == NOWHERE)
        for handed in fitted_first:  # one that had not heard yet then finds its family's model
            try:
                ladder, pins = self._ladder(handed.options.ladder), self._region_pins(handed.options.pins)
                lost += self.adoption.adopt(event.client, handed, ladder, pins)
            except TierKVError:
                lost.append((handed.table.session, 0, handed.table.length))
        if event.sessions:
            self.state.out.append(events.Adopted(event.client, tuple(lost)))

    def _adoption_ended(self, event: events.AdoptionEnded) -> None:
        self.adoption.end()

    def _acked(self, event: events.Acked) -> None:
        session = self.state.sessions.get(event.session)
        if session is not None and session.client == event.client:
            self.state.acknowledge(session, event.version)

    def _lease_expired(self, event: events.LeaseExpired) -> None:
        self._quarantine(event.client, True)

    def _lease_renewed(self, event: events.LeaseRenewed) -> None:
        self._quarantine(event.client, False)

    def _quarantine(self, name: str, quarantined: bool) -> None:
        """A silent worker acknowledges nothing, so nothing it can see is reused; no further page of it is moved."""
        client = self.state.clients.get(name)
        if client is not None:
            client.quarantined = quarantined
            for session in client.sessions:
                self.state.sessions[session].stale = True

    def _worker_died(self, event: events.WorkerDied) -> None:
        client = self.state.clients.get(event.client)
        if client is None:
            return
        for session in sorted(client.sessions):
            self.state.close(self.state.sessions[session])
        del self.state.clients[event.client]

    def _draining(self, event: events.Draining) -> None:
        self.state.draining = True

    # Sessions ------------------------------------------------------------------------------------------------

    def _ladder(self, name: str) -> Ladder:
        if name not in LADDERS:
            raise ConfigError(f"ladder {name!r} does not exist; use one of {', '.join(LADDERS)}")
        return LADDERS[name]

    def _region_pins(self, pins: dict[str, str] | None) -> dict[Region, Guard]:
        chosen = dict(self.config.pins) if pins is None else pins
        unknown = sorted(set(chosen.values()) - set(PIN_LEVELS))
        if unknown:
            raise ConfigError(f"pin level {unknown[0]!r} does not exist; use one of {', '.join(PIN_LEVELS)}")
        return {parse_region(region): PIN_LEVELS[level] for region, level in chosen.items()}

    def _admit(self) -> None:
        if self.state.draining:
            raise OutOfCapacity(
                "the daemon is draining: it admits no session and no page; wait for its successor"
            )
        if self.adoption.pending:
            raise Backpressure("waiting for the workers of an earlier owner", RETRY_AFTER_SECONDS * 10)

    def _opened(self, event: events.Opened) -> None:
        self._admit()
        state, options = self.state, event.options
        ladder, pins = self._ladder(options.ladder), self._region_pins(options.pins)
        model = open_model(state, event.model_id, event.geometry)
        if model is None:
            raise self.frames.full()
        if options.hbm_budget and options.hbm_budget < LEAST_BUDGET_PAGES * model.exact.frame:
            state.forget_model(model)
            raise BudgetTooSmall(
                f"hbm_budget is {options.hbm_budget:,} bytes; {LEAST_BUDGET_PAGES} pages of "
                f"{model.exact.frame:,} bytes are the least"
            )
        session = Session(
            state.new_session_id(),
            event.client,
            model,
            options,
            ladder,
            pins,
            state.policy.new_state(),
            set(),
        )
        session.active_at = state.now
        state.enroll(session)
        self._introduce(session, event.request)

    def _forked(self, event: events.Forked) -> None:
        self._admit()
        state, pages = self.state, self.state.pages
        parent = state.session(event.session, event.client)
        model = parent.model
        tail = int(parent.pages.view[-1]) if parent.tail_open else NOWHERE
        frame = state.hbm.allocate(model.exact) if tail != NOWHERE else NOWHERE
        if frame is None:
            self.pressure.ask(parent, model.exact.frame)
            raise self.frames.full()
        child = Session(
            state.new_session_id(), parent.client, model, parent.options, parent.ladder, parent.region_pins,
            parent.tokens.copy(), parent.family,
            pages=parent.pages.copy(), starts=parent.starts.copy(), counts=parent.counts.copy(),
            tail_open=parent.tail_open, length=parent.length, step=parent.step, active_at=state.now,
            step_rate=parent.step_rate, token_ids=list(parent.token_ids),
        )  # fmt: skip
        state.enroll(child)
        for slot in child.pages.view.tolist():
            if slot != tail:
                state.share(slot, child)
        state.mark_absence(child)
        if tail == NOWHERE:
            self._introduce(child, event.request)
            return
        copy = pages.add(state.new_page_id(), model.index, child.id, frame, int(child.ladder))
        pages.region[copy], pages.count[copy], pages.pin[copy] = pages.region[tail], pages.count[tail], 0
        child.pages.set_last(copy)
        self.moves.launch.fork(tail, copy, event.request)

    def _cropped(self, event: events.Cropped) -> None:
        state = self.state
        session = state.session(event.session, event.client)
        if not 0 <= event.length <= session.length:
            raise RequestError(
                f"cannot crop session {session.id} to {event.length} tokens: {session.length} are committed"
            )
        self.hints.stepped(session)
        self._cut(session, event.length)
        if state.paused_within(session.family):  # they may be alone with pages now
            state.mark_absence(session)
        self.hints.cropped(session)
        session.stale, session.active_at = True, state.now
        self._answer(event.request, Table(state.table(session)))

    def _cut(self, session: Session, length: int) -> None:
        """Forget tokens from `length` on. A sealed page keeps its bytes and is read short: no copy is needed."""
        state, pages = self.state, self.state.pages
        while len(session.pages) and session.starts.view[-1] >= length:
            state.unname(int(session.pages.view[-1]), session)
            rows = len(session.pages) - 1
            for column in (session.pages, session.starts, session.counts):
                column.cut(rows)
            session.tail_open = False
        if len(session.pages):
            kept = length - int(session.starts.view[-1])
            session.counts.set_last(kept)
            last = int(session.pages.view[-1])
            session.tail_open = not pages.sealed[last]
            if session.tail_open:
                pages.count[last] = kept
        session.length = length
        session.tokens.truncate(length)
        session.token_ids = _truncate(session.token_ids, length)

    def _closed(self, event: events.Closed) -> None:
        self.state.close(self.state.session(event.session, event.client))
        self._answer(event.request, Done())

    # Pages ---------------------------------------------------------------------------------------------------

    def _reserved(self, event: events.Reserved) -> None:
        self._admit()
        state, model = self.state, self.state.session(event.session, event.client).model
        session = state.sessions[event.session]
        self.hints.stepped(session)
        session.active_at = state.now
        if event.pages < 1:
            raise RequestError(f"cannot reserve {event.pages} pages; at least one")
        blanks = []
        for offset in self.frames.take(session, event.pages):
            page = state.new_page_id()
            slot = state.pages.add(page, model.index, session.id, offset, int(session.ladder))
            session.blanks.append(slot)
            blanks.append(BlankPage(page, offset))
        self._answer(event.request, Reserved(blanks))

    def _committed(self, event: events.Committed) -> None:
        state, pages = self.state, self.state.pages
        session = state.session(event.session, event.client)
        tokens = sum(run.tokens for run in event.runs)
        if any(run.tokens < 1 for run in event.runs) or session.length + tokens != event.length:
            raise RequestError(
                f"commit to {event.length} tokens: {session.length} are committed and the runs add {tokens}"
            )
        if event.steps < 0 or (len(event.token_ids) and len(event.token_ids) != tokens):
            raise RequestError(
                f"commit of {tokens} tokens with {len(event.token_ids)} ids and {event.steps} steps"
            )
        tail = int(session.pages.view[-1]) if session.tail_open else NOWHERE
        tail_region = Region(int(pages.region[tail])) if tail != NOWHERE else None
        tail_count = int(session.counts.view[-1]) if tail != NOWHERE else 0
        layout = (tail_region, tail_count, event.runs, self.config.page_tokens, self.config.straddle)
        needed = pages_needed(*layout)
        if needed > len(session.blanks):
            raise RequestError(
                f"the tokens need {needed} pages; session {session.id} has {len(session.blanks)} reserved"
            )
        for placement in lay_out(*layout):
            if placement.fresh:
                if session.tail_open:
                    self._seal(session, int(session.pages.view[-1]))
                slot = session.blanks.popleft()
                pages.region[slot] = placement.region
                session.pages.append(slot)
                session.starts.append(session.length)
                session.counts.append(0)
                session.tail_open = True
            slot, count = int(session.pages.view[-1]), placement.first + placement.tokens
            pages.count[slot] = count
            session.counts.set_last(count)
            session.length += placement.tokens
            if count == self.config.page_tokens:
                self._seal(session, slot)
        regions = np.repeat([run.region for run in event.runs], [run.tokens for run in event.runs]).astype(
            np.int8
        )
        session.tokens.append(regions, session.step)
        if len(event.token_ids):
            session.token_ids.append(event.token_ids)
        self.hints.stepped(session)
        session.stepped(event.steps, state.now)
        self._answer(event.request, Done())

    def _seal(self, session: Session, slot: int) -> None:
        """The page takes no more tokens: it may be backed up and moved from now on."""
        pages = self.state.pages
        pages.sealed[slot] = True
        session.tail_open = False
        self.pins.pin(slot, session.region_pins.get(Region(int(pages.region[slot])), Guard.NONE), session)
        if session.ladder is Ladder.TIERED and self.config.backup == "on_seal" and not self.moves.full():
            self.moves.launch.backup(slot)

    # Scores and pins -----------------------------------------------------------------------------------------

    def _observed(self, event: events.Observed) -> None:
        session = self.state.session(event.session, event.client)
        if len(event.mass) > session.length:
            raise RequestError(f"observation of {len(event.mass)} tokens; {session.length} are committed")
        seen = (event.step, len(event.mass))
        if seen > session.observed:  # a touch counts once a step
            session.observed = seen
            session.tokens.observe(event.mass, session.step)
            session.stale = True
            self.recall.observed(session, event.mass)
            if event.audit is not None:
                self.state.counters.audited(event.audit)
                session.ledger.audited(event.audit)
            self.state.counters.blocked_seconds += event.blocked
            session.ledger.blocked_seconds += event.blocked
        self._answer(event.request, Done())

    def _recalled(self, event: events.Recalled) -> None:
        self.hints.stepped(self.state.session(event.session, event.client))
        self.recall.ask(
            event
        )  # while workers are still waited for it waits; while draining, too, pages come back

    def _pinned(self, event: events.Pinned) -> None:
        session = self.state.session(event.session, event.client)
        if event.level not in PIN_LEVELS:
            raise RequestError(
                f"pin level {event.level!r} does not exist; use one of {', '.join(PIN_LEVELS)}"
            )
        if not 0 <= event.start < event.stop <= session.length:
            raise RequestError(f"tokens [{event.start}, {event.stop}) of {session.length} cannot be pinned")
        level = PIN_LEVELS[event.level]
        rows = range(session.row_of(event.start), session.row_of(event.stop - 1) + 1)
        for row in rows:
            if not self.pins.pin(int(session.pages.view[row]), level, session):
                raise OutOfCapacity(
                    f"pins may hold {self.config.pin_quota:.0%} of HBM; that is used up: lift one or raise pin_quota"
                )
        session.stale = True
        self._answer(event.request, Done())

    def _hinted(self, event: events.Hinted) -> None:
        self.hints.take(event)
        self._answer(event.request, Done())

    # Moves and time ------------------------------------------------------------------------------------------

    def _move_done(self, event: events.MoveDone) -> None:
        move = self.moves.complete(event.move, event.checksum)
        if move is not None and event.errors is not None:
            self.state.counters.measured(event.errors)
        if move is not None and move.act is Act.FORK:
            session = self._forked_session(move.others[0])
            if session is not None:
                self._introduce(session, move.request)

    def _introduce(self, session: Session, request: int) -> None:
        """Hand a new session to its worker, which can have read no version before this one."""
        table = self.state.table(session)
        self.state.acknowledge(session, table.version)
        self._answer(request, Table(table))

    def _move_failed(self, event: events.MoveFailed) -> None:
        move = self.moves.fail(event.move, event.reason)
        if move is not None and move.act is Act.FORK:
            session = self._forked_session(move.others[0])
            if session is not None:
                self.state.close(session)
            self._answer(
                move.request, Failure(TierKVError.code, f"the open page could not be copied: {event.reason}")
            )

    def _forked_session(self, slot: int) -> Session | None:
        return (
            self.state.sessions.get(int(self.state.pages.owner[slot]))
            if self.state.pages.live[slot]
            else None
        )

    def _tick(self, event: events.Tick) -> None:
        state = self.state
        state.dirty |= {s for s in state.quiet if s in state.sessions}
        state.quiet.clear()
        if not self.adoption.pending:
            late.back_up(state, self.moves)
            late.summarize(state, self.moves)
            self.hints.tick()
            self.promotion.tick()


def _truncate(chunks: list[Any], length: int) -> list[Any]:
    kept: list[Any] = []
    for chunk in chunks:
        if length <= 0:
            break
        kept.append(chunk[:length])
        length -= len(chunk)
    return kept


__all__ = ["Brain", "BrainConfig"]
