"""MemDecay (arXiv 2607.10582): region-aware exponential decay, refreshed by attention.

Importance, Eq. 2:  a <- rho a + (1 - rho) A               at observation steps only
Clock, Eq. 3:       t_ref = last observation with A >= tau, else insertion;  tau = 2 / |K|
Score, Eq. 4:       s = b_r exp(-lambda_r (t - t_ref)) + alpha a
Page, Eq. 5:        mean over its tokens

`A` is the attention mass of a token averaged over heads and layers, `|K|` the attended tokens, `t` decode steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.policy.contract import Thresholds
from tierkv.regions import Region

Floats = NDArray[np.float32]

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
"""Decode steps; Table II, 3B long. lambda_r = ln 2 / half-life (Eq. 7)."""


THRESHOLDS = Thresholds(quantize_below=0.5, offload_below=0.1, drop_below=0.0, promote_above=0.9)
"""On the score's scale of about 0 to 1.5. `drop_below` 0 means never."""


@dataclass(frozen=True)
class MemDecay:
    """The paper's defaults."""

    name: ClassVar[str] = "memdecay"
    rho: float = 0.9
    alpha: float = 0.5
    tau_factor: float = 2.0
    base: Mapping[Region, float] = field(default_factory=lambda: BASE)
    half_life: Mapping[Region, float] = field(default_factory=lambda: HALF_LIFE)
    thresholds: Thresholds = THRESHOLDS

    def new_state(self) -> MemDecayState:
        base = np.array([self.base[r] for r in Region], np.float32)
        rates = np.log(2.0) / np.array([self.half_life[r] for r in Region], np.float64)
        return MemDecayState(self, base, rates.astype(np.float32))


class MemDecayState:
    """Per-token arrays of one session: region, importance `a`, clock `t_ref`."""

    def __init__(self, policy: MemDecay, base: Floats, rates: Floats) -> None:
        self._policy = policy
        self._base = base
        self._rates = rates
        self._length = 0
        self._region = np.zeros(64, np.int8)
        self._importance = np.zeros(64, np.float32)
        self._t_ref = np.zeros(64, np.float32)

    def __len__(self) -> int:
        return self._length

    def append(self, regions: NDArray[np.int8], step: float) -> None:
        start, stop = self._length, self._length + len(regions)
        if stop > len(self._region):
            size = max(stop, 2 * len(self._region))
            self._region = np.resize(self._region, size)
            self._importance = np.resize(self._importance, size)
            self._t_ref = np.resize(self._t_ref, size)
        self._region[start:stop] = regions
        self._importance[start:stop] = 0.0
        self._t_ref[start:stop] = step
        self._length = stop

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)

    def copy(self) -> MemDecayState:
        twin = MemDecayState(self._policy, self._base, self._rates)
        twin._length = self._length
        twin._region = self._region[: self._length].copy()
        twin._importance = self._importance[: self._length].copy()
        twin._t_ref = self._t_ref[: self._length].copy()
        return twin

    def observe(self, mass: NDArray[np.float32], step: float) -> None:
        seen = min(len(mass), self._length)
        attended = np.flatnonzero(~np.isnan(mass[:seen]))
        if not len(attended):
            return
        received = mass[attended]
        rho = self._policy.rho
        self._importance[attended] = rho * self._importance[attended] + (1 - rho) * received  # Eq. 2
        tau = self._policy.tau_factor / np.count_nonzero(~np.isnan(mass))
        self._t_ref[attended[received >= tau]] = step  # Eq. 3

    def token_scores(self, step: float) -> Floats:
        """`[tokens]` scores at decode step `step`."""
        region = self._region[: self._length]
        age = np.float32(step) - self._t_ref[: self._length]
        decayed = self._base[region] * np.exp(-self._rates[region] * age)
        return decayed + np.float32(self._policy.alpha) * self._importance[: self._length]  # Eq. 4

    def page_scores(self, starts: NDArray[np.int64], counts: NDArray[np.int32], step: float) -> Floats:
        if not len(starts):
            return np.zeros(0, np.float32)
        sums = np.add.reduceat(self.token_scores(step), starts)
        return (sums / counts).astype(np.float32)  # Eq. 5
