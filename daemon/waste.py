"""How picky recall is about taking others' places: the more of what it brought back left again without being attended,
the more.

A page is worth a place in HBM by its *lift*: its expected mass against that of as many average tokens. To take
another's place its expected lift must reach a bar, which moves with every page that came back so and was attended, or
left HBM without: it rises fourfold what it sinks, so it comes to rest where a fifth are wasted, below the bound of a
quarter. It begins high, since the first pages count like any other: digests overestimate mass up to threefold, so
three times `recall.USED_LIFT` is what a page must be expected to get to be used for certain.

The bar is only for pages that would take another's place. Free room is filled whatever the bar says, so that it costs
no mass that could be had for nothing; what comes back that way is no bet, and is counted apart (`filled`).
"""

from __future__ import annotations

import math
from collections import deque

MOST_WASTED = 0.25
"""Share of the pages that took others' places that may be wasted."""

AIM = 0.8
"""Of the limit, where the bar comes to rest: it acts only on pages to come."""

REMEMBERED = 64
"""Pages whose outcome is remembered for `share`."""

LOWEST_BAR, HIGHEST_BAR = 6.0, 64.0
"""Lift. It begins at the lowest: three times what counts as used (`recall.USED_LIFT`), since digests overestimate."""

STEP = 1.25
"""A wasted page raises the bar by this factor."""

HALF_LIFE_SECONDS = 10.0
"""A bar above the lowest halves when nothing has happened for so long: what it keeps away cannot show its worth."""


class Waste:
    """`limit`: share that may be wasted; 1: any, and no bar."""

    def __init__(self, limit: float = MOST_WASTED) -> None:
        self._limited = limit < 1
        self.bar = LOWEST_BAR if self._limited else 0.0
        """Least expected lift (0: any) of a page that may take another's place."""
        aim = AIM * limit
        self._sink = math.exp(-math.log(STEP) * aim / (1 - aim))  # balances rises at `aim`
        self._last: deque[bool] = deque(maxlen=REMEMBERED)  # was it wasted?
        self._faded_at = 0.0

    @property
    def share(self) -> float:
        """Wasted among the last pages that took others' places; 0 of none."""
        return sum(self._last) / max(1, len(self._last))

    def count(self, wasted: bool, now: float) -> None:
        """One more page was attended, or left HBM without."""
        self._last.append(wasted)
        self._faded_at = now
        if self._limited:
            self.bar = min(HIGHEST_BAR, max(LOWEST_BAR, self.bar * (STEP if wasted else self._sink)))

    def fade(self, now: float) -> None:
        """Time passed."""
        if self.bar > LOWEST_BAR and now - self._faded_at >= HALF_LIFE_SECONDS:
            self._faded_at = now
            self.bar = max(LOWEST_BAR, self.bar / 2)
