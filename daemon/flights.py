"""Moves in flight: which run on a page, and whether one more may start."""

from __future__ import annotations

from collections import Counter

from tierkv.daemon.acts import RETURNS, Act, Move
from tierkv.daemon.allocator import SizeClass
from tierkv.daemon.events import RequestToken
from tierkv.daemon.state import Pool, State


class Flights:
    def __init__(self, state: State) -> None:
        self._state = state
        self.flying: dict[int, Move] = {}
        self._acts: dict[int, Counter[Act]] = {}  # slot -> what runs on it
        self._next = 1
        self._returning: dict[int, int] = {}  # move -> bytes that it reads to bring its page back
        self.returning = 0
        """Bytes of promotions in flight."""
        self._bandwidth_debt = 0.0
        self._debt_at = 0.0

    def full(self) -> bool:
        """No further move may start now: too many in flight, or the bandwidth budget is used up."""
        config = self._state.config
        if config.move_bandwidth:
            elapsed, self._debt_at = self._state.now - self._debt_at, self._state.now
            self._bandwidth_debt = max(0.0, self._bandwidth_debt - elapsed * config.move_bandwidth)
            if self._bandwidth_debt > 0:
                return True
        return len(self.flying) >= config.max_moves_in_flight

    def running(self, slot: int, act: Act) -> bool:
        """A move that does this runs on the page."""
        return slot in self._acts and self._acts[slot][act] > 0

    def take_off(
        self, slot: int, act: Act, pool: Pool, size_class: SizeClass, destination: int,
        others: tuple[int, ...] = (), request: RequestToken = 0,
    ) -> Move:  # fmt: skip
        """A move begins: the pages that it reads are pinned until it lands."""
        move = Move(self._next, act, slot, pool, size_class, destination, others, request)
        self._next += 1
        self.flying[move.number] = move
        for read in (slot, *others):
            self._state.pages.moving[read] += 1
        self._acts.setdefault(slot, Counter())[act] += 1
        if pool == "hbm" and act not in (Act.FORK, Act.FIT):
            self._state.pages.coming[slot] += size_class.item
        if act is Act.DIGEST:
            self._state.pages.summarizing[slot] = True
        return move

    def charge(self, move: Move, size: int) -> None:
        """Count the `size` bytes that the move reads against the bandwidth budget, and those in flight."""
        self._bandwidth_debt += size
        if move.act in RETURNS:
            self._returning[move.number] = size
            self.returning += size

    def land(self, number: int) -> Move | None:
        """A move has ended, well or not. Returns it, None if it is not known."""
        move = self.flying.pop(number, None)
        if move is None:
            return None  # a move of an earlier life, or told twice
        self.returning -= self._returning.pop(number, 0)
        acts = self._acts[move.slot]
        acts[move.act] -= 1  # an open page may be copied for several forks at once
        if not acts.total():
            del self._acts[move.slot]
        for slot in (move.slot, *move.others):
            self._state.pages.moving[slot] -= 1
        if move.pool == "hbm" and move.act not in (Act.FORK, Act.FIT):
            self._state.pages.coming[move.slot] -= move.size_class.item
        if move.act is Act.DIGEST:
            self._state.pages.summarizing[move.slot] = False
        return move
