"""How picky background recall is: the more of what it brought back left again without being attended, the more.

A page is worth a place in HBM by its *lift*: its expected mass against that of as many average tokens. While more
than `RISE_ABOVE` of the last pages were wasted, a bar rises that a page's expected lift must reach; when few are, or
nothing happens for long, it sinks. It stops at `HIGHEST_BAR`: a page that is expected to get much is always worth one.

The bar is only for pages that would take another's place. Free room is filled whatever the bar says, so that it costs
no mass that could be had for nothing; what comes back that way is no bet, and counts as none.
"""

from __future__ import annotations

from collections import deque

MOST_WASTED = 0.25
"""Share of the last pages brought back that may be wasted."""

RISE_ABOVE = 0.8 * MOST_WASTED
"""Share above which the bar rises: below the bound, since it acts only on pages to come."""

REMEMBERED = 64
"""Pages whose outcome is remembered."""

LEAST_KNOWN = 16
"""Outcomes without which nothing is concluded."""

LOWEST_BAR, HIGHEST_BAR = 0.5, 8.0
"""Lift. Digests overestimate mass up to threefold; 2 is what counts as used (`recall.USED_LIFT`)."""

STEP = 1.25
"""The bar rises and sinks by this factor, once an outcome."""

HALF_LIFE_SECONDS = 10.0
"""The bar halves when nothing has happened for so long: else what it keeps away could never show its worth."""


class Waste:
    def __init__(self, limit: float = MOST_WASTED) -> None:
        self._limit = limit
        self.bar = 0.0
        """Least expected lift (0: any) of a page that may take another's place."""
        self._last: deque[bool] = deque(maxlen=REMEMBERED)  # was it wasted?
        self._faded_at = 0.0

    @property
    def share(self) -> float:
        """Wasted among the last pages that came back in the background; 0 of none."""
        return sum(self._last) / max(1, len(self._last))

    def count(self, wasted: bool, now: float) -> None:
        """One more page was attended, or left HBM without."""
        self._last.append(wasted)
        self._faded_at = now
        if len(self._last) < LEAST_KNOWN or self._limit >= 1:
            return
        if self.share > RISE_ABOVE:
            self.bar = min(HIGHEST_BAR, max(LOWEST_BAR, self.bar * STEP))
        elif self.share < RISE_ABOVE / 2:
            self._lower(STEP)

    def fade(self, now: float) -> None:
        """Time passed."""
        if self.bar and now - self._faded_at >= HALF_LIFE_SECONDS:
            self._faded_at = now
            self._lower(2.0)

    def _lower(self, by: float) -> None:
        self.bar = self.bar / by if self.bar / by >= LOWEST_BAR else 0.0
