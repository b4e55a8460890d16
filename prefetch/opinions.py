"""Whose opinion counts: a weight for each layer and KV head, by which heads' estimated shares of a page add up to what
the page gets of all attention.

Heads differ in how well a few bytes tell what their queries want. The weights are those, not negative, by which
weighted estimates come closest to the true shares, mean over heads and layers, in squares over pages and queries: found
by multiplicative updates (Lee and Seung 2000, "Algorithms for non-negative matrix factorization"). They are learned
where the model is calibrated, and lie in the state of digests.
"""

from __future__ import annotations

import numpy as np

from tierkv.prefetch.estimators import Doubles, Floats

ROUNDS = 2000
"""Of updates."""


class Opinions:
    """What texts show of `heads` heads, of whichever layers."""

    def __init__(self, heads: int) -> None:
        self._gram = np.zeros((heads, heads))
        self._wanted = np.zeros(heads)

    def add(self, estimated: Floats, true: Floats) -> None:
        """One text.

        Args:
            estimated: `[heads, n]`, shares of n pairs of a query and a page.
            true: `[n]`, mean over heads and layers.
        """
        wide = estimated.astype(np.float64)
        self._gram += wide @ wide.T
        self._wanted += wide @ true.astype(np.float64)

    def weights(self) -> Doubles:
        """`[heads]`; the weighted sum of shares estimates their mean. All the same where nothing was seen."""
        size = len(self._wanted)
        weights = np.full(size, 1 / size)
        if not self._wanted.any():
            return weights
        for _ in range(ROUNDS):
            weights *= self._wanted / np.maximum(self._gram @ weights, np.finfo(np.float64).tiny)
        return weights


def of_mean_one(weights: Doubles | Floats) -> Floats:
    """Factors of a mean over heads; 1 where no head counts."""
    mean = weights.mean(dtype=np.float64)
    scaled = weights / mean if mean > 0 else np.ones_like(weights)
    return np.asarray(scaled, np.float32)


__all__ = ["Opinions", "of_mean_one"]
