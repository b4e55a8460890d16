"""SnapKV (arXiv 2404.14469): what a window of recent queries attends to, smoothed over neighbours.

s = 2 for the latest 32 tokens (the window), else the mean of A over the last 32 observations, average-pooled with
    kernel 5 over positions before the window

Pooling divides by the neighbours that there are. The mean is over those of the last observations that attended the
token; one that none of them did has 0. The window of observations is kept whole: 128 bytes a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tierkv.daemon.policy.contract import Policy, Thresholds, Window
from tierkv.daemon.policy.tokens import Floats, Seen, TokenState

WINDOW_SCORE = 2.0
"""Above any mass."""


THRESHOLDS = Thresholds(quantize_below=1e-3, offload_below=1e-4, drop_below=0.0, promote_above=1e-2)
"""Shares of a query's attention: the uniform one among 1,000, 10,000 and 100 tokens. `drop_below` 0 means never."""


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Columns: the masses of the last `window` observations in a ring, NaN where not attended."""

    name: ClassVar[str] = "snapkv"
    window: Window = 32
    kernel: Window = 5
    thresholds: Thresholds = THRESHOLDS

    def insert(self, step: float) -> tuple[float, ...]:
        return (np.nan,) * self.window

    def observe(self, tokens: TokenState, seen: Seen, step: float) -> None:
        latest = tokens.columns[tokens.observations % self.window]
        latest[:] = np.nan
        latest[seen.where] = seen.mass

    def scores(self, tokens: TokenState, step: float, span: slice) -> Floats:
        before = max(0, len(tokens) - self.window)  # pooled: positions before the window
        scores = np.full(span.stop - span.start, WINDOW_SCORE, np.float32)
        stop = min(span.stop, before)
        if span.start >= stop:
            return scores
        left, right = self.kernel // 2, self.kernel - self.kernel // 2
        first, last = max(0, span.start - left), min(before, stop + right)
        means = _mean(tokens.columns[:, first:last]).astype(np.float64)
        sums = np.concatenate([np.zeros(1), np.cumsum(means)])
        position = np.arange(span.start, stop)
        low, high = np.maximum(position - left, 0), np.minimum(position + right, before)
        scores[: stop - span.start] = (sums[high - first] - sums[low - first]) / (high - low)
        return scores


def _mean(masses: Floats) -> Floats:
    """Over the first axis, without NaN; 0 where there is nothing else."""
    seen = ~np.isnan(masses)
    mean: Floats = np.where(seen, masses, np.float32(0.0)).sum(axis=0) / np.maximum(seen.sum(axis=0), 1)
    return mean
