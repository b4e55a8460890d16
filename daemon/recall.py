"""Pages that attention is expected on come back: those a step waits for, and those that estimates keep naming.

A worker estimates from digests what cold pages would be given. A *request* names some of them, most wanted first, and
waits (`ask`); what observations report lies in `pages.mass` and is weighed at every tick (`swap`). Either way a page
comes back as its low-bit replica, a seventh of the bytes, and becomes exact only if it proves hot (`Promotion`).

Room is made at the cost of the low-bit pages that get the least attention, never of one that gets more than the page
that wants in.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.events import Answer, Recalled
from tierkv.daemon.failures import refusal
from tierkv.daemon.moves import Moves
from tierkv.daemon.pages import Goal, Guard, Ladder, Outcome, Reason
from tierkv.daemon.pressure import Pressure
from tierkv.daemon.scoring import Scores, Slots
from tierkv.daemon.sessions import Model, Session
from tierkv.daemon.state import State
from tierkv.daemon.wants import ranked, sizes
from tierkv.errors import UnknownSession
from tierkv.protocol import Ready
from tierkv.table import NOWHERE, Kind

SMOOTHING = 0.5
"""Weight of the newest observation in a page's mass."""

UNSEEN = 0.9
"""Of a cold page's mass, at an observation that tells nothing of it, so much is still believed: the paper's rho, which
forgets half in 6.6 observations."""

USED_LIFT = 2.0
"""A recalled page was used when one of its tokens gets this many times the average (tau of Eq. 3, which sets a token's
clock back): a fact is a token or two, and the mean of its page's sixteen hides it.
"""

HYSTERESIS = 2.0
"""A cold page takes a resident's place only with this many times its mass."""

SWAPS_A_TICK = 4


@dataclass
class _Waiting:
    request: int
    slots: list[int]
    left: list[int]  # never seen back so far; a slot that goes to another page is not looked at again
    masses: dict[int, float]
    asked_at: float
    until: float


class Recall:
    def __init__(self, state: State, moves: Moves, pressure: Pressure, scores: Scores) -> None:
        self._state = state
        self._moves = moves
        self._pressure = pressure
        self._scores = scores
        self._waiting: dict[int, _Waiting] = {}  # session -> what it waits for
        self._places = Counter[int]()  # model -> low-bit slots that pages leave for others that want in

    # Observations ------------------------------------------------------------------------------------------------

    def observed(self, session: Session, mass: NDArray[np.float32]) -> None:
        """Masses of pages from masses of tokens `[tokens]`, NaN where not known."""
        pages, slots, starts = self._state.pages, session.pages.view, session.starts.view
        rows = int(np.searchsorted(starts, len(mass), side="left"))
        if not rows:
            return
        slots, starts = slots[:rows], starts[:rows]
        known = np.add.reduceat(~np.isnan(mass), starts) > 0
        sums = np.add.reduceat(np.nan_to_num(mass), starts).astype(np.float32)
        before = pages.mass[slots]
        newest = np.where(before > 0, before + SMOOTHING * (sums - before), sums)
        cold = (pages.kind[slots] == Kind.NONE) & (pages.host[slots] != NOWHERE)
        pages.mass[slots] = np.where(known, newest, np.where(cold, UNSEEN * before, before))
        level = USED_LIFT / np.count_nonzero(~np.isnan(mass)) if known.any() else np.inf
        if (cold & known).any():
            session.ledger.expected = float(sums[cold & known].sum())
            self._state.counters.expected_mass.add(session.ledger.expected)
        used = (pages.recalled[slots] == Outcome.PENDING) & (np.fmax.reduceat(mass, starts) >= level)
        pages.recalled[slots[used]] = Outcome.USED
        self._state.count_outcome("used", session, int(np.count_nonzero(used)))
        for _ in range(int(np.count_nonzero(used))):
            self._state.waste.count(wasted=False)

    # Requests ----------------------------------------------------------------------------------------------------

    def ask(self, event: Recalled) -> None:
        """A step waits for these pages. An earlier request of the session is answered with what is there, and what it
        wanted beyond is not wanted any more.
        """
        state, pages = self._state, self._state.pages
        session = state.session(event.session, event.client)
        self._cancel(session)
        named = set(session.pages.view.tolist())
        slots = [pages.index[page] for page in event.pages if page in pages.index]
        slots = [slot for slot in dict.fromkeys(slots) if slot in named]
        masses = {
            pages.index[page]: mass
            for page, mass in zip(event.pages, event.masses, strict=True)
            if page in pages.index
        }
        for slot in slots:
            pages.mass[slot] = max(float(pages.mass[slot]), masses[slot])
            pages.wanted_until[slot] = session.step + max(1, state.config.min_residency_steps)
        self._waiting[session.id] = _Waiting(
            event.request, slots, list(slots), masses, state.now, state.now + event.seconds
        )
        self._scores.refresh()

    def advance(self) -> None:
        """Go on with what steps wait for; answer those that have what can be had."""
        state = self._state
        for number, waiting in list(self._waiting.items()):
            session = state.sessions.get(number)
            if session is None:
                del self._waiting[number]
                state.count_outcome("cancelled", None, len(waiting.left))
                gone = UnknownSession(f"session {number} was closed while it waited for pages")
                state.out.append(Answer(waiting.request, refusal(gone)))
                continue
            missing = waiting.left = [slot for slot in waiting.left if self.is_missing(slot)]
            if state.now > waiting.until:
                state.count_outcome("late", session, len(missing))
                self._answer(session)
            elif not missing:
                self._answer(session)
        if self._waiting:
            coming = self._bring()
            for number in [number for number in self._waiting if number not in coming]:
                self._answer(state.sessions[number])

    @property
    def waited_for(self) -> bool:
        """A step waits for pages."""
        return bool(self._waiting)

    def _cancel(self, session: Session) -> None:
        """What the session waited for, and has not begun to come, is not wanted any more."""
        waiting, pages = self._waiting.get(session.id), self._state.pages
        if waiting is not None:
            left = [s for s in waiting.left if self.is_missing(s) and not pages.goal[s]]
            pages.wanted_until[left] = 0.0
            self._state.count_outcome("cancelled", session, len(left))
            self._answer(session)

    def is_missing(self, slot: int) -> bool:
        """The page lies in host memory only."""
        pages = self._state.pages
        return bool(
            pages.live[slot]
            and not pages.doomed[slot]
            and pages.kind[slot] == Kind.NONE
            and pages.host[slot] != NOWHERE
        )

    def _answer(self, session: Session) -> None:
        waiting = self._waiting.pop(session.id, None)
        if waiting is not None:
            self._state.counters.recall_seconds.add(self._state.now - waiting.asked_at)
            version = session.version + (session.id in self._state.dirty)
            self._state.out.append(Answer(waiting.request, Ready(version)))

    def _bring(self) -> set[int]:
        """Start what can start, of all requests together (`wants.ranked`). Returns the sessions for which something is
        on its way, or waits only for its turn; for the others there is no room.
        """
        pages, moves = self._state.pages, self._moves
        coming: set[int] = set()
        without_room: set[int] = set()
        queue = self._queue()
        for place, (number, slot) in enumerate(queue):
            if pages.goal[slot] == Goal.LOWBIT or pages.moving[slot]:
                coming.add(number)
            elif number in without_room:
                continue
            elif not moves.may_promote():
                return set(self._waiting)
            elif pages.retry_at[slot] > self._state.now or not self.encodable(slot):
                continue
            elif self._first_its_own(self._state.sessions[number]) or self.start(
                self._state.sessions[number], slot
            ):
                coming.add(number)
            else:
                without_room.add(number)
                lacking = sum(n == number and not pages.goal[left] for n, left in queue[place:])
                waiting = self._waiting[number]
                if self._make_room(self._state.sessions[number], waiting, slot, lacking):
                    coming.add(number)
        return coming

    def _first_its_own(self, session: Session) -> bool:
        """What leaves under the session's budget leaves for a step's own tokens: pages that it asked for come later."""
        return session.options.hbm_budget > 0 and self._pressure.demanded(session) > 0

    def _queue(self) -> list[tuple[int, int]]:
        """`(session, slot)` of every page that is waited for, first the one to begin with."""
        wants = [(number, slot) for number, waiting in self._waiting.items() for slot in waiting.left]
        mass = np.array([self._waiting[number].masses[slot] for number, slot in wants], np.float32)
        until = np.array([self._waiting[number].until for number, _ in wants])
        size = sizes(self._state, np.array([slot for _, slot in wants], np.int64))
        return [wants[place] for place in ranked(mass, size, until, self._state.now).tolist()]

    def encodable(self, slot: int) -> bool:
        """There is a low-bit form of the page, or one can be made; or there is a slot for it as it is."""
        pages, model = self._state.pages, self._state.model_of(slot)
        if pages.host_kind[slot] == Kind.MIDDLE:
            return self._state.hbm.free_items(model.form(Kind.MIDDLE)) > 0
        possible = pages.host_kind[slot] == Kind.QUANTIZED or not pages.refused[slot]
        return bool(possible) and model.ready

    def start(self, session: Session, slot: int, reason: Reason = "recall") -> bool:
        """Begin to bring a page back, if there is a slot for it."""
        state, model = self._state, self._state.model_of(slot)
        if self._pressure.budgets.room(session) < model.quant.item:
            return False
        spare = state.hbm.free_frames(model.exact.frame) - self._pressure.kept_frames(model)
        if not state.hbm.free_items(model.quant) and spare < 1:
            return False
        return self.bring(slot, reason)

    def bring(self, slot: int, reason: Reason) -> bool:
        """Begin to bring a page back, into a place that another has left for it while there is one."""
        pages, model = self._state.pages, int(self._state.pages.model[slot])
        placed = reason in ("recall", "room") and self._places[model] > 0
        pages.recalled[slot] = Outcome.COMING if placed else Outcome.NONE
        if not self._moves.promote(slot, Goal.LOWBIT, reason):
            return False
        self._places[model] -= placed
        return True

    def has_place(self, session: Session) -> bool:
        """Another page has left for one of the session's."""
        room = self._pressure.budgets.room(session) - self._pressure.demanded(session)
        return self._places[session.model.index] > 0 and room >= session.model.quant.item

    def _give_place(self, victim: int) -> bool:
        """A low-bit page leaves so that a cold one can come."""
        leaves = self._moves.demote(victim, Goal.HOST, "recall")
        self._places[int(self._state.pages.model[victim])] += leaves
        return leaves

    def _make_room(self, session: Session, waiting: _Waiting, slot: int, lacking: int) -> bool:
        """Low-bit pages with less mass leave for `lacking` wanted ones. True if any room is on its way."""
        state, pages = self._state, self._state.pages
        model = state.model_of(slot)
        budgeted = self._pressure.budgets.room(session) < model.quant.item
        coming = self.slots_coming(session, budgeted)
        if coming >= lacking:
            return True
        among = session.pages.view.copy() if budgeted else pages.slots()
        victims = self._victims(among, model.index, waiting.masses[slot], set(waiting.slots))
        for victim in victims[: lacking - coming]:
            if self._moves.full():
                return True
            coming += self._give_place(victim)
        return coming > 0

    def slots_coming(self, session: Session, budgeted: bool) -> int:
        """Low-bit slots on their way to be free (of the session's own pages, if its budget is what lacks)."""
        model = session.model
        if budgeted:
            leaving = self._leaving(model)
            own = np.zeros_like(leaving)
            own[session.pages.view] = True
            return int(np.count_nonzero(leaving & own)) + session.retiring_bytes // model.quant.item
        return self.slots_leaving(model)

    def slots_leaving(self, model: Model) -> int:
        """The same of all sessions."""
        return int(np.count_nonzero(self._leaving(model))) + self._state.retiring_items[model.quant]

    def _leaving(self, model: Model) -> NDArray[np.bool_]:
        """By slot: low-bit pages on their way to host memory."""
        pages = self._state.pages
        leaving = pages.live & (pages.model == model.index) & (pages.goal == Goal.HOST)
        low: NDArray[np.bool_] = leaving & (pages.kind == Kind.QUANTIZED)
        return low

    def _victims(self, among: Slots, model: int, mass: float, spared: set[int]) -> list[int]:
        """Low-bit pages that may leave for a page of `mass`: of paused sessions, then the least attended first."""
        pages = self._state.pages
        ready = self._scores.idle(among)
        ready = ready[
            (pages.kind[ready] == Kind.QUANTIZED)
            & (pages.model[ready] == model)
            & (pages.ladder[ready] == Ladder.TIERED)
            & (pages.guard[ready] == Guard.NONE)
            & (pages.host[ready] != NOWHERE)
            & ((self._scores.worth(ready) < mass) | self._scores.away(ready))
        ]
        worth = self._scores.worth(ready)
        order = np.lexsort((worth, self._scores.wanted(ready), ~self._scores.away(ready)))
        return [slot for slot in ready[order].tolist() if slot not in spared]

    # In the background -------------------------------------------------------------------------------------------

    def open_bets(self) -> int:
        """Pages that took another's place, or are about to, and were not attended yet."""
        state, recalled = self._state, self._state.pages.recalled[self._state.pages.slots()]
        for index in list(self._places):  # what others took is not waited for
            model = state.models_by_index.get(index)
            if model is None:  # its last session was closed
                del self._places[index]
                continue
            leaving = self.slots_leaving(model)
            self._places[index] = min(self._places[index], leaving + state.hbm.free_items(model.quant))
        taken = (recalled == Outcome.PENDING) | (recalled == Outcome.COMING)
        return int(np.count_nonzero(taken)) + self._places.total()

    def worth_a_place(self, cold: Slots) -> NDArray[np.bool_]:
        """Which cold pages are expected to be used, so that others may leave for them."""
        pages, state = self._state.pages, self._state
        owners, which = np.unique(pages.owner[cold], return_inverse=True)
        tokens = np.array([state.sessions[o].length if o in state.sessions else 0 for o in owners.tolist()])
        lift = pages.mass[cold] * tokens[which] / np.maximum(1, pages.count[cold])
        worth: NDArray[np.bool_] = (pages.mass[cold] > 0) & (lift >= state.waste.bar)
        return worth

    def swap(self, cold: Slots, tiered: Slots) -> None:
        """The most attended cold pages take the places of the least attended low-bit ones, if they get much more.

        Args:
            cold: as `wants.ranked` orders them.
        """
        pages, sessions = self._state.pages, self._state.sessions
        coming = cold[self.worth_a_place(cold)]
        if not len(coming):
            return
        low = tiered[(pages.kind[tiered] == Kind.QUANTIZED) & (pages.guard[tiered] == Guard.NONE)]
        low = low[(pages.host[low] != NOWHERE) & ~self._scores.wanted(low)]
        settled = [
            s for s in low.tolist()
            if (owner := sessions.get(int(pages.owner[s]))) is not None
            and (owner.id in self._state.absent
                 or owner.step - pages.moved_step[s] >= self._state.config.min_residency_steps)
        ]  # fmt: skip
        worth = dict(zip(settled, self._scores.worth(np.array(settled, np.int64)).tolist(), strict=True))
        leaving = sorted(settled, key=worth.__getitem__)
        most = min(SWAPS_A_TICK, self._state.waste.allowed(self.open_bets()))
        for victim, page in list(zip(leaving, coming.tolist(), strict=False))[:most]:
            if pages.goal[victim] or self._moves.full() or pages.mass[page] <= HYSTERESIS * worth[victim]:
                break
            self._give_place(victim)
