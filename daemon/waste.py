"""How many bets recall may make: pages that take others' places before anyone has attended them.

A bet is *used* when a token of the page is attended well, *wasted* when the page leaves HBM before; until then it is
*open*. A bet may be made only while, if it and every open one were wasted, no more than

    ALLOWANCE + limit * (all bets so far)

would be. So at most the limit's share is wasted, but for the first few bets, which nothing is known of: whatever the
reader wants, and whatever estimates say.

So that bets are not spent on what is hardly worth one, a page's expected *lift*, its mass against that of as many
average tokens, must reach a bar. It rises with a wasted bet fourfold what it sinks with a used one, and so rests where
a fifth are wasted. What is bet on first is what is expected to get most (`wants.ranked`).

A reader who wastes everything gets no more bets, and could never show that it has changed. So when no bet could be made
for a while, one that was wasted is forgiven.

Free room is filled all the same: it costs no mass that could be had, and what comes back that way is no bet (`filled`).
"""

from __future__ import annotations

import math

MOST_WASTED = 0.25
"""Share of the pages that took others' places that may be wasted."""

ALLOWANCE = 4
"""Bets that may be wasted beyond that share."""

AIM = 0.8
"""Of the limit, where the bar comes to rest."""

LOWEST_BAR, HIGHEST_BAR = 3.0, 64.0
"""Lift. Digests overestimate mass up to threefold: below the lowest a page may be none better than the average."""

STEP = 1.25
"""A wasted page raises the bar by this factor."""

FORGIVING_SECONDS = 60.0
"""Without a bet allowed, until a wasted one is forgiven."""


class Waste:
    """`limit`: share that may be wasted; 1: any."""

    def __init__(self, limit: float = MOST_WASTED) -> None:
        self._limit = limit
        self._used = self._wasted = self._forgiven = 0
        self.bar = LOWEST_BAR if limit < 1 else 0.0
        """Least expected lift of a bet."""
        aim = AIM * limit
        self._sink = math.exp(-math.log(STEP) * aim / (1 - aim))  # balances rises at `aim`
        self._spent_since = math.inf  # when bets ran out

    @property
    def share(self) -> float:
        """Wasted of all bets that are no longer open; 0 of none."""
        return self._wasted / max(1, self._used + self._wasted)

    def allowed(self, open_bets: int) -> int:
        """How many more may be made."""
        if self._limit >= 1:
            return 1 << 30
        at_worst = self._wasted - self._forgiven + open_bets
        room = ALLOWANCE + self._limit * (self._used + self._wasted + open_bets) - at_worst
        return max(0, math.floor(room / (1 - self._limit)))

    def count(self, wasted: bool) -> None:
        """A bet was used, or its page left HBM without."""
        self._wasted += wasted
        self._used += not wasted
        if self._limit < 1:
            self.bar = min(HIGHEST_BAR, max(LOWEST_BAR, self.bar * (STEP if wasted else self._sink)))

    def forgive(self, open_bets: int, now: float) -> None:
        """Time passed."""
        if self.allowed(open_bets) or open_bets:
            self._spent_since = math.inf
        elif self._spent_since == math.inf:
            self._spent_since = now
        elif now - self._spent_since >= FORGIVING_SECONDS:
            self._spent_since = now
            self._forgiven += 1
