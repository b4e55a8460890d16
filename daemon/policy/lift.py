"""MemDecay with lift: attention measured against the uniform level, so that it can outweigh decay.

MemDecay (arXiv 2607.10582) names the flaw itself: a token's share of attention shrinks with the context, and its
memory forgets in 6.6 observations, so alpha a is one to two orders of magnitude below the structural term of an old
token. Here

Lift:    L = A |K'| / (1 - S)                              1 is the uniform level
Memory:  u_f, u_s = mean of L, decayed by .9 and by .99    at observation steps only
Clock:   t_ref = last observation with L >= 2, else insertion
Score:   s = b_r exp(-lambda_r (t - t_ref)) + alpha u / (1 + u),   u = max(u_f, u_s)

`S` is the mass of the attention sinks (the first 16 tokens) and `|K'|` the attended tokens that are none. Each memory
is divided by 1 - rho^n, with `n` the observations that could see the token, so one seen once has its own mean
(ZipCache, arXiv 2405.14256, divides accumulated attention by opportunities in the same way).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tierkv.daemon.policy.contract import Count, NotNegative, Share, Thresholds
from tierkv.daemon.policy.decay import RegionDecay
from tierkv.daemon.policy.tokens import Floats, Seen, TokenState

LEAST_REST = 1e-6
"""Mass that is not the sinks' is taken to be at least this."""


THRESHOLDS = Thresholds(quantize_below=0.5, offload_below=0.25, drop_below=0.0, promote_above=0.9)
"""On a scale of 0 to b + alpha. A token at the uniform level has alpha / 2 (.25) however old it is, so what is
below `offload_below` is both old and attended less than the average. `drop_below` 0 means never."""


@dataclass(frozen=True, kw_only=True)
class MemDecayLift(RegionDecay):
    """Columns: `u_f`, `u_s` (divided already), observations `n`, clock `t_ref`."""

    name: ClassVar[str] = "memdecay-lift"
    rho_fast: Share = 0.9
    rho_slow: Share = 0.99
    alpha: NotNegative = 0.5
    tau_factor: NotNegative = 2.0
    sink_tokens: Count = 16
    thresholds: Thresholds = THRESHOLDS

    def insert(self, step: float) -> tuple[float, ...]:
        return 0.0, 0.0, 0.0, step

    def observe(self, tokens: TokenState, seen: Seen, step: float) -> None:
        fast, slow, count, t_ref = tokens.columns
        where = seen.where
        sink_mass, sinks = seen.of_sinks(self.sink_tokens)
        others = seen.attended - sinks
        # No token has more than all the mass that is not the sinks', so the lift is at most |K'|.
        lift = np.minimum(seen.mass * np.float32(others / max(1 - sink_mass, LEAST_REST)), np.float32(others))
        n = count[where] + 1
        for u, rho in ((fast, self.rho_fast), (slow, self.rho_slow)):
            # The same as keeping rho v + (1 - rho) L and dividing it by 1 - rho^n.
            u[where] += (1 - rho) / (1 - np.float32(rho) ** n) * (lift - u[where])
        count[where] = n
        t_ref[where] = np.where(lift >= self.tau_factor, np.float32(step), t_ref[where])

    def usage(self, tokens: TokenState, span: slice) -> Floats:
        """alpha u / (1 + u)."""
        u = np.maximum(tokens.columns[0, span], tokens.columns[1, span])
        usage: Floats = np.float32(self.alpha) * (u / (1 + u))
        return usage

    def scores(self, tokens: TokenState, step: float, span: slice) -> Floats:
        decayed = self.decayed(tokens.region[span], tokens.columns[3, span], step)
        return decayed + self.usage(tokens, span)

    def terms(self, tokens: TokenState, step: float, span: slice) -> dict[str, float]:
        """`decay_terms`, the lifts `fast` and `slow`, and `importance`, the mean of alpha u / (1 + u)."""
        fast, slow, _, t_ref = tokens.columns[:, span]
        return {
            **self.decay_terms(tokens.region[span], t_ref, step),
            "fast": float(fast.mean()),
            "slow": float(slow.mean()),
            "importance": float(self.usage(tokens, span).mean()),
        }
