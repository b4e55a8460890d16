"""Chance, with the sinks and the recent window that every serious policy has: what a policy must beat.

s = 3 for the first 4 tokens, 2 for the latest 16, else uniform in [0, 1) by a hash of (seed, token index)

The hash (splitmix64's finalizer) makes a token keep its number when others are appended, and in copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.policy.contract import Count, Policy, Thresholds
from tierkv.daemon.policy.tokens import Floats, TokenState

SINK_SCORE, RECENT_SCORE = 3.0, 2.0

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MANTISSA = 24
"""Bits of a float32's: a number of so many bits over 2^24 is exact and below 1."""


THRESHOLDS = Thresholds(quantize_below=0.5, offload_below=0.25, drop_below=0.0, promote_above=0.9)
"""A page's mean of 16 uniform numbers is .5 give or take .07: about half of the old pages may be low-bit at any
time, and hardly any leaves but under pressure. `drop_below` 0 means never."""


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Needs no memory."""

    name: ClassVar[str] = "random"
    seed: Count = 0
    sink_tokens: Count = 4
    recent_tokens: Count = 16
    thresholds: Thresholds = THRESHOLDS

    def scores(self, tokens: TokenState, step: float, span: slice) -> Floats:
        position = np.arange(span.start, span.stop)
        scores = uniform(self.seed, position)
        scores[position >= len(tokens) - self.recent_tokens] = RECENT_SCORE
        scores[position < self.sink_tokens] = SINK_SCORE
        return scores


def uniform(seed: int, index: NDArray[np.int64]) -> Floats:
    """float32 in [0, 1), one for each (seed, index)."""
    stream = np.uint64((seed * GOLDEN + MIX_1) % 2**64)
    bits = _mix(_mix(index.astype(np.uint64) * np.uint64(GOLDEN)) ^ _mix(np.full(1, stream)))
    return (bits >> np.uint64(64 - MANTISSA)).astype(np.float32) * np.float32(2.0**-MANTISSA)


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(MIX_1)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(MIX_2)
    return bits ^ (bits >> np.uint64(31))
