"""Moves: prepare pins the source and reserves the destination, complete publishes, fail undoes.

A failed move keeps the source, is counted by reason and never raises. A page that must change its tier has a *goal*;
`advance` starts whatever move is still missing and, when every replica that the goal needs exists, switches the page
over: the table changes first, and the memory of the replica that it leaves retires.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import NamedTuple

import numpy as np

from tierkv.daemon.allocator import SizeClass
from tierkv.daemon.events import Copy, FitCodec, Quantize, RequestToken, Summarize
from tierkv.daemon.hostroom import HostRoom
from tierkv.daemon.pages import REASONS, TIER, Goal, Guard, Ladder, Outcome, Reason
from tierkv.daemon.sessions import Model
from tierkv.daemon.state import Pool, State
from tierkv.prefetch.digests import digest_shape
from tierkv.table import NOWHERE, Kind

RETRY_SECONDS = 0.25
"""A page whose move failed is left alone for this long."""


class Act(Enum):
    """What a move does; the value is `(source, destination)` for counters."""

    BACKUP = ("hbm", "host")
    ENCODE = ("hbm", "quantized")
    SOFTEN = ("hbm", "middle")
    PACK = ("quantized", "host")  # a low-bit replica goes to host as it is
    PACK_MIDDLE = ("middle", "host")
    RELOCATE = ("quantized", "quantized")
    RELOCATE_MIDDLE = ("middle", "middle")
    PROMOTE = ("host", "hbm")
    RECALL = ("host", "quantized")
    RECALL_MIDDLE = ("host", "middle")
    COMPRESS = ("host", "host")  # an exact host replica becomes low-bit
    DIGEST = ("host", "digest")  # what a cold page leaves in HBM
    FORK = ("hbm", "hbm")
    FIT = ("hbm", "codec")


ENCODES = {Kind.MIDDLE: Act.SOFTEN, Kind.QUANTIZED: Act.ENCODE}
PACKS = {Kind.MIDDLE: Act.PACK_MIDDLE, Kind.QUANTIZED: Act.PACK}
RELOCATES = {Kind.MIDDLE: Act.RELOCATE_MIDDLE, Kind.QUANTIZED: Act.RELOCATE}
RECALLS = {Kind.MIDDLE: Act.RECALL_MIDDLE, Kind.QUANTIZED: Act.RECALL}
"""The acts of a packed form."""

HOST_FORM = {Act.BACKUP: Kind.EXACT, Act.PACK: Kind.QUANTIZED, Act.PACK_MIDDLE: Kind.MIDDLE}
"""The form that an act writes into host memory."""

HBM_FORM = {act: form for acts in (ENCODES, RELOCATES, RECALLS) for form, act in acts.items()}
"""The form that an act writes into HBM."""


class Move(NamedTuple):
    number: int
    act: Act
    slot: int  # the page read; for FIT the first of them
    pool: Pool  # of the destination
    size_class: SizeClass
    destination: int
    others: tuple[int, ...] = ()  # FORK: the new page; FIT: the other pages read
    request: RequestToken = 0


class Moves:
    """Starts moves, completes them, and carries pages to their goals."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.room = HostRoom(state)
        self.room.drop = self.drop
        self.flying: dict[int, Move] = {}
        self._acts: dict[int, Counter[Act]] = {}  # slot -> what runs on it
        self._reason: dict[int, Reason] = {}  # slot -> why it has a goal
        self._next = 1
        self._bandwidth_debt = 0.0
        self._debt_at = 0.0

    # What may start ------------------------------------------------------------------------------------------

    def full(self) -> bool:
        """No further move may start now: too many in flight, or the bandwidth budget is used up."""
        config = self.state.config
        if config.move_bandwidth:
            elapsed, self._debt_at = self.state.now - self._debt_at, self.state.now
            self._bandwidth_debt = max(0.0, self._bandwidth_debt - elapsed * config.move_bandwidth)
            if self._bandwidth_debt > 0:
                return True
        return len(self.flying) >= config.max_moves_in_flight

    def running(self, slot: int, act: Act) -> bool:
        return slot in self._acts and self._acts[slot][act] > 0

    # Goals ---------------------------------------------------------------------------------------------------

    def demote(self, slot: int, goal: Goal, reason: Reason) -> bool:
        """Send a page towards low-bit or host. False when that cannot be done now; the page stays as it was."""
        self.state.pages.goal[slot] = goal
        self._reason[slot] = reason
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
        self._reason.pop(slot, None)

    def has_exact_copy(self, slot: int) -> bool:
        """There is an exact copy in host memory, or one is being made."""
        return bool(self.state.pages.host_kind[slot] == Kind.EXACT) or self.running(slot, Act.BACKUP)

    def _towards_middle(self, slot: int) -> bool:
        """Only beside an exact copy: without one the page could never become low-bit."""
        pages = self.state.pages
        if not self.has_exact_copy(slot) and not self.backup(slot):
            return False
        made = pages.middle[slot] != NOWHERE or self.running(slot, Act.SOFTEN)
        if not made and not self.encode(slot, Kind.MIDDLE):
            return False
        if not pages.moving[slot]:  # a state may be fitted from the exact replica
            self._switch(slot, Kind.MIDDLE)
        return True

    def _towards_quantized(self, slot: int) -> bool:
        pages, config = self.state.pages, self.state.config
        if pages.quant[slot] == NOWHERE and not self.running(slot, Act.ENCODE) and not self.encode(slot):
            return False
        if pages.host[slot] == NOWHERE and config.backup != "never" and not self.running(slot, Act.BACKUP):
            self.backup(slot)  # no room for an exact copy: the low-bit form stands for it, flagged lossy
        if (
            pages.quant[slot] != NOWHERE and not pages.moving[slot]
        ):  # nothing reads the exact replica any more
            self._switch(slot, Kind.QUANTIZED)
        return True

    def _towards_host(self, slot: int) -> bool:
        pages = self.state.pages
        if pages.host[slot] != NOWHERE:
            if pages.digest[slot] == NOWHERE and not self.running(slot, Act.DIGEST):
                self.digest(slot)  # without room for one the page leaves all the same
            if not pages.moving[slot]:
                self._switch(slot, Kind.NONE)
            return True
        if pages.kind[slot] == Kind.EXACT:
            return self.running(slot, Act.BACKUP) or self.backup(slot)
        form = Kind(int(pages.kind[slot]))
        return self.running(slot, PACKS[form]) or self._pack(slot, form)

    def _towards_exact(self, slot: int) -> bool:
        pages = self.state.pages
        if pages.kind[slot] == Kind.EXACT:
            pages.goal[slot] = Goal.NONE
            return True
        if self.running(slot, Act.PROMOTE):
            return True
        if pages.host_kind[slot] != Kind.EXACT:
            return False
        return self._copy(slot, Act.PROMOTE, "host", int(pages.host[slot]), "hbm", Kind.EXACT)

    def _towards_lowbit(self, slot: int) -> bool:
        pages = self.state.pages
        if any(self.running(slot, act) for act in (Act.RECALL, Act.RECALL_MIDDLE, Act.COMPRESS)):
            return True  # what it would read while it is compressed may be gone before it was read
        if pages.kind[slot] != Kind.NONE or pages.host[slot] == NOWHERE:
            return False
        form = Kind(int(pages.host_kind[slot]))
        if form is not Kind.EXACT:  # as it is
            return self._copy(slot, RECALLS[form], "host", int(pages.host[slot]), "hbm", form)
        return self._quantize(slot, Act.RECALL, "hbm", Kind.QUANTIZED)

    def _relocate(self, slot: int) -> bool:
        pages, form = self.state.pages, Kind(int(self.state.pages.kind[slot]))
        act = RELOCATES[form]
        if self.running(slot, act):
            return True
        return self._copy(slot, act, "hbm", int(pages.replica(form)[slot]), "hbm", form)

    def _switch(self, slot: int, kind: Kind) -> None:
        """Attention reads another replica from the next version on; the ones above it retire."""
        state, pages, model = self.state, self.state.pages, self.state.model_of(slot)
        before, after = TIER[Kind(int(pages.kind[slot]))], TIER[kind]
        if kind != Kind.EXACT and pages.exact[slot] != NOWHERE:
            pages.lossy[slot] = pages.host_kind[slot] != Kind.EXACT
        pages.kind[slot] = kind
        for form in model.forms:
            if form is not kind:
                state.retire_replica(slot, form)
        if kind != Kind.NONE and pages.digest[slot] != NOWHERE:
            state.retire("hbm", model.digest, int(pages.digest[slot]), slot)
            pages.digest[slot] = NOWHERE
        if kind == Kind.NONE:
            state.counters.prefetched["wasted"] += int(pages.recalled[slot] == Outcome.PENDING)
            pages.recalled[slot] = Outcome.NONE
            state.counters.without_digest += int(
                state.config.digest_share > 0 and pages.digest[slot] == NOWHERE
            )
        pages.goal[slot] = Goal.NONE
        reason = self._reason.pop(slot, "pressure")
        self._note(slot, reason)
        if before == "host" and reason == "recall":
            pages.recalled[slot] = Outcome.PENDING
        state.counters.moved_pages[before, after, reason] += 1
        state.counters.recalled_pages += before == "host"
        state.touch(slot)

    def drop(self, slot: int, reason: Reason) -> None:
        """The page goes for good: no replica is left. Its tokens stay in the table, unattended."""
        state, pages, model = self.state, self.state.pages, self.state.model_of(slot)
        for form in model.forms:
            state.retire_replica(slot, form)
        if pages.host[slot] != NOWHERE:
            state.retire("host", state.host_class(slot), int(pages.host[slot]), slot)
        if pages.digest[slot] != NOWHERE:
            state.retire("hbm", model.digest, int(pages.digest[slot]), slot)
        pages.host[slot] = pages.digest[slot] = NOWHERE
        pages.kind[slot] = pages.host_kind[slot] = Kind.NONE
        pages.goal[slot] = Goal.NONE
        self._note(slot, reason)
        state.counters.dropped_pages[state.region_label(slot), reason] += 1
        state.touch(slot)

    def _note(self, slot: int, reason: Reason) -> None:
        """The page has changed its tier."""
        pages = self.state.pages
        session = self.state.sessions.get(int(pages.owner[slot]))
        pages.moved_step[slot] = session.step if session else 0.0
        pages.moved_why[slot] = REASONS.index(reason)

    # Prepare -------------------------------------------------------------------------------------------------

    def backup(self, slot: int) -> bool:
        """Copy the exact replica to host. False when host has no room."""
        pages = self.state.pages
        if pages.exact[slot] == NOWHERE or pages.host[slot] != NOWHERE or self.running(slot, Act.BACKUP):
            return False
        return self._copy(slot, Act.BACKUP, "hbm", int(pages.exact[slot]), "host", Kind.EXACT)

    def encode(self, slot: int, form: Kind = Kind.QUANTIZED) -> bool:
        """Make a packed replica in HBM. False when there is no room for it."""
        return not self.state.pages.refused[slot] and self._quantize(slot, ENCODES[form], "hbm", form)

    def compress(self, slot: int) -> bool:
        """Replace a cold page's exact host replica by its low-bit form (flagged lossy)."""
        if self.state.pages.refused[slot]:
            return False
        return self._quantize(slot, Act.COMPRESS, "host", Kind.QUANTIZED)

    def digest(self, slot: int) -> bool:
        """Make the digest of a page whose host replica exists. False when digests are off or have no room."""
        state, pages, model = self.state, self.state.pages, self.state.model_of(slot)
        if not (state.hbm.free_items(model.digest) or state.kept_for_digests(model)):
            return False
        if pages.host_kind[slot] == Kind.QUANTIZED and not model.ready:
            return False
        if not state.may_hold_digest(state.sessions.get(int(pages.owner[slot]))):
            return False
        destination = state.hbm.allocate(model.digest)
        if destination is None:
            return False
        move = self._launch(slot, Act.DIGEST, "hbm", model.digest, destination)
        layers = digest_shape(model.geometry, state.config.digest_layers).layers
        source = (int(pages.host[slot]), int(pages.host_kind[slot]), int(pages.checksum[slot]))
        state.out.append(
            Summarize(
                move.number, model.geometry, layers, int(pages.count[slot]), *source, model.state, destination,
                int(pages.id[slot]),
            )
        )  # fmt: skip
        return True

    def _pack(self, slot: int, form: Kind) -> bool:
        source = int(self.state.pages.replica(form)[slot])
        return self._copy(slot, PACKS[form], "hbm", source, "host", form)

    def fork(self, slot: int, child: int, request: RequestToken) -> bool:
        """Copy the open page for a forked session; `child` is the new page's slot (its exact frame is reserved)."""
        state, pages, model = self.state, self.state.pages, self.state.model_of(slot)
        move = self._launch(
            slot, Act.FORK, "hbm", model.exact, int(pages.exact[child]), others=(child,), request=request
        )
        source, size, key = int(pages.exact[slot]), model.geometry.page_bytes, int(pages.id[child])
        state.out.append(Copy(move.number, "hbm", source, 0, "hbm", move.destination, size, key))
        return True

    def fit(self, model: Model, slots: list[int]) -> None:
        """Fit the model's codec state; `slots` are exact pages that it may be fitted from."""
        state, pages = self.state, self.state.pages
        model.fitting = True
        size = SizeClass(model.state_bytes, model.state_bytes)
        move = self._launch(slots[0], Act.FIT, "hbm", size, model.state_offset, others=tuple(slots[1:]))
        offsets = tuple(int(pages.exact[slot]) for slot in slots)
        counts = tuple(int(pages.count[slot]) for slot in slots)
        state.out.append(
            FitCodec(move.number, model.geometry, offsets, counts, model.state_offset, model.model_id)
        )

    def _copy(
        self, slot: int, act: Act, src_pool: Pool, src: int, dst_pool: Pool, form: Kind
    ) -> bool:  # fmt: skip
        state, pages, model = self.state, self.state.pages, self.state.model_of(slot)
        size, size_class = state.page_bytes(model, form), model.form(form)
        destination = self._reserve(dst_pool, size_class, slot)
        if destination is None:
            return False
        move = self._launch(slot, act, dst_pool, size_class, destination)
        checksum = int(pages.checksum[slot]) if src_pool == "host" else 0
        key = int(pages.id[slot])
        state.out.append(Copy(move.number, src_pool, src, checksum, dst_pool, destination, size, key))
        self._charge(size)
        return True

    def _exact_source(self, slot: int) -> tuple[Pool, int] | None:
        """Where exact bytes of the page lie. Nothing else is ever encoded, so losses cannot add up."""
        pages = self.state.pages
        if pages.exact[slot] != NOWHERE:
            return "hbm", int(pages.exact[slot])
        return ("host", int(pages.host[slot])) if pages.host_kind[slot] == Kind.EXACT else None

    def _quantize(self, slot: int, act: Act, dst_pool: Pool, form: Kind) -> bool:
        state, pages, model = self.state, self.state.pages, self.state.model_of(slot)
        source = self._exact_source(slot)
        if source is None or (form is Kind.QUANTIZED and not model.ready):
            return False
        src_pool, src = source
        destination = self._reserve(dst_pool, model.form(form), slot)
        if destination is None:
            return False
        move = self._launch(slot, act, dst_pool, model.form(form), destination)
        checksum = int(pages.checksum[slot]) if src_pool == "host" else 0
        count, key = int(pages.count[slot]), int(pages.id[slot])
        where = (src_pool, src, checksum, dst_pool, destination)
        state.out.append(Quantize(move.number, model.geometry, model.state, count, *where, key, form))
        self._charge(model.geometry.page_bytes)
        return True

    def _reserve(self, pool: Pool, size_class: SizeClass, slot: int) -> int | None:
        if pool == "host":
            return self.room.allocate(size_class, slot, self.compress)
        model = self.state.model_of(slot)
        if size_class == model.quant and not self._may_subdivide(model):
            return None
        if size_class == model.middle and not self._may_subdivide_middle(model):
            return None
        return self.state.hbm.allocate(size_class)

    def _may_subdivide(self, model: Model) -> bool:
        """Whether low-bit pages find a slot, or may take a frame for one: not the last one, if digests want it and too
        few exact pages are left that would soon give up theirs.
        """
        state, pages = self.state, self.state.pages
        kept = state.kept_for_digests(model)
        if not kept or state.hbm.free_items(model.quant) or state.hbm.free_frames(model.exact.frame) > kept:
            return True
        giving = pages.live & pages.sealed & (pages.model == model.index) & (pages.kind == Kind.EXACT)
        giving &= (pages.ladder == Ladder.TIERED) & (pages.guard <= Guard.ATTENDABLE) & ~pages.refused
        return int(np.count_nonzero(giving)) > kept + 1

    def _may_subdivide_middle(self, model: Model) -> bool:
        """Likewise for pages of the middle form, which leave the last frame to low-bit ones, too."""
        hbm = self.state.hbm
        assert model.middle is not None
        kept = self.state.kept_for_low_bit(model) + self.state.kept_for_digests(model)
        return bool(hbm.free_items(model.middle)) or hbm.free_frames(model.exact.frame) > kept

    def _launch(
        self, slot: int, act: Act, pool: Pool, size_class: SizeClass, destination: int,
        others: tuple[int, ...] = (), request: RequestToken = 0,
    ) -> Move:  # fmt: skip
        move = Move(self._next, act, slot, pool, size_class, destination, others, request)
        self._next += 1
        self.flying[move.number] = move
        for read in (slot, *others):
            self.state.pages.moving[read] += 1
        self._acts.setdefault(slot, Counter())[act] += 1
        if pool == "hbm" and act not in (Act.FORK, Act.FIT):
            self.state.pages.coming[slot] += size_class.item
        return move

    def _charge(self, size: int) -> None:
        self._bandwidth_debt += size

    # Complete and fail -----------------------------------------------------------------------------------------

    def _land(self, number: int) -> Move | None:
        move = self.flying.pop(number, None)
        if move is None:
            return None  # a move of an earlier life, or told twice
        acts = self._acts[move.slot]
        acts[move.act] -= 1  # an open page may be copied for several forks at once
        if not acts.total():
            del self._acts[move.slot]
        for slot in (move.slot, *move.others):
            self.state.pages.moving[slot] -= 1
        if move.pool == "hbm" and move.act not in (Act.FORK, Act.FIT):
            self.state.pages.coming[move.slot] -= move.size_class.item
        return move

    def _bury(self, move: Move) -> None:
        """Free pages that were released while this move ran."""
        for slot in (move.slot, *move.others):
            if self.state.pages.doomed[slot] and not self.state.pages.moving[slot]:
                model = self.state.model_of(slot)
                self.state.discard(slot)
                self.state.forget_model(model)

    def complete(self, number: int, checksum: int) -> Move | None:
        """Publish a finished move. Returns it, None if it is not known."""
        move = self._land(number)
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
            self._switch(slot, Kind.EXACT)
        elif move.act in (Act.RECALL, Act.RECALL_MIDDLE):
            pages.replica(HBM_FORM[move.act])[slot] = move.destination
            self._switch(slot, HBM_FORM[move.act])
        elif move.act in (Act.RELOCATE, Act.RELOCATE_MIDDLE):
            form = HBM_FORM[move.act]
            self.state.retire_replica(slot, form)
            pages.replica(form)[slot], pages.goal[slot] = move.destination, Goal.NONE
            self._reason.pop(slot, None)
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
        move = self._land(number)
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
                self._lose_host_replica(slot)
            if move.act is Act.DIGEST and pages.goal[slot] == Goal.HOST and pages.host[slot] != NOWHERE:
                if not pages.moving[slot]:
                    self._switch(slot, Kind.NONE)  # without a digest; it is tried again later
            elif pages.goal[slot]:
                self._give_up(slot)
        self._bury(move)
        return move

    def _lose_host_replica(self, slot: int) -> None:
        """A host replica that does not match its checksum is never used: without another one the page is lost."""
        state, pages = self.state, self.state.pages
        state.counters.checksum_failures += 1
        state.retire("host", state.host_class(slot), int(pages.host[slot]), slot)
        pages.host[slot], pages.host_kind[slot] = NOWHERE, Kind.NONE
        if pages.kind[slot] == Kind.NONE:
            if pages.digest[slot] != NOWHERE:
                state.retire("hbm", state.model_of(slot).digest, int(pages.digest[slot]), slot)
                pages.digest[slot] = NOWHERE
            self._note(slot, "checksum")
            state.counters.lost_pages += 1
            state.counters.dropped_pages[state.region_label(slot), "checksum"] += 1
        state.touch(slot)
