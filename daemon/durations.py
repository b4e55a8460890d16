"""How long tools take: learned from pauses that have ended, as log-normal distributions.

A duration is known by the median of what it will be and by the standard deviation of its logarithm, so that "twice as
long" and "half as long" are equally wrong.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from statistics import NormalDist
from typing import NamedTuple

MOST_TOOLS = 256
"""Names that are remembered; the one not seen for longest is forgotten."""

LEAST_WEIGHT = 0.05
"""Of the newest pause: about the last 40 count."""

CLIP = 3.0
"""An outlier counts as one of so many deviations."""

MEAN_ABSOLUTE = math.sqrt(math.pi / 2)
"""Standard deviation of a normal variable over its mean absolute deviation."""

SHORTEST, LONGEST = 1e-3, 1e6
"""Seconds; durations beyond are taken as these."""

LEAST_SPREAD, MOST_SPREAD = 0.1, 2.0
_NORMAL = NormalDist()


class Duration(NamedTuple):
    """`median` in seconds, `spread` the standard deviation of its logarithm."""

    median: float
    spread: float

    def remaining(self, elapsed: float, share: float = 0.5) -> float:
        """Seconds from `elapsed` on until `share` of the durations that last longer have ended."""
        if elapsed <= 0:
            return self.median * math.exp(self.spread * _NORMAL.inv_cdf(share))
        over = _NORMAL.cdf(math.log(elapsed / self.median) / self.spread)
        rank = over + share * (1 - over)
        if rank >= 1 - 1e-9:  # far in the tail, where it ends about as many deviations later as it has lasted
            return elapsed * share
        return max(0.0, self.median * math.exp(self.spread * _NORMAL.inv_cdf(rank)) - elapsed)


UNKNOWN = Duration(2.0, 1.5)
"""Of a tool that nothing is known of: from .1 to 40 s nineteen times of twenty."""


class Running:
    """Mean and spread of logarithms, in which old ones fade and outliers are clipped."""

    def __init__(self, mean: float, spread: float) -> None:
        self.mean, self.spread, self.count = mean, spread, 0

    def add(self, value: float) -> None:
        self.count += 1
        weight = max(LEAST_WEIGHT, 1 / (self.count + 1))  # what it began with counts as one
        error = value - self.mean
        clipped = max(-CLIP * self.spread, min(CLIP * self.spread, error))
        self.mean += weight * clipped
        spread = self.spread + weight * (MEAN_ABSOLUTE * abs(clipped) - self.spread)
        self.spread = max(LEAST_SPREAD, min(MOST_SPREAD, spread))


class Durations:
    """What pauses of each tool have taken, and by what factor callers' own estimates are wrong."""

    def __init__(self) -> None:
        self._tools: OrderedDict[str, Running] = OrderedDict()
        self._hints = Running(0.0, 0.5)

    def expect(self, tool: str, seconds: float) -> Duration:
        """Of a pause for `tool` that the caller expects to take `seconds` (negative: it does not say)."""
        if seconds >= 0:
            hint = within(seconds)
            return Duration(within(hint * math.exp(self._hints.mean)), self._hints.spread)
        known = self._tools.get(tool)
        return UNKNOWN if known is None else Duration(within(math.exp(known.mean)), known.spread)

    def knows(self, tool: str) -> bool:
        return tool in self._tools

    def saw(self, tool: str, hinted: float, seconds: float) -> None:
        """A pause for `tool` took `seconds`; `hinted` is what the caller expected (negative: nothing)."""
        taken = math.log(within(seconds))
        if hinted >= 0:
            self._hints.add(taken - math.log(within(hinted)))
        if not tool:
            return
        if tool not in self._tools:
            self._tools[tool] = Running(taken, UNKNOWN.spread)
            if len(self._tools) > MOST_TOOLS:
                self._tools.popitem(last=False)
        self._tools.move_to_end(tool)
        self._tools[tool].add(taken)


def within(seconds: float) -> float:
    return max(SHORTEST, min(LONGEST, seconds))
