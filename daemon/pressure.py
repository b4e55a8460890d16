"""Who gives way when HBM is wanted, and who comes back when it is not.

Every page has a score (the policy's) and a guard (how far it may go). Two drivers ask for room: the pool's low
watermark or a reservation that did not fit, and a session's own budget. Room is made in this order, lowest score
first within each (with a middle form, exact pages take that first, and pages that have it become low-bit where these
steps have low-bit pages leave; only when none of them may are low-bit pages sent to host), after superseded pages have
left HBM as they are. "Lowest score" is that of `Scores.coldest_first`: pages of paused sessions come first.

1. exact pages become low-bit: five sixths of a frame for almost no loss, so this comes before any page leaves HBM;
2. pages that the codec refused (values that are not finite) go to host: each holds the frame of several low-bit ones;
3. where no low-bit slot is left, the coldest page of either kind goes to host;
4. where no exact page may give way, a low-bit frame is given back: the coldest low-bit pages go to host and the
   emptiest frame's pages move into the slots that this leaves;
5. as a last resort, pages of the recent window become low-bit too.

The order differs from "the lowest-scored page gives up its fastest replica" in one point, on purpose: a page is not
sent to host while a higher-scored one is still exact (docs/decisions/0004).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from tierkv.daemon.budgets import DOWN, Budgets
from tierkv.daemon.moves import Moves
from tierkv.daemon.pages import Goal, Guard, Ladder, Reason
from tierkv.daemon.scoring import Scores, Slots
from tierkv.daemon.sessions import Model, Session
from tierkv.daemon.state import State
from tierkv.table import NOWHERE, Kind

FIT_PAGES = 64
"""Pages that a codec state is fitted from at most: 1,024 tokens."""

DEMAND_SECONDS = 1.0
"""How long a reservation that did not fit keeps asking for room on its own."""


class Pressure:
    def __init__(self, state: State, moves: Moves, scores: Scores) -> None:
        self._state = state
        self._moves = moves
        self._scores = scores
        self.budgets = Budgets(state)
        self._demands: dict[int, tuple[Model, int, float]] = {}  # session -> model, bytes, until
        self._emptying: dict[int, tuple[Model, Kind]] = {}  # frame of packed pages -> model, form
        self.short = False
        """Room was wanted at the last look: what is free, or about to be, is for those who asked."""
        self.asked_at = -np.inf
        """When a reservation last did not fit (seconds)."""

    # Asking for room -----------------------------------------------------------------------------------------

    def ask(self, session: Session, size: int) -> None:
        """A reservation of `size` bytes did not fit."""
        self._demands[session.id] = (session.model, size, self._state.now + DEMAND_SECONDS)
        self.asked_at = self._state.now

    @property
    def asked(self) -> bool:
        """A reservation waits for room."""
        return bool(self._demands)

    def demanded(self, session: Session) -> int:
        """Bytes that a reservation of the session waits for."""
        return self._demands[session.id][1] if session.id in self._demands else 0

    def satisfied(self, session: int) -> None:
        self._demands.pop(session, None)

    def relieve(self) -> bool:
        """Start what makes the room that is missing. True while anything is on its way."""
        state = self._state
        if self._demands:
            live = state.sessions
            self._demands = {s: d for s, d in self._demands.items() if d[2] > state.now and s in live}
        missing = self._missing()
        self.short = missing > 0 or self.asked or bool(self._emptying)
        self.short |= state.hbm.free_bytes < state.config.low_watermark * state.hbm.size
        over = [s for s in (state.sessions[i] for i in sorted(state.budgeted)) if self._over_budget(s) > 0]
        if missing > 0 or over or state.config.demotion == "eager":
            self._scores.refresh()
        for session in over:
            self._shrink_session(session, self._over_budget(session))
        if state.config.demotion == "eager":
            self._apply_thresholds()
        if missing > 0:
            self._shrink_pool(missing)
        return bool(self._moves.flying or state.retirements) or self._will_be_tried_again()

    def _will_be_tried_again(self) -> bool:
        """Something that may make room waits only for time: for bandwidth, or after a move that failed."""
        state, pages = self._state, self._state.pages
        resting = np.any(pages.live & ~pages.doomed & (pages.retry_at > state.now))
        unfitted = any(model.fit_after > state.now for model in state.models.values())
        return bool(resting) or unfitted or self._moves.full()

    def _missing(self) -> int:
        """Bytes of whole frames that are wanted and not yet on their way."""
        state = self._state
        free, size = state.hbm.free_bytes, state.hbm.size
        low, high = state.config.low_watermark * size, state.config.high_watermark * size
        if free >= low and not self._demands:
            return 0
        coming = self.frames_coming()
        missing = int(high) - free - coming if free + coming < low else 0
        for model, wanted, _ in self._demands.values():
            frame = model.exact.frame
            kept = self.kept_frames(model) * frame
            missing = max(missing, wanted + kept - state.hbm.free_frames(frame) * frame - coming)
        return missing

    def kept_frames(self, model: Model) -> int:
        """Free frames that are not given out: one while no low-bit slot is free, else nothing could be encoded, one
        while no digest has a free slot, else pages would leave without one, and one for the middle form.
        """
        state, pages = self._state, self._state.pages
        own = pages.live & pages.sealed & (pages.model == model.index)
        if not np.any(own & (pages.ladder == Ladder.TIERED)):
            return 0
        return state.kept_for_low_bit(model) + state.kept_for_digests(model) + state.kept_for_middle(model)

    def frames_coming(self) -> int:
        """Bytes of frames on their way to be free: retiring, of pages with a goal, or being emptied."""
        state, pages = self._state, self._state.pages
        leaving = np.flatnonzero(
            pages.live
            & (pages.kind == Kind.EXACT)
            & ((pages.goal == Goal.QUANTIZED) | (pages.goal == Goal.MIDDLE) | (pages.goal == Goal.HOST))
        )
        total = sum(state.model_of(slot).exact.frame for slot in leaving.tolist())
        for frame, (emptied, form) in list(self._emptying.items()):
            if not state.hbm.items_used(emptied.form(form), frame):
                del self._emptying[frame]
            elif not self._still_emptying(emptied, form, frame):
                del self._emptying[frame]
                state.hbm.restore(emptied.form(form), frame)
        emptying = sum(model.exact.frame for model, _ in self._emptying.values())
        return state.retiring_frames + total + emptying

    def _still_emptying(self, model: Model, form: Kind, frame: int) -> bool:
        """Every item in use of the frame is about to leave it."""
        state, pages, size_class = self._state, self._state.pages, model.form(form)
        stop, offsets = frame + size_class.frame, pages.replica(form)
        moving = pages.live & (offsets >= frame) & (offsets < stop) & (pages.goal == Goal.RELOCATE)
        retiring = sum(
            r.pool == "hbm" and r.size_class == size_class and frame <= r.offset < stop
            for r in state.retirements.values()
        )
        return int(np.count_nonzero(moving)) + retiring >= state.hbm.items_used(size_class, frame)

    def _over_budget(self, session: Session) -> int:
        """Bytes the session must give back, beyond what is already on its way."""
        wanted = self._demands[session.id][1] if session.id in self._demands else 0
        return self.budgets.lacking(session, wanted)

    # Making room ---------------------------------------------------------------------------------------------

    def _shrink_pool(self, missing: int) -> None:
        missing -= self._send_out_stale(missing)
        everything = self._state.pages.slots()
        missing = self.quantize_or_drop(everything, missing, Guard.ATTENDABLE)
        missing -= self._send_out_refused(everything, missing, "pressure")
        if missing > 0 and not self._moves.full() and not self._coldest_out(everything):
            emptied = self._empty_frames(missing)
            if not emptied and not self._moves.flying and not self._state.retirements:
                self.quantize_or_drop(everything, missing, Guard.RECENT)

    def quantize_or_drop(self, among: Slots, missing: int, guard: Guard) -> int:
        """Lowest-scored exact pages give up their frame. Returns the bytes still missing."""
        state, pages, moves = self._state, self._state.pages, self._moves
        ready = self._scores.idle(among)
        ready = ready[pages.kind[ready] == Kind.EXACT]
        tiered = (
            (pages.ladder[ready] == Ladder.TIERED) & (pages.guard[ready] <= guard) & ~pages.refused[ready]
        )
        droppable = (pages.ladder[ready] == Ladder.DROP) & (pages.guard[ready] == Guard.NONE)
        droppable &= (
            pages.moving[ready] == 0
        )  # its frame may be another page's before a fork's copy has read it
        without_slot: set[int] = set()
        for slot in self._scores.coldest_first(ready[tiered | droppable]):
            if missing <= 0 or moves.full():
                break
            model = state.model_of(slot)
            if model.index in without_slot:
                continue
            if pages.ladder[slot] == Ladder.DROP:
                moves.tiers.drop(slot, "budget")
                missing -= model.exact.frame
                continue
            if not model.ready:
                self.fit(model)
                if model.fitting:
                    return 0  # wait for it: nothing has to leave HBM meanwhile
                if model.middle is None:
                    continue
            if not self.budgets.may_encode(slot):
                continue
            free = state.hbm.free_bytes
            if not self._down(slot, model):
                without_slot.add(model.index)  # for its packed form; pages of other models may find one
                continue
            missing -= model.exact.frame - max(0, free - state.hbm.free_bytes)
        return missing

    def _down(self, slot: int, model: Model) -> bool:
        """An exact page goes one rung down, or two where the middle one has no room and no page of it can make some."""
        if model.middle is not None and self.budgets.may_encode(slot, Kind.MIDDLE):
            if self._moves.demote(slot, Goal.MIDDLE, "pressure"):
                return True
            if self._moves.has_exact_copy(slot) and self._leaving_middle(model):
                return False
        return self._moves.demote(slot, Goal.QUANTIZED, "pressure")

    def _leaving_middle(self, model: Model) -> bool:
        """Slots of the middle form are on their way to be free, or can be made so."""
        slots = self._state.pages.slots()
        coming = self._slots_coming(model, Kind.MIDDLE)
        return coming > 0 or (model.ready and len(self._softest(slots, model)) > 0)

    def _softest(self, among: Slots, model: Model) -> Slots:
        """Pages of the middle form that may become low-bit: their exact copies are there to be encoded."""
        pages = self._state.pages
        ready = self._scores.idle(among)
        ready = ready[(pages.kind[ready] == Kind.MIDDLE) & (pages.model[ready] == model.index)]
        ready = ready[(pages.guard[ready] <= Guard.ATTENDABLE) & ~pages.refused[ready]]
        chosen: Slots = ready[pages.host_kind[ready] == Kind.EXACT]
        return chosen

    def _out_of_middle(self, among: Slots, model: Model, wanted: int, reason: Reason) -> int:
        """Up to `wanted` pages leave the middle form, coldest first: for low-bit, or for host where none can become
        that for want of an exact copy. Returns how many.
        """
        pages, sent = self._state.pages, 0
        for slot in self._scores.coldest_first(self._softest(among, model)):
            if sent >= wanted or self._moves.full():
                return sent
            if self.budgets.may_encode(slot):
                if not self._moves.demote(slot, Goal.QUANTIZED, reason):
                    return sent
                sent += 1
        stuck = self._scores.idle(among)
        stuck = stuck[(pages.kind[stuck] == Kind.MIDDLE) & (pages.model[stuck] == model.index)]
        stuck = stuck[(pages.host_kind[stuck] != Kind.EXACT) | pages.refused[stuck]]
        stuck = stuck[pages.guard[stuck] == Guard.NONE]
        return sent + self._send_out(stuck, wanted - sent, reason)

    def make_frame(self, among: Slots, model: Model) -> None:
        """Begin to free a frame of the model without sending anything to host."""
        missing = self.quantize_or_drop(among, model.exact.frame, Guard.ATTENDABLE)
        if missing > 0 and model.middle is not None:
            self._empty_frame(model, Kind.MIDDLE)

    def _coldest_out(self, among: Slots) -> bool:
        """Exact pages want to be packed and there is neither a slot nor a frame for it: the coldest page of the middle
        form becomes low-bit, or the coldest of any goes to host, which makes one. True if room is on its way.
        """
        pages = self._state.pages
        ready = self._scores.idle(among)
        ready = ready[(pages.ladder[ready] == Ladder.TIERED) & (pages.kind[ready] != Kind.NONE)]
        waiting = ready[(pages.kind[ready] == Kind.EXACT) & (pages.guard[ready] <= Guard.ATTENDABLE)]
        waiting = waiting[~pages.refused[waiting]]
        if not len(waiting):
            return False
        model = self._state.model_of(int(waiting[0]))
        if self.frames_coming() or any(self._slots_coming(model, form) for form in model.forms[1:]):
            return True
        if model.middle is not None and self._out_of_middle(among, model, 1, "pressure"):
            return True
        return bool(self._send_out(ready[pages.guard[ready] == Guard.NONE], wanted=1))

    def _send_out_stale(self, missing: int) -> int:
        """Superseded exact pages leave HBM as they are. Returns bytes of frames."""
        state, pages = self._state, self._state.pages
        ready = self._scores.idle(np.flatnonzero(pages.live & pages.stale))
        ready = ready[(pages.kind[ready] == Kind.EXACT) & (pages.ladder[ready] == Ladder.TIERED)]
        ready = ready[pages.guard[ready] == Guard.NONE]
        frame = max((model.exact.frame for model in state.models.values()), default=1)
        return self._send_out(ready, -(-missing // frame)) * frame

    def _send_out_refused(self, among: Slots, missing: int, reason: Reason) -> int:
        """Exact pages that cannot become low-bit leave HBM as they are, coldest first. Returns bytes of frames."""
        state, pages = self._state, self._state.pages
        ready = self._scores.idle(among)
        ready = ready[pages.refused[ready] & (pages.kind[ready] == Kind.EXACT)]
        ready = ready[(pages.ladder[ready] == Ladder.TIERED) & (pages.guard[ready] == Guard.NONE)]
        sent = 0
        for slot in self._scores.coldest_first(ready):
            if sent >= missing or self._moves.full() or not self._moves.demote(slot, Goal.HOST, reason):
                break
            sent += state.model_of(slot).exact.frame
        return sent

    def _send_out(self, ready: Slots, wanted: int, reason: Reason = "pressure") -> int:
        """The `wanted` coldest of `ready` leave HBM, as far as they can now. Returns how many."""
        sent = 0
        for slot in self._scores.coldest_first(ready):
            if sent >= wanted or self._moves.full():
                break
            sent += self._moves.demote(slot, Goal.HOST, reason)
        return sent

    def _slots_coming(self, model: Model, form: Kind) -> int:
        """Slots of a model's packed form that are on their way to be free."""
        state, pages = self._state, self._state.pages
        leaving = pages.goal == Goal.HOST
        if form is Kind.MIDDLE:
            leaving |= pages.goal == Goal.QUANTIZED
        leaving &= pages.live & (pages.model == model.index) & (pages.kind == form)
        return int(np.count_nonzero(leaving)) + state.retiring_items[model.form(form)]

    def _empty_frames(self, missing: int) -> bool:
        """Give back frames of packed pages, of the middle form as long as that can make room. True if anything is on
        its way.
        """
        busy = self._forget_prepared()
        for model in self._state.models.values():
            for form in model.forms[1:]:
                if missing > 0 and not self._moves.full() and (emptying := self._empty_frame(model, form)):
                    missing -= model.exact.frame * (emptying == "moving")
                    busy = True
                    break
        return busy or bool(self._emptying)

    def _empty_frame(self, model: Model, form: Kind) -> Literal["", "making room", "moving"]:
        """The emptiest frame's pages change slots; where too few slots are free, the coldest pages of the form (in any
        frame) go one rung down first. Empty where neither can be.
        """
        state, pages, moves, size_class = self._state, self._state.pages, self._moves, model.form(form)
        offsets = pages.replica(form)
        held = np.flatnonzero(
            pages.live & (pages.model == model.index) & (offsets != NOWHERE) & ~pages.doomed
        )
        frames = offsets[held] // size_class.frame * size_class.frame
        known, counts = np.unique(frames[~np.isin(frames, list(self._emptying))], return_counts=True)
        if not len(known):
            return ""
        frame = int(known[np.argmin(counts)])
        slots: list[int] = held[frames == frame].tolist()
        elsewhere = state.hbm.free_items(size_class) - (
            size_class.items - state.hbm.items_used(size_class, frame)
        )
        lacking = len(slots) - elsewhere - self._slots_coming(model, form)
        if lacking > 0:
            if form is Kind.MIDDLE:
                sent = self._out_of_middle(held, model, lacking, "pressure")
            else:
                ready = self._scores.idle(held)
                ready = ready[(pages.guard[ready] == Guard.NONE) & (pages.kind[ready] == form)]
                sent = self._send_out(ready, lacking)
            return "making room" if sent else ""
        if len(slots) > elsewhere:
            return "making room"  # slots are still retiring
        if any(pages.goal[s] or pages.moving[s] or pages.kind[s] != form for s in slots):
            leaving = form is Kind.MIDDLE and any(pages.goal[s] for s in slots)
            return "making room" if leaving else ""  # no page goes to host while others still become low-bit
        state.hbm.withhold(size_class, frame)
        going = [moves.demote(s, Goal.RELOCATE, "compaction") for s in slots]
        if all(going):
            self._emptying[frame] = (model, form)
            return "moving"
        state.hbm.restore(size_class, frame)
        return "making room"

    def _forget_prepared(self) -> bool:
        """Give up packed replicas made ahead for pages that may not be demoted any more: they would hold their frame.
        True if there were any. They retire, since a sharer of a page that was adopted may still read one.
        """
        state, pages = self._state, self._state.pages
        ready = self._scores.idle(pages.slots())
        ready = ready[pages.moving[ready] == 0]
        held = (pages.kind[ready] == Kind.EXACT) & (pages.guard[ready] > Guard.ATTENDABLE)
        found = False
        for form in (Kind.MIDDLE, Kind.QUANTIZED):
            ahead = ready[held & (pages.replica(form)[ready] != NOWHERE)]
            for slot in ahead.tolist():
                state.retire_replica(slot, form)
            found |= len(ahead) > 0
            held |= pages.kind[ready] == Kind.MIDDLE  # a move that it was made for has failed
        return found

    def _shrink_session(self, session: Session, missing: int) -> None:
        """The session's own budget: exact pages are packed, then low-bit ones leave, coldest first."""
        pages, moves, model = self._state.pages, self._moves, session.model
        own = session.pages.view.copy()
        packed = (model.middle or model.quant).item
        saved = model.exact.item - (packed if session.ladder is Ladder.TIERED else 0)
        for guard in (Guard.ATTENDABLE, Guard.RECENT):
            frames = -(-missing // saved) * model.exact.frame
            left = self.quantize_or_drop(own, frames, guard) // model.exact.frame * saved
            frames = -(-left // model.exact.item) * model.exact.frame if left > 0 else 0
            left -= self._send_out_refused(own, frames, "budget") // model.exact.frame * model.exact.item
            if left > 0 and self.budgets.may_pack(own, guard):
                if self.budgets.coming_down(session):
                    return  # there will be room to pack more: no page leaves HBM for want of that
                left = min(left, packed)
            if left > 0 and model.middle is not None:
                step = model.middle.item - model.quant.item
                left -= self._out_of_middle(own, model, -(-left // step), "budget") * step
            if left <= 0:
                return
            ready = self._scores.idle(own)
            low = ready[(pages.kind[ready] == Kind.QUANTIZED) & (pages.guard[ready] == Guard.NONE)]
            for slot in self._scores.coldest_first(low):
                if left <= 0 or moves.full():
                    break
                if moves.demote(slot, Goal.HOST, "budget"):
                    left -= model.quant.item
            if left <= 0 or moves.flying or self._state.retirements:
                return
            missing = left

    def make_budget_room(self, session: Session) -> None:
        """Begin to pack an exact page for cold ones that the session's own budget keeps away."""
        if not self.budgets.coming_down(session):
            frame = session.model.exact.frame
            self.quantize_or_drop(session.pages.view.copy(), frame, Guard.ATTENDABLE)

    def _apply_thresholds(self) -> None:
        """`demotion = "eager"`: below a threshold the faster replica goes at once (what the paper describes)."""
        state, pages, moves = self._state, self._state.pages, self._moves
        ready = self._scores.idle(pages.slots())
        ready = ready[pages.ladder[ready] == Ladder.TIERED]
        exact = ready[
            (pages.kind[ready] == Kind.EXACT)
            & (pages.guard[ready] <= Guard.ATTENDABLE)
            & (pages.score[ready] < state.thresholds.quantize_below)
            & ~pages.refused[ready]
        ]
        softest = [self._softest(ready, model) for model in state.models.values() if model.middle is not None]
        middle = np.concatenate([ready[:0], *softest])
        middle = middle[pages.score[middle] < state.thresholds.quantize_below]
        soften = self._may_soften(ready)
        low = ready[
            (pages.kind[ready] == Kind.QUANTIZED)
            & (pages.guard[ready] == Guard.NONE)
            & (pages.score[ready] < state.thresholds.offload_below)
        ]
        steps = ((exact, Goal.QUANTIZED), (middle, Goal.QUANTIZED), (soften, Goal.MIDDLE), (low, Goal.HOST))
        for slots, goal in steps:
            for slot in self._scores.coldest_first(slots):
                model = state.model_of(slot)
                if goal is Goal.QUANTIZED and not model.ready:
                    self.fit(model)
                elif goal in DOWN and not self.budgets.may_encode(slot, DOWN[goal]):
                    continue
                elif moves.full() or not moves.demote(slot, goal, "threshold"):
                    break

    def _may_soften(self, ready: Slots) -> Slots:
        """Exact pages whose score lets them take the middle form, and no lower one."""
        state, pages = self._state, self._state.pages
        if state.middle is None:
            return ready[:0]
        chosen: Slots = ready[
            (pages.kind[ready] == Kind.EXACT)
            & (pages.guard[ready] <= Guard.ATTENDABLE)
            & (pages.score[ready] >= state.thresholds.quantize_below)
            & (pages.score[ready] < state.middle_below)
            & ~pages.refused[ready]
        ]
        return chosen

    def fit(self, model: Model, at_least: int = 1) -> None:
        """Start fitting a model's codec state from its exact pages: never from refused ones, from sinks if need be."""
        pages = self._state.pages
        if model.fitting or model.state_offset == NOWHERE or model.fit_after > self._state.now:
            return
        exact = np.flatnonzero(
            pages.live
            & pages.sealed
            & ~pages.doomed
            & ~pages.refused
            & (pages.model == model.index)
            & (pages.exact != NOWHERE)
        )
        if len(exact) < at_least:
            return
        plain = exact[pages.guard[exact] < Guard.EXACT]
        chosen = (plain if len(plain) else exact)[:FIT_PAGES]
        if len(chosen):
            self._moves.launch.fit(model, chosen.tolist())
