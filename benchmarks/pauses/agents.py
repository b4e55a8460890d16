"""What agents do and attend to: the same for every arm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Shares = NDArray[np.float32]

WORKING_MASS = 0.9
"""Share of attention that a working set holds."""

ZIPF = 1.3
"""Exponent of attention over pages by rank: nine tenths of it then lie on a half of the pages or less. Of recorded
contexts of a few thousand tokens it is 30% (tau-airline) to 60% (`tierkv bench recall`: what the best pages hold)."""

NOISE = 0.1
"""Standard deviation of a page's log-share from one observation to the next."""

DRIFT = 0.05
"""Pages whose rank is drawn anew when a session resumes."""

RUN_MEDIAN, RUN_SPREAD = 6.0, 0.5
"""Seconds of decoding between pauses, log-normal."""

HINT_SPREAD = 0.5
"""Standard deviation of the logarithm of a wrong hint's factor."""


class Tool(NamedTuple):
    """`median` in seconds, `spread` of the logarithm; `share` of all calls."""

    name: str
    median: float
    spread: float
    share: float


TOOLS = (
    Tool("search", 4.0, 0.6, 0.35),
    Tool("test", 15.0, 0.6, 0.35),
    Tool("build", 45.0, 0.6, 0.2),
    Tool("review", 120.0, 0.6, 0.1),
)
"""On average 33 s."""


class Turn(NamedTuple):
    """`run` and `pause` in seconds; `hint` is what a caller who errs expects of the pause."""

    run: float
    tool: str
    pause: float
    hint: float


def turns(seed: int, session: int) -> Iterator[Turn]:
    """Without end."""
    rng = np.random.default_rng((seed, session))
    shares = [tool.share for tool in TOOLS]
    while True:
        tool = TOOLS[int(rng.choice(len(TOOLS), p=shares))]
        run, pause, error = np.exp(rng.normal(size=3) * (RUN_SPREAD, tool.spread, HINT_SPREAD)).tolist()
        yield Turn(RUN_MEDIAN * run, tool.name, tool.median * pause, tool.median * pause * error)


@dataclass
class Reader:
    """Attention of one session over its pages, in the order of the table."""

    rng: np.random.Generator
    span: int
    """Ranks are drawn up to it."""

    def __post_init__(self) -> None:
        self._weights = np.zeros(0)

    def grow(self, pages: int) -> None:
        """To as many pages."""
        fresh = pages - len(self._weights)
        if fresh > 0:
            self._weights = np.concatenate([self._weights, self._draw(fresh)])

    def cut(self, pages: int) -> None:
        self._weights = self._weights[:pages]

    def drift(self) -> None:
        """The session resumes: some pages matter more or less than before."""
        moved = self.rng.random(len(self._weights)) < DRIFT
        self._weights[moved] = self._draw(int(moved.sum()))

    def shares(self) -> Shares:
        """`[pages]` of one observation."""
        weights = self._weights * np.exp(self.rng.normal(size=len(self._weights)) * NOISE)
        return np.asarray(weights / weights.sum(), np.float32)

    def _draw(self, pages: int) -> NDArray[np.float64]:
        ranks = self.rng.uniform(0.5, self.span + 0.5, pages)
        return np.asarray(ranks**-ZIPF)


def working_set(shares: Shares) -> NDArray[np.intp]:
    """Places of the fewest pages that hold `WORKING_MASS`, those with most first."""
    order = np.argsort(-shares, kind="stable")
    held = np.cumsum(shares[order], dtype=np.float64)
    return order[: int(np.searchsorted(held, WORKING_MASS * held[-1] - 1e-9)) + 1]
