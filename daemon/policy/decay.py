"""What MemDecay and its variant share: a base value and a half-life by region.

b_r exp(-lambda_r (t - t_ref)),  lambda_r = ln 2 / half-life      (MemDecay, arXiv 2607.10582, Eqs. 4 and 7)
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.policy.contract import HalfLife, NotNegative, Policy
from tierkv.daemon.policy.exponential import Exponential
from tierkv.daemon.policy.tokens import Floats, TokenState
from tierkv.regions import Region

BASE: dict[Region, float] = {
    Region.SYSTEM: 1.0,  # Fig. 2
    Region.PLAN: 0.9,  # Fig. 2
    Region.USER: 0.6,  # Fig. 2
    Region.TOOL_OUT: 0.6,  # "medium" in Table I, like user
    Region.RETRIEVAL: 0.4,  # Fig. 2
    Region.TOOL_IN: 0.3,  # "low" in Table I: below retrieval
    Region.SCRATCHPAD: 0.25,  # "low" in Table I, and the shortest-lived
}
"""b_r. The paper's Table I is qualitative; the three values that Fig. 2 does not give are our choice."""

HALF_LIFE: dict[Region, float] = {
    Region.SYSTEM: 189.0,
    Region.PLAN: 52.0,
    Region.USER: 35.0,
    Region.TOOL_IN: 26.0,
    Region.TOOL_OUT: 39.0,
    Region.RETRIEVAL: 66.0,
    Region.SCRATCHPAD: 16.0,
}
"""Decode steps; Table II, 3B long."""


@dataclass(frozen=True, kw_only=True)
class RegionDecay(Policy, ABC):
    """s = b_r exp(-lambda_r (t - t_ref)) + alpha u, u the first column and t_ref the second.

    `base` and `half_life` (decode steps; infinite does not decay) name every region.
    """

    alpha: NotNegative
    base: Mapping[Region, NotNegative] = field(default_factory=lambda: dict(BASE))
    half_life: Mapping[Region, HalfLife] = field(default_factory=lambda: dict(HALF_LIFE))

    @cached_property
    def bases(self) -> Floats:
        """b_r by region."""
        return np.array([self.base[r] for r in Region], np.float32)

    @cached_property
    def rates(self) -> Floats:
        """lambda_r by region (Eq. 7)."""
        return np.array([math.log(2.0) / self.half_life[r] for r in Region], np.float32)

    @cached_property
    def exponential(self) -> Exponential:
        return Exponential(0, 1, self.bases, self.rates / np.float32(math.log(2.0)), self.alpha)

    def scores(self, tokens: TokenState, step: float, span: slice) -> Floats:
        scores: Floats = self.decayed(tokens.region[span], tokens.columns[1, span], step)
        scores += self.importance(tokens, step, span)
        return scores

    def importance(self, tokens: TokenState, step: float, span: slice) -> Floats:
        """alpha u"""
        importance: Floats = np.float32(self.alpha) * tokens.columns[0, span]
        return importance

    def decayed(self, region: NDArray[np.int8], t_ref: Floats, step: float) -> Floats:
        """The structural term at decode step `step`; a clock that is ahead of it has age 0."""
        age = np.maximum(np.float32(step) - t_ref, np.float32(0.0))
        decayed: Floats = np.exp(-self.rates[region] * age)
        decayed *= self.bases[region]
        return decayed

    def decay_terms(self, region: NDArray[np.int8], t_ref: Floats, step: float) -> dict[str, float]:
        """`base`, `half_life` (decode steps) and `decayed` (the structural term) as means over the tokens; `age`, the
        decode steps since the freshest of their clocks.
        """
        half_life = np.array([self.half_life[r] for r in Region])
        return {
            "base": float(self.bases[region].mean()),
            "age": max(0.0, float(step - t_ref.max())),
            "half_life": float(half_life[region].mean()),
            "decayed": float(self.decayed(region, t_ref, step).mean()),
        }
