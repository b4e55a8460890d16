"""Pages come back before they are read: those of a paused session shortly before it resumes, and those that hints name.

They come back as recalled pages do, low-bit. Room for them is free, or is made by pages of paused sessions that are not
near, by exact pages that need not be exact, by pages with a lower score and much less attention than what wants in is
worth (`Scores.worth`), and at last by what is held for sessions that are expected much later.

What has come back for a session that is near is *held* until it resumes (`PageStore.held`): it gives way by its score
at the pause, not before all others. And it is brought only while nobody asks for room: what pressure frees is not taken
(docs/decisions/0011).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tierkv.daemon.absence import Absence
from tierkv.daemon.moves import Moves
from tierkv.daemon.pages import Goal, Guard, Ladder, Reason
from tierkv.daemon.pressure import Pressure
from tierkv.daemon.recall import HYSTERESIS, Recall
from tierkv.daemon.scoring import Scores, Slots
from tierkv.daemon.sessions import Model, Session
from tierkv.daemon.state import State
from tierkv.table import NOWHERE, Kind

PATIENCE_SECONDS = 10.0
"""How long pages are tried to be brought back that a hint named or that a resumed session lacks."""

FIRST_PAGE_SECONDS = 0.002
"""To bring a page back, before it has been measured."""

SMOOTHING = 0.2
"""Weight of the newest measurement."""

MARGIN = 2.0
"""A return begins so many times earlier than it should take."""

LEAST_MARGIN_SECONDS = 0.1
"""Two ticks."""


@dataclass
class _Want:
    slots: list[int]  # most wanted first
    back_at: float  # when they are needed
    until: float  # when they are given up
    reason: Reason
    began: float
    count: int
    mass: float  # most that one of them gets
    stuck: bool = False  # it had to wait for room, so how long it took tells nothing of moves


class Returns:
    def __init__(
        self, state: State, moves: Moves, pressure: Pressure, scores: Scores, recall: Recall
    ) -> None:
        self._state = state
        self._moves = moves
        self._pressure = pressure
        self._scores = scores
        self._recall = recall
        self._wants: dict[int, _Want] = {}
        self._stuck: set[int] = set()
        """Models for whose first want nothing gave way: looked at again at the next tick."""
        self.page_seconds = FIRST_PAGE_SECONDS
        """Measured: seconds a page of a return."""

    def want(self, session: Session, slots: Slots) -> None:
        """A hint names pages."""
        self._add(session, slots, self._state.now, self._state.now + PATIENCE_SECONDS, "hint")

    def resumed(self, session: Session, slots: Slots) -> None:
        """The session runs; what it lacks of what it had comes at once."""
        self._wants.pop(session.id, None)
        self._add(session, slots, self._state.now, self._state.now + PATIENCE_SECONDS, "resume")

    def tick(self) -> None:
        """Time passed: some paused sessions are about to resume."""
        state, now = self._state, self._state.now
        self._stuck.clear()
        changed: dict[int, Session] = {}  # one of each family: that marks them all
        for number, absence in state.absent.items():
            session, before = state.sessions[number], (absence.back_at, absence.near)
            absence.look(now)
            absence.approach(now, LEAST_MARGIN_SECONDS + self._seconds(absence))
            if (absence.back_at, absence.near) != before:
                changed[min(session.family)] = session
                session.stale |= absence.near != before[1]
            want = self._wants.get(number)
            if not absence.near:
                if want is not None and want.reason == "resume":
                    del self._wants[number]
            elif want is not None and want.reason == "resume":
                want.back_at = absence.back_at
            elif np.any(state.pages.kind[absence.pages] == Kind.NONE):
                self._add(session, absence.pages, absence.back_at, np.inf, "resume")
        for session in changed.values():
            state.mark_absence(session)

    def _seconds(self, absence: Absence) -> float:
        """What the return of a paused session's pages is expected to take."""
        kinds = self._state.pages.kind[absence.pages]
        return MARGIN * self.page_seconds * int(np.count_nonzero(kinds == Kind.NONE))

    def _add(self, session: Session, slots: Slots, back_at: float, until: float, reason: Reason) -> None:
        before = self._wants.get(session.id)
        named = [] if before is None else before.slots
        missing = self._missing(session, list(dict.fromkeys([*named, *slots.tolist()])))
        self._stuck.discard(session.model.index)
        if missing:
            mass = float(self._state.pages.mass[missing].max())
            self._wants[session.id] = _Want(
                missing, back_at, until, reason, self._state.now, len(missing), mass
            )
        else:
            self._wants.pop(session.id, None)

    def _missing(self, session: Session, slots: list[int]) -> list[int]:
        """Those of the session's pages that lie in host memory only, in their order."""
        pages, among = self._state.pages, np.array(slots, np.int64)
        away = (pages.kind[among] == Kind.NONE) & (pages.host[among] != NOWHERE) & ~pages.doomed[among]
        among = among[away]
        missing: list[int] = among[np.isin(among, session.pages.view)].tolist()
        return missing

    def advance(self) -> None:
        """Go on with what is to come back, as far as moves may begin: this is asked at every event."""
        state = self._state
        for number, want in sorted(self._wants.items(), key=self._order):
            if self._moves.full():
                return
            session = state.sessions.get(number)
            if session is None or state.now > want.until:
                del self._wants[number]
                continue
            if number in state.absent and self._pressure.short:
                want.stuck = True
                continue  # room that is made for others is theirs, else it would be made anew for ever
            if session.model.index in self._stuck:
                want.stuck = True
                continue
            want.slots = self._missing(session, want.slots)
            if want.slots:
                self._bring(session, want)
            else:
                del self._wants[number]
                if not want.stuck:
                    self._measure((state.now - want.began) / want.count)

    def _order(self, item: tuple[int, _Want]) -> tuple[float, float, int]:
        """Soonest needed first; of those that are needed now, those that get most. So what nothing gives way for holds
        back none that more would give way for.
        """
        number, want = item
        return max(want.back_at, self._state.now), -want.mass, number

    def _measure(self, seconds: float) -> None:
        self.page_seconds += SMOOTHING * (seconds - self.page_seconds)

    def _bring(self, session: Session, want: _Want) -> None:
        pages, moves = self._state.pages, self._moves
        for place, slot in enumerate(want.slots):
            if pages.goal[slot] or pages.moving[slot]:
                continue
            if moves.full():
                return
            if pages.retry_at[slot] > self._state.now or not self._recall.encodable(slot):
                continue
            if self._takes_reserve(session) or not self._recall.start(session, slot, want.reason):
                lacking = sum(not pages.goal[left] for left in want.slots[place:])
                self._make_room(session, slot, lacking, want)
                return

    def _takes_reserve(self, session: Session) -> bool:
        """A page of a session that is still paused would take a frame that pressure wants free."""
        state, model = self._state, session.model
        if session.id not in state.absent or state.hbm.free_items(model.quant):
            return False
        return state.hbm.free_bytes - model.exact.frame < state.config.high_watermark * state.hbm.size

    def _make_room(self, session: Session, slot: int, lacking: int, want: _Want) -> None:
        """Begin to free slots for `lacking` pages."""
        pages, model = self._state.pages, session.model
        if self._pressure.budgets.room(session) < model.quant.item:
            self._pressure.make_budget_room(session)
            want.stuck = True
            return
        coming = self._recall.slots_coming(session, False)
        coming += self._pressure.frames_coming() // model.exact.frame * model.quant.items
        coming += self._send(self._away(model.index, want), lacking - coming, model, "pause")
        if coming >= lacking or self._pressure.frames_coming():
            return
        self._pressure.make_frame(pages.slots(), model)
        if self._pressure.frames_coming():
            return
        coming += self._replace_colder(model.index, want, lacking - coming)
        if coming < lacking:
            coming += self._send(self._later(model.index, want.back_at), lacking - coming, model, "pause")
        if not coming:
            want.stuck = True
            self._stuck.add(model.index)

    def _send(self, victims: Iterable[int], wanted: int, model: Model, reason: Reason) -> int:
        """Pages leave until `wanted` low-bit slots are on their way to be free. Returns how many are."""
        coming = 0
        for victim in victims:
            if coming >= wanted or self._moves.full():
                break
            frees = model.quant.items if self._state.pages.kind[victim] == Kind.EXACT else 1
            coming += frees * self._moves.demote(victim, Goal.HOST, reason)
        return coming

    def _away(self, model: int, want: _Want) -> Iterator[int]:
        """Superseded pages, and those of paused sessions that are not near."""
        pages = self._state.pages
        ready = self._may_leave(pages.slots(), model)
        ready = ready[pages.stale[ready] | (self._scores.away(ready) & (pages.back_at[ready] > want.back_at))]
        return self._scores.coldest_first(ready)

    def _later(self, model: int, back_at: float) -> list[int]:
        """What is held for sessions that are near, but expected much later: the farthest first."""
        state, pages = self._state, self._state.pages
        later = [a for a in state.absent.values() if a.near and a.later_than(back_at, state.now)]
        later.sort(key=lambda absence: -absence.back_at)
        slots = np.concatenate([np.zeros(0, np.int64), *(absence.pages[::-1] for absence in later)])
        ready = self._may_leave(slots, model)
        return [s for s in dict.fromkeys(ready.tolist()) if pages.back_at[s] > back_at]

    def _replace_colder(self, model: int, want: _Want, lacking: int) -> int:
        """Low-bit pages of any session with a lower score and much less attention than those that want in give way: by
        either alone, what leaves by one would come back by the other. Returns how many.
        """
        pages = self._state.pages
        ready = self._may_leave(pages.slots(), model)
        ready = ready[
            (pages.kind[ready] == Kind.QUANTIZED) & ~self._scores.wanted(ready) & ~pages.held[ready]
        ]
        slots = [slot for slot in want.slots if not pages.goal[slot]]
        ready = ready[pages.score[ready] <= pages.score[slots].max(initial=0.0)]
        leaving = ready[np.argsort(pages.mass[ready], kind="stable")].tolist()
        worth = self._scores.worth(np.array(slots, np.int64)).tolist()
        sent = 0
        for victim, gets in list(zip(leaving, worth, strict=False))[:lacking]:
            if self._moves.full() or gets <= HYSTERESIS * pages.mass[victim]:
                break
            sent += self._moves.demote(victim, Goal.HOST, want.reason)
        return sent

    def _may_leave(self, among: Slots, model: int) -> Slots:
        """Pages that have a copy in host memory, and that nothing holds in HBM."""
        pages = self._state.pages
        ready = self._scores.idle(among)
        chosen: Slots = ready[
            (pages.model[ready] == model)
            & (pages.kind[ready] != Kind.NONE)
            & (pages.ladder[ready] == Ladder.TIERED)
            & (pages.guard[ready] == Guard.NONE)
            & (pages.host[ready] != NOWHERE)
        ]
        return chosen
