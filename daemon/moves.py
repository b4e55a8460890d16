"""Moves carry pages to their goals: prepare pins the source, complete publishes, fail undoes.

A failed move keeps the source, is counted by reason and never raises. A page that must change its tier has a *goal*;
`advance` starts whatever move is still missing and, when every replica that the goal needs exists and no move reads the
others any more, switches the page over.
"""

from __future__ import annotations

from tierkv.daemon.acts import HBM_FORM, HOST_FORM, PACKS, RECALLS, RELOCATES, Act, Move
from tierkv.daemon.flights import Flights
from tierkv.daemon.hostroom import HostRoom
from tierkv.daemon.launcher import Launcher
from tierkv.daemon.pages import Goal, Reason
from tierkv.daemon.state import State
from tierkv.daemon.tiers import Tiers
from tierkv.table import NOWHERE, Kind

RETRY_SECONDS = 0.25
"""A page whose move failed is left alone for this long."""

BATCHES = 2
"""Batches of promotions in flight at most: the next is planned while one is copied, and more could not be taken back
when a step wants other pages."""


class Moves:
    def __init__(self, state: State) -> None:
        self.state = state
        self._flights = Flights(state)
        self.tiers = Tiers(state)
        self.launch = Launcher(state, self._flights, HostRoom(state, self.tiers.drop))

    def full(self) -> bool:
        """No further move may start now."""
        return self._flights.full()

    def may_promote(self, batches: int = BATCHES) -> bool:
        """One more page may begin to come back: less than so many batches of bytes are on their way."""
        return not self.full() and self._flights.returning < batches * self.state.config.promotion_batch

    @property
    def flying(self) -> dict[int, Move]:
        """Moves that have not ended, by number."""
        return self._flights.flying

    # Goals ---------------------------------------------------------------------------------------------------

    def demote(self, slot: int, goal: Goal, reason: Reason) -> bool:
        """Send a page towards a lower form or host. False when that cannot be done now; the page stays as it was."""
        self.state.pages.goal[slot] = goal
        self.tiers.why[slot] = reason
        return self.advance(slot)

    promote = demote
    """Towards an HBM replica (goals EXACT, LOWBIT): the same path, the other way."""

    def advance(self, slot: int) -> bool:
        """Start what the page's goal still misses, or switch it over."""
        goal = Goal(int(self.state.pages.goal[slot]))
        step = {
            Goal.MIDDLE: self._towards_middle,
            Goal.QUANTIZED: self._towards_quantized,
            Goal.HOST: self._towards_host,
            Goal.EXACT: self._towards_exact,
            Goal.LOWBIT: self._towards_lowbit,
            Goal.RELOCATE: self._relocate,
        }.get(goal)
        if step is None or step(slot):
            return True
        self._give_up(slot)
        return False

    def _give_up(self, slot: int) -> None:
        """The page stays what it is; it may be chosen again at once."""
        self.state.pages.goal[slot] = Goal.NONE
        self.tiers.why.pop(slot, None)

    def has_exact_copy(self, slot: int) -> bool:
        """There is an exact copy in host memory, or one is being made."""
        return bool(self.state.pages.host_kind[slot] == Kind.EXACT) or self._flights.running(slot, Act.BACKUP)

    def _towards_middle(self, slot: int) -> bool:
        """Only beside an exact copy: without one the page could never become low-bit."""
        pages = self.state.pages
        if not self.has_exact_copy(slot) and not self.launch.backup(slot):
            return False
        made = pages.middle[slot] != NOWHERE or self._flights.running(slot, Act.SOFTEN)
        if not made and not self.launch.encode(slot, Kind.MIDDLE):
            return False
        if not pages.moving[slot]:
            self.tiers.switch(slot, Kind.MIDDLE)
        return True

    def _towards_quantized(self, slot: int) -> bool:
        pages, flights = self.state.pages, self._flights
        made = pages.quant[slot] != NOWHERE or flights.running(slot, Act.ENCODE)
        if not made and not self.launch.encode(slot):
            return False
        copied = pages.host[slot] != NOWHERE or flights.running(slot, Act.BACKUP)
        if not copied and self.state.config.backup != "never":
            self.launch.backup(slot)  # no room for one: the low-bit form stands for it, flagged lossy
        if pages.quant[slot] != NOWHERE and not pages.moving[slot]:
            self.tiers.switch(slot, Kind.QUANTIZED)
        return True

    def _towards_host(self, slot: int) -> bool:
        pages = self.state.pages
        if pages.host[slot] != NOWHERE:
            if pages.digest[slot] == NOWHERE and not self._flights.running(slot, Act.DIGEST):
                self.launch.digest(slot)  # without room for one the page leaves all the same
            if not pages.moving[slot]:
                self.tiers.switch(slot, Kind.NONE)
            return True
        if pages.kind[slot] == Kind.EXACT:
            return self._flights.running(slot, Act.BACKUP) or self.launch.backup(slot)
        form = Kind(int(pages.kind[slot]))
        return self._flights.running(slot, PACKS[form]) or self.launch.pack(slot, form)

    def _towards_exact(self, slot: int) -> bool:
        pages = self.state.pages
        if pages.kind[slot] == Kind.EXACT:
            pages.goal[slot] = Goal.NONE
            return True
        if self._flights.running(slot, Act.PROMOTE):
            return True
        if pages.host_kind[slot] != Kind.EXACT:
            return False
        return self.launch.copy(slot, Act.PROMOTE, "host", int(pages.host[slot]), "hbm", Kind.EXACT)

    def _towards_lowbit(self, slot: int) -> bool:
        pages = self.state.pages
        if any(self._flights.running(slot, act) for act in (Act.RECALL, Act.RECALL_MIDDLE, Act.COMPRESS)):
            return True  # what it would read while it is compressed may be gone before it was read
        if pages.kind[slot] != Kind.NONE or pages.host[slot] == NOWHERE:
            return False
        form = Kind(int(pages.host_kind[slot]))
        if form is not Kind.EXACT:  # as it is
            return self.launch.copy(slot, RECALLS[form], "host", int(pages.host[slot]), "hbm", form)
        return self.launch.quantize(slot, Act.RECALL, "hbm", Kind.QUANTIZED)

    def _relocate(self, slot: int) -> bool:
        pages, form = self.state.pages, Kind(int(self.state.pages.kind[slot]))
        act = RELOCATES[form]
        if self._flights.running(slot, act):
            return True
        return self.launch.copy(slot, act, "hbm", int(pages.replica(form)[slot]), "hbm", form)

    # Complete and fail -----------------------------------------------------------------------------------------

    def _bury(self, move: Move) -> None:
        """Free pages that were released while this move ran."""
        for slot in (move.slot, *move.others):
            if self.state.pages.doomed[slot] and not self.state.pages.moving[slot]:
                model = self.state.model_of(slot)
                self.state.discard(slot)
                self.state.forget_model(model)

    def complete(self, number: int, checksum: int) -> Move | None:
        """Publish a finished move. Returns it, None if it is not known."""
        move = self._flights.land(number)
        if move is None:
            return None
        pages, slot = self.state.pages, move.slot
        size = move.size_class.item
        self.state.counters.moved_bytes[move.act.value] += size
        if move.act is Act.FIT:
            self._publish_state(move)
        elif pages.doomed[slot]:
            if move.act is not Act.FORK:
                self.state.pool(move.pool).release(move.size_class, move.destination)
        elif move.act in HOST_FORM:
            pages.host[slot], pages.checksum[slot] = move.destination, checksum
            pages.host_kind[slot] = HOST_FORM[move.act]
            self.state.touch(slot, quiet=True)
        elif move.act in (Act.ENCODE, Act.SOFTEN):
            pages.replica(HBM_FORM[move.act])[slot] = move.destination
        elif move.act is Act.PROMOTE:
            pages.exact[slot] = move.destination
            self.tiers.switch(slot, Kind.EXACT)
        elif move.act in (Act.RECALL, Act.RECALL_MIDDLE):
            pages.replica(HBM_FORM[move.act])[slot] = move.destination
            self.tiers.switch(slot, HBM_FORM[move.act])
        elif move.act in (Act.RELOCATE, Act.RELOCATE_MIDDLE):
            form = HBM_FORM[move.act]
            self.state.retire_replica(slot, form)
            pages.replica(form)[slot], pages.goal[slot] = move.destination, Goal.NONE
            self.tiers.why.pop(slot, None)
            self.state.touch(slot)
        elif move.act is Act.COMPRESS:
            self.state.retire("host", self.state.host_class(slot), int(pages.host[slot]), slot)
            pages.host[slot], pages.checksum[slot] = move.destination, checksum
            pages.host_kind[slot], pages.lossy[slot] = Kind.QUANTIZED, True
            self.state.touch(slot)
        elif move.act is Act.DIGEST:
            self._keep_digest(move)
        self._go_on(move)
        self._bury(move)
        return move

    def _go_on(self, move: Move) -> None:
        """Pages that waited for the move's end."""
        pages = self.state.pages
        for slot in (move.slot, *move.others):
            if pages.goal[slot] and not pages.doomed[slot]:
                self.advance(slot)

    def _keep_digest(self, move: Move) -> None:
        state, pages, slot = self.state, self.state.pages, move.slot
        leaves = pages.host[slot] != NOWHERE and (
            pages.kind[slot] == Kind.NONE or pages.goal[slot] == Goal.HOST
        )
        if pages.digest[slot] == NOWHERE and leaves:
            pages.digest[slot] = move.destination
            state.touch(slot, quiet=True)
        else:  # the page came back, or was lost, meanwhile
            state.hbm.release(move.size_class, move.destination)

    def _publish_state(self, move: Move) -> None:
        model = self.state.model_of(move.slot)
        model.fitting, model.state = False, move.destination
        self.state.dirty |= model.sessions
        self.state.forget_model(model)

    def fail(self, number: int, reason: str) -> Move | None:
        """Undo a failed move: the source stays what it was."""
        move = self._flights.land(number)
        if move is None:
            return None
        state, pages, slot = self.state, self.state.pages, move.slot
        state.counters.failed_moves[(*move.act.value, reason)] += 1
        if move.act is Act.FIT:
            model = state.model_of(slot)
            model.fitting, model.fit_after = False, state.now + RETRY_SECONDS
            if reason == "non-finite":  # none of them can be fitted from, nor encoded
                pages.refused[[slot, *move.others]] = True
            self._go_on(move)
            state.forget_model(model)
        elif move.act is not Act.FORK:
            state.pool(move.pool).release(move.size_class, move.destination)
        if not pages.doomed[slot] and move.act not in (Act.FIT, Act.FORK):
            if reason == "non-finite":
                pages.refused[slot] = True  # not tried again, so it need not rest: it may leave HBM at once
            else:
                pages.retry_at[slot] = state.now + RETRY_SECONDS
            if reason == "checksum" and pages.host[slot] != NOWHERE:  # two moves may have read it
                self.tiers.lose_host_replica(slot)
            if move.act is Act.DIGEST and pages.goal[slot] == Goal.HOST and pages.host[slot] != NOWHERE:
                if not pages.moving[slot]:
                    self.tiers.switch(slot, Kind.NONE)  # without a digest; it is tried again later
            elif pages.goal[slot]:
                self._give_up(slot)
        self._bury(move)
        return move
