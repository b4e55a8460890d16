"""Attention-aware eviction by an exponential moving average and the time since the last access.

Average:   e <- a A + (1 - a) e                  at observation steps only; half-life 3.1 observations at a = .2
Priority:  p = (1 - e)(1 - exp(-beta n))         eviction priority; n = decode steps since the last access
Score:     s = 1 - p

An access is an observation with A >= 2/|K|, or the insertion; a new token has e = 0. Observations of .45, .12, .30, .08
and .35 then give e = .170352. `beta` .001 is where the method starts from: it is meant to be swept with `a`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np

from tierkv.daemon.policy.contract import NotNegative, Policy, Share, Thresholds
from tierkv.daemon.policy.exponential import Exponential
from tierkv.daemon.policy.tokens import Floats, Seen, TokenState
from tierkv.regions import Region

HIGH = 0.5
"""An average from here on is high. The matrix has .72 and .85 as high, .05 and .03 as low; our cut between them."""

OLD_STEPS = 1000.0
"""A last access from here on is old: 1/beta, where recency has lost 63%. The matrix has 20 and 10 as recent."""


def verdict(ema: float, steps: float) -> Literal["keep", "watch", "evict"]:
    """The cell of the matrix: high and recent is kept, low and old evicted; high and old or low and recent watched."""
    high, recent = ema >= HIGH, steps < OLD_STEPS
    if high and recent:
        return "keep"
    return "watch" if high or recent else "evict"


WORDS = {
    (True, True): "much attention, and lately",
    (True, False): "much attention, but not lately",
    (False, True): "little attention, but lately",
    (False, False): "little attention, and not lately",
}
"""Of a high average, of a recent access."""

THRESHOLDS = Thresholds(quantize_below=0.9, offload_below=0.5, drop_below=0.0, promote_above=0.95)
"""On a scale of 0 to 1. Without attention (e = 0) the score is exp(-beta n): .9 after 105 steps, .5 after 693.
`drop_below` 0 means never."""


@dataclass(frozen=True, kw_only=True)
class Ema(Policy):
    """Columns: average `e`, step of the last access."""

    name: ClassVar[str] = "ema"
    a: Share = 0.2
    beta: NotNegative = 0.001
    tau_factor: NotNegative = 2.0
    thresholds: Thresholds = THRESHOLDS

    def insert(self, step: float) -> tuple[float, ...]:
        return 0.0, step

    def observe(self, tokens: TokenState, seen: Seen, step: float) -> None:
        ema, accessed = tokens.columns
        where = seen.where
        ema[where] = self.a * seen.mass + (1 - self.a) * ema[where]
        access = seen.mass >= self.tau_factor / seen.attended
        accessed[where] = np.where(access, np.float32(step), accessed[where])

    def scores(self, tokens: TokenState, step: float, span: slice) -> Floats:
        ema, accessed = tokens.columns[:, span]
        since = np.maximum(np.float32(step) - accessed, np.float32(0.0))
        scores: Floats = 1 + (1 - ema) * np.expm1(np.float32(-self.beta) * since)
        return scores

    @cached_property
    def exponential(self) -> Exponential:
        one = np.ones(len(Region), np.float32)
        return Exponential(0, 1, one, one * np.float32(self.beta / math.log(2.0)), 1.0, 1.0)

    def terms(self, tokens: TokenState, step: float, span: slice) -> dict[str, float]:
        """`ema` (mean), `steps` since the freshest access, `recency` = exp(-beta steps), and the `priority` of a token
        with these.
        """
        ema, accessed = tokens.columns[:, span]
        average, steps = float(ema.mean()), max(0.0, float(step - accessed.max()))
        recency = float(np.exp(-self.beta * steps))
        return {
            "ema": average,
            "steps": steps,
            "recency": recency,
            "priority": (1 - average) * (1 - recency),
        }

    def verdict(self, terms: dict[str, float]) -> str:
        ema, steps = terms["ema"], terms["steps"]
        return f"{verdict(ema, steps)}: {WORDS[ema >= HIGH, steps < OLD_STEPS]}"
