"""Who gives way when HBM is wanted, and who comes back when it is not.

Every page has a score (the policy's) and a guard (how far it may go). Two drivers ask for room: the pool's low
watermark or a reservation that did not fit, and a session's own budget. Room is made in this order, lowest score
first within each:

1. exact pages become low-bit: five sixths of a frame for almost no loss, so this comes before any page leaves HBM;
2. where no low-bit slot is left, the coldest page of either kind goes to host;
3. where no exact page may give way, a low-bit frame is given back: the coldest low-bit pages go to host and the
   emptiest frame's pages move into the slots that this leaves;
4. as a last resort, pages of the recent window become low-bit too.

The order differs from "the lowest-scored page gives up its fastest replica" in one point, on purpose: a page is not
sent to host while a higher-scored one is still exact (docs/decisions/0003).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.moves import Moves
from tierkv.daemon.pages import Goal, Guard, Ladder
from tierkv.daemon.sessions import Model, Session
from tierkv.daemon.state import State
from tierkv.table import NOWHERE, Kind

Slots = NDArray[np.int64]

FIT_PAGES = 64
"""Pages that a codec state is fitted from at most: 1,024 tokens."""

FIT_EAGERLY_AT = 8
"""Sealed exact pages of a model from which its codec state is fitted without being asked."""

DEMAND_SECONDS = 1.0
"""How long a reservation that did not fit keeps asking for room on its own."""

CALM_SECONDS = 0.2
"""Cold pages come back only when no reservation has failed for this long: else they would leave again at once."""

RESCORE_SECONDS = 1.0
"""Scores of a paused session are recomputed this often."""


class Pressure:
    def __init__(self, state: State, moves: Moves) -> None:
        self._state = state
        self._moves = moves
        self._demands: dict[int, tuple[Model, int, float]] = {}  # session -> model, bytes, until
        self._emptying: dict[int, Model] = {}  # low-bit frame -> model
        self._asked_at = -CALM_SECONDS

    # Asking for room -----------------------------------------------------------------------------------------

    def ask(self, session: Session, size: int) -> None:
        """A reservation of `size` bytes did not fit."""
        self._demands[session.id] = (session.model, size, self._state.now + DEMAND_SECONDS)
        self._asked_at = self._state.now

    def satisfied(self, session: int) -> None:
        self._demands.pop(session, None)

    def relieve(self) -> bool:
        """Start what makes the room that is missing. True while anything is on its way."""
        state = self._state
        if self._demands:
            live = state.sessions
            self._demands = {s: d for s, d in self._demands.items() if d[2] > state.now and s in live}
        missing = self._missing()
        over = [s for s in (state.sessions[i] for i in sorted(state.budgeted)) if self._over_budget(s) > 0]
        if missing > 0 or over or state.config.demotion == "eager":
            self.rescore()
        for session in over:
            self._shrink_session(session, self._over_budget(session))
        if state.config.demotion == "eager":
            self._apply_thresholds()
        if missing > 0:
            self._shrink_pool(missing)
        return bool(self._moves.flying or state.retirements)

    def _missing(self) -> int:
        """Bytes of whole frames that are wanted and not yet on their way."""
        state = self._state
        free, size = state.hbm.free_bytes, state.hbm.size
        low, high = state.config.low_watermark * size, state.config.high_watermark * size
        if free >= low and not self._demands:
            return 0
        coming = self._frames_coming()
        missing = int(high) - free - coming if free + coming < low else 0
        for model, wanted, _ in self._demands.values():
            frame = model.exact.frame
            kept = self.kept_frames(model) * frame
            missing = max(missing, wanted + kept - state.hbm.free_frames(frame) * frame - coming)
        return missing

    def kept_frames(self, model: Model) -> int:
        """Free frames that are not given out: one while no low-bit slot is free, else nothing could be encoded."""
        state, pages = self._state, self._state.pages
        tiered = bool(np.any(pages.live & pages.sealed & (pages.ladder == Ladder.TIERED)))
        return int(tiered and not state.hbm.free_items(model.quant))

    def _frames_coming(self) -> int:
        """Bytes of frames on their way to be free: retiring, of pages with a goal, or being emptied."""
        state, pages = self._state, self._state.pages
        leaving = np.flatnonzero(
            pages.live
            & (pages.kind == Kind.EXACT)
            & ((pages.goal == Goal.QUANTIZED) | (pages.goal == Goal.HOST))
        )
        total = sum(state.model_of(slot).exact.frame for slot in leaving.tolist())
        for frame, emptied in list(self._emptying.items()):
            if not state.hbm.items_used(emptied.quant, frame):
                del self._emptying[frame]
            elif not self._still_emptying(emptied, frame):
                del self._emptying[frame]
                state.hbm.restore(emptied.quant, frame)
        emptying = sum(model.exact.frame for model in self._emptying.values())
        return state.retiring_frames + total + emptying

    def _still_emptying(self, model: Model, frame: int) -> bool:
        """Every item in use of the frame is about to leave it."""
        state, pages = self._state, self._state.pages
        stop = frame + model.quant.frame
        moving = pages.live & (pages.quant >= frame) & (pages.quant < stop) & (pages.goal == Goal.RELOCATE)
        retiring = sum(
            r.pool == "hbm" and r.size_class == model.quant and frame <= r.offset < stop
            for r in state.retirements.values()
        )
        return int(np.count_nonzero(moving)) + retiring >= state.hbm.items_used(model.quant, frame)

    def budget_room(self, session: Session) -> int:
        """Bytes that the session may still reserve under its own budget (a large number without one)."""
        budget = session.options.hbm_budget
        if not budget:
            return 1 << 62
        spare = session.model.quant.item if session.ladder is Ladder.TIERED else 0  # for one page in transit
        return budget - spare - self._state.hbm_bytes_of(session)

    def _over_budget(self, session: Session) -> int:
        """Bytes the session must give back, beyond what is already on its way."""
        wanted = self._demands[session.id][1] if session.id in self._demands else 0
        slots, pages = session.pages.view, self._state.pages
        going = (pages.goal[slots] == Goal.QUANTIZED) & (pages.kind[slots] == Kind.EXACT)
        saved = session.model.exact.item - session.model.quant.item
        gone = (pages.goal[slots] == Goal.HOST) & (pages.kind[slots] == Kind.QUANTIZED)
        coming = (
            int(going.sum()) * saved + int(gone.sum()) * session.model.quant.item + session.retiring_bytes
        )
        return wanted - self.budget_room(session) - coming

    # Making room ---------------------------------------------------------------------------------------------

    def _shrink_pool(self, missing: int) -> None:
        everything = self._state.pages.slots()
        missing = self._quantize_or_drop(everything, missing, Guard.ATTENDABLE)
        if missing > 0 and not self._moves.full() and not self._coldest_out(everything):
            emptied = self._empty_frames(missing)
            if not emptied and not self._moves.flying and not self._state.retirements:
                self._quantize_or_drop(everything, missing, Guard.RECENT)

    def _quantize_or_drop(self, among: Slots, missing: int, guard: Guard) -> int:
        """Lowest-scored exact pages give up their frame. Returns the bytes still missing."""
        state, pages, moves = self._state, self._state.pages, self._moves
        ready = self._idle(among)
        ready = ready[pages.kind[ready] == Kind.EXACT]
        tiered = (
            (pages.ladder[ready] == Ladder.TIERED) & (pages.guard[ready] <= guard) & ~pages.refused[ready]
        )
        droppable = (pages.ladder[ready] == Ladder.DROP) & (pages.guard[ready] == Guard.NONE)
        for slot in self._coldest_first(ready[tiered | droppable]):
            if missing <= 0 or moves.full():
                break
            model = state.model_of(slot)
            if pages.ladder[slot] == Ladder.DROP:
                moves.drop(slot, "budget")
                missing -= model.exact.frame
            elif not model.ready:
                self._fit(model)
                if model.fitting:
                    return 0  # wait for it: nothing has to leave HBM meanwhile
            else:
                free = state.hbm.free_bytes
                if not moves.demote(slot, Goal.QUANTIZED, "pressure"):
                    break  # no slot for the low-bit form
                missing -= model.exact.frame - max(0, free - state.hbm.free_bytes)
        return missing

    def _coldest_out(self, among: Slots) -> bool:
        """Exact pages want to become low-bit and there is neither a slot nor a frame for it: the coldest page of
        either kind goes to host, which makes one. True if room is on its way.
        """
        pages = self._state.pages
        ready = self._idle(among)
        ready = ready[(pages.ladder[ready] == Ladder.TIERED) & (pages.kind[ready] != Kind.NONE)]
        waiting = ready[(pages.kind[ready] == Kind.EXACT) & (pages.guard[ready] <= Guard.ATTENDABLE)]
        if not len(waiting):
            return False
        coming = self._frames_coming() + self._slots_coming(self._state.model_of(int(waiting[0])))
        return coming > 0 or bool(self._send_out(ready[pages.guard[ready] == Guard.NONE], wanted=1))

    def _send_out(self, ready: Slots, wanted: int) -> int:
        """The `wanted` coldest of `ready` leave HBM, as far as they can now. Returns how many."""
        sent = 0
        for slot in self._coldest_first(ready):
            if sent >= wanted or self._moves.full():
                break
            sent += self._moves.demote(slot, Goal.HOST, "pressure")
        return sent

    def _slots_coming(self, model: Model) -> int:
        """Low-bit slots of a model that are on their way to be free."""
        state, pages = self._state, self._state.pages
        leaving = pages.live & (pages.model == model.index) & (pages.goal == Goal.HOST)
        return (
            int(np.count_nonzero(leaving & (pages.kind == Kind.QUANTIZED)))
            + state.retiring_items[model.quant]
        )

    def _empty_frames(self, missing: int) -> bool:
        """Give back low-bit frames: the emptiest one's pages change slots; where too few slots are free, the coldest
        low-bit pages (of any frame) go to host first. True if anything is on its way.
        """
        state, pages, moves = self._state, self._state.pages, self._moves
        busy = False
        for model in state.models.values():
            low = np.flatnonzero(
                pages.live & (pages.model == model.index) & (pages.quant != NOWHERE) & ~pages.doomed
            )
            frames: dict[int, list[int]] = {}
            for slot in low.tolist():
                frames.setdefault(int(pages.quant[slot]) // model.quant.frame * model.quant.frame, []).append(
                    slot
                )
            frames = {f: slots for f, slots in frames.items() if f not in self._emptying}
            if missing <= 0 or moves.full() or not frames:
                continue
            frame = min(frames, key=lambda f: (len(frames[f]), f))
            slots = frames[frame]
            elsewhere = state.hbm.free_items(model.quant) - (
                model.quant.items - state.hbm.items_used(model.quant, frame)
            )
            lacking = len(slots) - elsewhere - self._slots_coming(model)
            if lacking > 0:
                ready = self._idle(low)
                ready = ready[(pages.guard[ready] == Guard.NONE) & (pages.kind[ready] == Kind.QUANTIZED)]
                busy |= bool(self._send_out(ready, lacking))
            elif len(slots) > elsewhere:
                busy = True  # slots are still retiring
            elif all(
                not pages.goal[s] and not pages.moving[s] and pages.kind[s] == Kind.QUANTIZED for s in slots
            ):
                state.hbm.withhold(model.quant, frame)
                going = [moves.demote(s, Goal.RELOCATE, "compaction") for s in slots]
                if all(going):
                    self._emptying[frame] = model
                    missing -= model.exact.frame
                else:
                    state.hbm.restore(model.quant, frame)
                busy = True
        return busy or bool(self._emptying)

    def _shrink_session(self, session: Session, missing: int) -> None:
        """The session's own budget: exact pages become low-bit, then low-bit ones leave, coldest first."""
        pages, moves, model = self._state.pages, self._moves, session.model
        own = session.pages.view.copy()
        saved = model.exact.item - (model.quant.item if session.ladder is Ladder.TIERED else 0)
        for guard in (Guard.ATTENDABLE, Guard.RECENT):
            frames = -(-missing // saved) * model.exact.frame
            left = self._quantize_or_drop(own, frames, guard) // model.exact.frame * saved
            if left <= 0:
                return
            ready = self._idle(own)
            low = ready[(pages.kind[ready] == Kind.QUANTIZED) & (pages.guard[ready] == Guard.NONE)]
            for slot in self._coldest_first(low):
                if left <= 0 or moves.full():
                    break
                if moves.demote(slot, Goal.HOST, "budget"):
                    left -= model.quant.item
            if left <= 0 or moves.flying or self._state.retirements:
                return
            missing = left

    # Coming back, and getting ready ------------------------------------------------------------------------------

    def tick(self) -> None:
        """Time passed: fit codecs, make low-bit replicas ahead of need, bring hot and pinned pages back."""
        state, moves = self._state, self._moves
        for model in list(state.models.values()):
            if not model.ready and not model.fitting:
                self._fit(model, at_least=FIT_EAGERLY_AT)
        spare = state.hbm.free_bytes - state.config.high_watermark * state.hbm.size
        if moves.full() or self._demands:
            return
        self.rescore()
        spare = self._restore_pinned(int(spare))
        spare = self._promote_hot(spare)
        if state.config.demotion == "pressure":
            spare = self._refill(spare)
            self._prepare(spare)

    def _restore_pinned(self, spare: int) -> int:
        """Pinned pages stay attendable: bring back those that are not."""
        pages = self._state.pages
        ready = self._idle(self._state.pages.slots())
        cold = ready[(pages.pin[ready] > Guard.NONE) & (pages.kind[ready] == Kind.NONE)]
        for slot in cold[pages.host[cold] != NOWHERE].tolist():
            if self._moves.full():
                break
            if self._moves.promote(slot, Goal.LOWBIT, "pin"):
                spare -= self._state.model_of(slot).quant.item
        exact = ready[(pages.pin[ready] == Guard.EXACT) & (pages.kind[ready] == Kind.QUANTIZED)]
        return self._promote_exact(exact[pages.host_kind[exact] == Kind.EXACT], spare, "pin")

    def _refill(self, spare: int) -> int:
        """While nobody asks for room, cold pages come back as low-bit replicas, highest score first."""
        state, pages, moves = self._state, self._state.pages, self._moves
        if state.now - self._asked_at < CALM_SECONDS:
            return spare
        ready = self._idle(pages.slots())
        cold = ready[
            (pages.kind[ready] == Kind.NONE)
            & (pages.host[ready] != NOWHERE)
            & (pages.ladder[ready] == Ladder.TIERED)
            & (pages.score[ready] >= state.thresholds.offload_below)
        ]
        for slot in reversed(self._coldest_first(cold)):
            model = state.model_of(slot)
            session = state.sessions[int(pages.owner[slot])]
            within = self.budget_room(session) >= 2 * model.exact.item
            frames = (state.hbm.free_frames(model.exact.frame) - self.kept_frames(model)) * model.exact.frame
            if state.hbm.free_items(model.quant) <= 1 and min(spare, frames) < model.exact.frame:
                break
            if moves.full() or not within or not moves.promote(slot, Goal.LOWBIT, "room"):
                break
            spare -= model.quant.item
        return spare

    def _promote_hot(self, spare: int) -> int:
        state, pages = self._state, self._state.pages
        ready = self._idle(pages.slots())
        hot = ready[
            (pages.kind[ready] == Kind.QUANTIZED)
            & (pages.host_kind[ready] == Kind.EXACT)
            & (pages.score[ready] >= state.thresholds.promote_above)
        ]
        resident = [s for s in hot.tolist() if self._residency(s) >= state.config.min_residency_steps]
        return self._promote_exact(np.array(resident, np.int64), spare, "hot")

    def _promote_exact(self, slots: Slots, spare: int, reason: str) -> int:
        for slot in reversed(self._coldest_first(slots)):
            frame = self._state.model_of(slot).exact.frame
            if spare < frame or self._moves.full():
                break
            if self._moves.promote(slot, Goal.EXACT, reason):
                spare -= frame
        return spare

    def _residency(self, slot: int) -> float:
        session = self._state.sessions.get(int(self._state.pages.owner[slot]))
        return session.step - float(self._state.pages.moved_step[slot]) if session else 0.0

    def _prepare(self, spare: int) -> None:
        """Low-bit replicas of pages below `quantize_below`, while there is plenty of room: demotion is then instant."""
        state, pages = self._state, self._state.pages
        ready = self._idle(pages.slots())
        soon = ready[
            (pages.kind[ready] == Kind.EXACT)
            & (pages.quant[ready] == NOWHERE)
            & (pages.ladder[ready] == Ladder.TIERED)
            & (pages.guard[ready] <= Guard.ATTENDABLE)
            & (pages.score[ready] < state.thresholds.quantize_below)
            & (pages.moving[ready] == 0)
            & ~pages.refused[ready]
        ]
        for slot in self._coldest_first(soon):
            spare -= state.model_of(slot).quant.item
            if spare < state.model_of(slot).exact.frame or self._moves.full() or not self._moves.encode(slot):
                break

    def _apply_thresholds(self) -> None:
        """`demotion = "eager"`: below a threshold the faster replica goes at once (what the paper describes)."""
        state, pages, moves = self._state, self._state.pages, self._moves
        ready = self._idle(pages.slots())
        ready = ready[pages.ladder[ready] == Ladder.TIERED]
        exact = ready[
            (pages.kind[ready] == Kind.EXACT)
            & (pages.guard[ready] <= Guard.ATTENDABLE)
            & (pages.score[ready] < state.thresholds.quantize_below)
            & ~pages.refused[ready]
        ]
        low = ready[
            (pages.kind[ready] == Kind.QUANTIZED)
            & (pages.guard[ready] == Guard.NONE)
            & (pages.score[ready] < state.thresholds.offload_below)
        ]
        for slots, goal in ((exact, Goal.QUANTIZED), (low, Goal.HOST)):
            for slot in self._coldest_first(slots):
                model = state.model_of(slot)
                if goal is Goal.QUANTIZED and not model.ready:
                    self._fit(model)
                elif moves.full() or not moves.demote(slot, goal, "threshold"):
                    break

    def _fit(self, model: Model, at_least: int = 1) -> None:
        """Start fitting a model's codec state from its exact pages; sinks are left out where others exist."""
        pages = self._state.pages
        if model.fitting or model.state_offset == NOWHERE or model.fit_after > self._state.now:
            return
        exact = np.flatnonzero(
            pages.live
            & pages.sealed
            & ~pages.doomed
            & (pages.model == model.index)
            & (pages.exact != NOWHERE)
        )
        if len(exact) < at_least:
            return
        plain = exact[pages.guard[exact] < Guard.EXACT]
        chosen = (plain if len(plain) else exact)[:FIT_PAGES]
        if len(chosen):
            self._moves.fit(model, chosen.tolist())

    # Scores --------------------------------------------------------------------------------------------------

    def rescore(self) -> None:
        """Refresh scores and guards of sessions that changed, and of the sessions that share pages with them."""
        state = self._state
        done: set[int] = set()
        for session in state.sessions.values():
            old = state.now - session.scored_at > RESCORE_SECONDS
            if session.id in done or not (session.stale or old):
                continue
            family = [state.sessions[s] for s in sorted(session.family)]
            self._score_family(family)
            done |= session.family

    def _score_family(self, family: list[Session]) -> None:
        pages = self._state.pages
        for session in family:
            slots = session.pages.view
            pages.score[slots], pages.guard[slots] = -np.inf, Guard.NONE
        for session in family:
            slots = session.pages.view
            if not len(slots):
                session.stale = False
                continue
            counts = session.counts.view.astype(np.int32)
            scores = session.tokens.page_scores(session.starts.view, counts, session.clock(self._state.now))
            session.scores, session.stale, session.scored_at = scores, False, self._state.now
            pages.score[slots] = np.maximum(pages.score[slots], scores)
            pages.guard[slots] = np.maximum(pages.guard[slots], self._guards(session))

    def _guards(self, session: Session) -> NDArray[np.int8]:
        config, pages = self._state.config, self._state.pages
        slots, starts = session.pages.view, session.starts.view
        guards = pages.pin[slots].copy()
        if self._state.clients[session.client].quarantined:
            guards[:] = Guard.EXACT
        elif session.ladder is Ladder.TIERED:
            ends = starts + session.counts.view
            recent = ends > session.length - config.recent_tokens
            guards[recent] = np.maximum(guards[recent], Guard.RECENT)
            guards[starts < config.sink_tokens] = Guard.EXACT
        return guards

    # Choosing ------------------------------------------------------------------------------------------------

    def _idle(self, among: Slots) -> Slots:
        """Sealed pages without a goal that may be chosen now."""
        pages = self._state.pages
        free = (
            pages.live[among] & pages.sealed[among] & ~pages.doomed[among] & (pages.goal[among] == Goal.NONE)
        )
        chosen: Slots = among[free & (pages.retry_at[among] <= self._state.now)]
        return chosen

    def _coldest_first(self, slots: Slots) -> list[int]:
        order = np.argsort(self._state.pages.score[slots], kind="stable")
        ordered: list[int] = slots[order].tolist()
        return ordered
