"""A page changes its tier: the table first, then the memory of the replicas that it leaves retires."""

from __future__ import annotations

from tierkv.daemon.ledger import PING_PONG_STEPS
from tierkv.daemon.pages import NEVER, REASONS, TIER, Goal, Outcome, Reason
from tierkv.daemon.state import State
from tierkv.table import NOWHERE, Kind

RUNG = ("hbm", "middle", "quantized", "host")
"""Tiers, best first."""


class Tiers:
    def __init__(self, state: State) -> None:
        self._state = state
        self.why: dict[int, Reason] = {}
        """Why a page has a goal, by slot."""

    def switch(self, slot: int, kind: Kind) -> None:
        """Attention reads another replica from the next version on; the ones above it retire."""
        state, pages, model = self._state, self._state.pages, self._state.model_of(slot)
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
            self._left(slot)
            state.counters.without_digest += int(
                state.config.digest_share > 0 and pages.digest[slot] == NOWHERE
            )
        pages.goal[slot] = Goal.NONE
        reason = self.why.pop(slot, "pressure")
        self._note(slot, reason)
        if after != before:
            self._count_to_and_fro(slot, up=RUNG.index(after) < RUNG.index(before))
        if before == "host" and reason in ("recall", "room"):
            placed = pages.recalled[slot] == Outcome.COMING
            pages.recalled[slot] = Outcome.PENDING if placed else Outcome.NONE
            if not placed:
                state.count_outcome("filled", state.owner_of(slot))
        state.counters.moved_pages[before, after, reason] += 1
        state.counters.recalled_pages += before == "host"
        state.touch(slot)

    def _left(self, slot: int) -> None:
        """The page is cold again: if nobody attended it much since it came back, that was for nothing."""
        state = self._state
        if state.pages.recalled[slot] == Outcome.PENDING:
            state.count_outcome("wasted", state.owner_of(slot))
            state.waste.count(wasted=True)
        state.pages.recalled[slot] = Outcome.NONE

    def _count_to_and_fro(self, slot: int, up: bool) -> None:
        pages, session = self._state.pages, self._state.owner_of(slot)
        step = session.step if session is not None else 0.0
        if not up and step - pages.promoted_step[slot] <= PING_PONG_STEPS:
            self._state.counters.ping_pongs += 1
            if session is not None:
                session.ledger.ping_pongs += 1
        pages.promoted_step[slot] = step if up else NEVER

    def drop(self, slot: int, reason: Reason) -> None:
        """The page goes for good: no replica is left. Its tokens stay in the table, unattended."""
        state, pages, model = self._state, self._state.pages, self._state.model_of(slot)
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
        pages = self._state.pages
        session = self._state.owner_of(slot)
        pages.moved_step[slot] = session.step if session else 0.0
        pages.moved_why[slot] = REASONS.index(reason)

    def lose_host_replica(self, slot: int) -> None:
        """A host replica that does not match its checksum is never used: without another one the page is lost."""
        state, pages = self._state, self._state.pages
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
