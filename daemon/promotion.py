"""Who comes back while nobody asks for room: pinned pages, hot pages, then whatever still lies cold. And what is made
ready: low-bit replicas of pages that will be demoted next, so that their demotion is instant.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.moves import BATCHES, Moves
from tierkv.daemon.pages import Goal, Guard, Ladder, Reason
from tierkv.daemon.pressure import Pressure
from tierkv.daemon.recall import Recall
from tierkv.daemon.scoring import Scores, Slots
from tierkv.daemon.state import State
from tierkv.daemon.wants import NOBODY_WAITS, ranked, sizes
from tierkv.table import NOWHERE, Kind

FIT_EAGERLY_AT = 32
"""Sealed exact pages of a model from which its codec state is fitted without being asked."""

CALM_SECONDS = 0.2
"""Cold pages come back only when no reservation has failed for this long: else they would leave again at once."""


class Promotion:
    def __init__(
        self, state: State, moves: Moves, pressure: Pressure, scores: Scores, recall: Recall
    ) -> None:
        self._state = state
        self._recall = recall
        self._moves = moves
        self._pressure = pressure
        self._scores = scores
        self._cut_short = False  # the last pass ended because enough was on its way

    def tick(self) -> None:
        """Time passed: fit codecs, make low-bit replicas ahead of need, bring hot and pinned pages back."""
        state, moves = self._state, self._moves
        for model in list(state.models.values()):
            if not model.ready and not model.fitting:
                self._pressure.fit(model, at_least=FIT_EAGERLY_AT)
        if moves.full() or self._pressure.asked:
            return
        state.waste.forgive(self._recall.open_bets(), state.now)
        self._bring_back()

    def _bring_back(self) -> None:
        state = self._state
        self._cut_short = False
        spare = state.hbm.free_bytes - state.config.high_watermark * state.hbm.size
        self._scores.refresh()
        spare = self._restore_pinned(int(spare))
        if state.config.demotion == "eager":
            self._promote_hot(spare)
            return
        pages = state.pages
        tiered = self._scores.idle(pages.slots())
        tiered = tiered[pages.ladder[tiered] == Ladder.TIERED]
        cold = tiered[(pages.kind[tiered] == Kind.NONE) & (pages.host[tiered] != NOWHERE)]
        cold = cold[(pages.back_at[cold] == 0) & ~pages.stale[cold]]  # `Returns` knows when those are wanted
        cold = cold[(pages.score[cold] >= state.thresholds.offload_below) | (pages.mass[cold] > 0)]
        cold = cold[(pages.host_kind[cold] == Kind.QUANTIZED) | ~pages.refused[cold]]
        if len(cold):
            cold = self._in_order(cold)
            self._refill(cold, tiered, spare)
            self._recall.swap(cold, tiered)
        else:
            self._prepare(self._promote_hot(spare))

    def resume(self) -> None:
        """A move has ended: the next batch of what was cut short, while another is still being copied. One look at all
        pages a batch, not one a move.
        """
        moves, most = self._moves, self._state.config.max_moves_in_flight
        if not self._cut_short or self._pressure.asked:
            return
        if 2 * len(moves.flying) <= most and moves.may_promote(batches=1):
            self._bring_back()

    def _in_order(self, cold: Slots) -> Slots:
        """Those that are expected to get most for their bytes, then by score."""
        pages = self._state.pages
        cold = cold[np.argsort(-pages.score[cold], kind="stable")]
        nobody = np.full(len(cold), NOBODY_WAITS)
        order = ranked(pages.mass[cold], sizes(self._state, cold), nobody, self._state.now)
        ordered: Slots = cold[order]
        return ordered

    def _may_promote(self) -> bool:
        """One more page; notes that the pass was cut short if not. What steps wait for needs the second batch."""
        may = self._moves.may_promote(batches=1 if self._recall.waited_for else BATCHES)
        self._cut_short |= not may
        return may

    def _restore_pinned(self, spare: int) -> int:
        """Pinned pages stay attendable: bring back those that are not."""
        pages = self._state.pages
        ready = self._scores.idle(self._state.pages.slots())
        cold = ready[(pages.pin[ready] > Guard.NONE) & (pages.kind[ready] == Kind.NONE)]
        whole = pages.refused[cold] & (
            pages.host_kind[cold] == Kind.EXACT
        )  # comes back as it is, or not at all
        for slot in cold[(pages.host[cold] != NOWHERE) & ~whole].tolist():
            if not self._may_promote():
                break
            if self._moves.promote(slot, Goal.LOWBIT, "pin"):
                spare -= self._state.model_of(slot).quant.item
        exact = ready[(pages.pin[ready] == Guard.EXACT) & self._is_packed(ready)]
        exact = exact[pages.host_kind[exact] == Kind.EXACT]
        return self._promote_exact(np.concatenate([cold[whole], exact]), spare, "pin")

    def _refill(self, cold: Slots, tiered: Slots, spare: int) -> None:
        """While nobody asks for room, cold pages come back as low-bit replicas: those that estimates name, then by
        score (`_in_order`). Where no slot is left for them, exact pages that need not be exact become low-bit: no page
        lies cold for their sake.
        """
        state, pages = self._state, self._state.pages
        if state.now - self._pressure.asked_at < CALM_SECONDS:
            return
        expected = self._recall.worth_a_place(cold)
        spent: set[int] = set()  # sessions without room under their own budget: each has many cold pages
        for slot, worth in zip(cold.tolist(), expected.tolist(), strict=True):
            model, owner = state.model_of(slot), int(pages.owner[slot])
            if owner in spent:
                continue
            session = state.sessions[owner]
            if self._pressure.budgets.room(session) < 2 * model.exact.item and not self._recall.has_place(
                session
            ):
                self._pressure.make_budget_room(session)
                spent.add(owner)
                continue
            if not self._may_promote():
                break
            if pages.host_kind[slot] == Kind.MIDDLE and not state.hbm.free_items(model.form(Kind.MIDDLE)):
                continue
            frames = (
                state.hbm.free_frames(model.exact.frame) - self._pressure.kept_frames(model)
            ) * model.exact.frame
            if state.hbm.free_items(model.quant) <= 1 and min(spare, frames) < model.exact.frame:
                if not self._pressure.frames_coming():
                    self._pressure.make_frame(tiered, model)
                break
            if not self._recall.bring(slot, "recall" if worth else "room"):
                break
            spare -= model.quant.item

    def _is_packed(self, slots: Slots) -> NDArray[np.bool_]:
        """In HBM, but not exact: promotion makes it that at once, from its copy in host memory."""
        kinds = self._state.pages.kind[slots]
        packed: NDArray[np.bool_] = (kinds == Kind.QUANTIZED) | (kinds == Kind.MIDDLE)
        return packed

    def _promote_hot(self, spare: int) -> int:
        state, pages = self._state, self._state.pages
        ready = self._scores.idle(pages.slots())
        hot = ready[
            self._is_packed(ready)
            & (pages.host_kind[ready] == Kind.EXACT)
            & (pages.score[ready] >= state.thresholds.promote_above)
            & (pages.back_at[ready] == 0)
        ]
        resident = [s for s in hot.tolist() if self._residency(s) >= state.config.min_residency_steps]
        return self._promote_exact(np.array(resident, np.int64), spare, "hot")

    def _promote_exact(self, slots: Slots, spare: int, reason: Reason) -> int:
        for slot in reversed(list(self._scores.coldest_first(slots))):
            frame = self._state.model_of(slot).exact.frame
            if spare < frame or not self._may_promote():
                break
            if self._pressure.budgets.room(self._state.sessions[int(self._state.pages.owner[slot])]) < frame:
                continue
            if self._moves.promote(slot, Goal.EXACT, reason):
                spare -= frame
        return spare

    def _residency(self, slot: int) -> float:
        session = self._state.sessions.get(int(self._state.pages.owner[slot]))
        return session.step - float(self._state.pages.moved_step[slot]) if session else 0.0

    def _prepare(self, spare: int) -> None:
        """Packed replicas of pages below the threshold, while there is plenty of room: demotion is then instant."""
        state, pages = self._state, self._state.pages
        form = Kind.QUANTIZED if state.middle is None else Kind.MIDDLE
        level = state.thresholds.quantize_below if state.middle is None else state.middle_below
        ready = self._scores.idle(pages.slots())
        soon = ready[
            (pages.kind[ready] == Kind.EXACT)
            & (pages.replica(form)[ready] == NOWHERE)
            & (pages.ladder[ready] == Ladder.TIERED)
            & (pages.guard[ready] <= Guard.ATTENDABLE)
            & (pages.score[ready] < level)
            & (pages.moving[ready] == 0)
            & ~pages.refused[ready]
        ]
        for slot in self._scores.coldest_first(soon):
            model = state.model_of(slot)
            spare -= model.form(form).item
            if not self._pressure.budgets.may_encode(slot, form):
                continue
            if spare < model.exact.frame or self._moves.full() or not self._moves.launch.encode(slot, form):
                break
