"""MemDecay with lift: long-range attention, measured against the uniform level, so that it can outweigh decay.

MemDecay (arXiv 2607.10582) names the flaw itself: a token's share of attention shrinks with the context, and its
memory forgets in 6.6 observations, so alpha a is one to two orders of magnitude below the structural term of an old
token. Here

Lift:    L = A |F| / S_F            1 is the uniform level of F
Usage:   u <- rho u + (1 - rho) L / (1 + L)       at observation steps only
Clock:   t_ref = last observation with L >= 4, else insertion
Score:   s = b_r exp(-lambda_r (t - t_ref)) + alpha u
Page:    mean s - alpha min u, its relief

F is what is far: the attended tokens without the attention sinks (the first 4), whose mass says nothing about their
content, and without the newest 64, which stay exact whatever their score, and whose mass says only that they are near.
S_F is the mass of F. A lift saturates before it is averaged, so that one large lift counts no more than two moderate
ones.

A page counts by how far its tokens are looked at beyond the one that is looked at least. What shifts all of them alike,
age, distance or a lull, takes nothing away from that; and where a statement is read while its value is passed over (a
number, an identifier), the value is what a question is still to come for. Decision 7 has the figures.

The constants were chosen on the study's sixteen development scenarios (`tierkv study ablate --split dev`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tierkv.daemon.policy.contract import Aggregate, Count, NotNegative, Share, Thresholds
from tierkv.daemon.policy.decay import RegionDecay
from tierkv.daemon.policy.tokens import Seen, TokenState

LEAST_MASS = 1e-6
"""The mass of what is far is taken to be at least this."""

THRESHOLDS = Thresholds(quantize_below=2.5, offload_below=1.5, drop_below=0.0, promote_above=3.5)
"""Of the far pages of the study's long contexts, observed as the daemon does, half are below the first, a tenth below
the second and nine in ten below the last. No score is below 0: nothing is dropped."""


@dataclass(frozen=True, kw_only=True)
class MemDecayLift(RegionDecay):
    """Columns: usage `u`, clock `t_ref`."""

    name: ClassVar[str] = "memdecay-lift"
    aggregate: Aggregate = "relief"
    rho: Share = 0.98
    alpha: NotNegative = 24.0
    tau_factor: NotNegative = 4.0
    sink_tokens: Count = 4
    near_tokens: Count = 64
    thresholds: Thresholds = THRESHOLDS

    def insert(self, step: float) -> tuple[float, ...]:
        return 0.0, step

    def observe(self, tokens: TokenState, seen: Seen, step: float) -> None:
        usage, t_ref = tokens.columns
        far = slice(self.sink_tokens, max(self.sink_tokens, len(seen.observed) - self.near_tokens))
        mass = seen.observed[far]
        attended = np.isfinite(mass)
        count = int(np.count_nonzero(attended))
        if not count:
            return
        total = max(float(mass.sum(where=attended)), LEAST_MASS)
        # No token has more than all of the mass that is far, so a lift is at most |F|.
        lift = np.minimum(mass * np.float32(count / total), np.float32(count))
        rho = np.float32(self.rho)
        known, clock = usage[far], t_ref[far]
        known[attended] = rho * known[attended] + (1 - rho) * (lift / (1 + lift))[attended]
        clock[attended & (lift >= self.tau_factor)] = step

    def terms(self, tokens: TokenState, step: float, span: slice) -> dict[str, float]:
        """`decay_terms`, the mean `usage`, its `importance` (alpha u), and `relief`, what is left of that."""
        usage, t_ref = tokens.columns[:, span]
        mean = float(usage.mean())
        return {
            **self.decay_terms(tokens.region[span], t_ref, step),
            "usage": mean,
            "importance": self.alpha * mean,
            "relief": self.alpha * (mean - float(usage.min())),
        }
