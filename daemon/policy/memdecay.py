"""MemDecay (arXiv 2607.10582): region-aware exponential decay, refreshed by attention.

Importance, Eq. 2:  a <- rho a + (1 - rho) A               at observation steps only
Clock, Eq. 3:       t_ref = last observation with A >= tau, else insertion;  tau = 2 / |K|
Score, Eq. 4:       s = b_r exp(-lambda_r (t - t_ref)) + alpha a
Page, Eq. 5:        mean over its tokens

`A` is the attention mass of a token averaged over heads and layers, `|K|` the attended tokens, `t` decode steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tierkv.daemon.policy.contract import NotNegative, Share, Thresholds
from tierkv.daemon.policy.decay import RegionDecay
from tierkv.daemon.policy.tokens import Seen, TokenState

THRESHOLDS = Thresholds(quantize_below=0.5, offload_below=0.1, drop_below=0.0, promote_above=0.9)
"""On the score's scale of about 0 to 1.5. `drop_below` 0 means never."""


@dataclass(frozen=True, kw_only=True)
class MemDecay(RegionDecay):
    """The paper's defaults. Columns: importance `a`, clock `t_ref`."""

    name: ClassVar[str] = "memdecay"
    rho: Share = 0.9
    alpha: NotNegative = 0.5
    tau_factor: NotNegative = 2.0
    thresholds: Thresholds = THRESHOLDS

    def insert(self, step: float) -> tuple[float, ...]:
        return 0.0, step

    def observe(self, tokens: TokenState, seen: Seen, step: float) -> None:
        importance, t_ref = tokens.columns
        where = seen.where
        importance[where] = self.rho * importance[where] + (1 - self.rho) * seen.mass  # Eq. 2
        tau = self.tau_factor / seen.attended
        t_ref[where] = np.where(seen.mass >= tau, np.float32(step), t_ref[where])  # Eq. 3

    def terms(self, tokens: TokenState, step: float, span: slice) -> dict[str, float]:
        """`decay_terms` and `importance`, the mean of alpha a."""
        importance, t_ref = tokens.columns[:, span]
        decay = self.decay_terms(tokens.region[span], t_ref, step)
        return {**decay, "importance": self.alpha * float(importance.mean())}
