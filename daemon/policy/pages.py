"""From scores of tokens to scores of pages (Eq. 5 of MemDecay takes the mean)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierkv.numba_setup import kernel

if TYPE_CHECKING:
    from tierkv.daemon.policy.contract import Aggregate

Floats = NDArray[np.float32]

AGGREGATES: tuple[Aggregate, ...] = ("mean", "max", "top2")


def page_scores(
    scores: Floats, starts: NDArray[np.int64], counts: NDArray[np.int32], aggregate: Aggregate
) -> Floats:
    """`[pages]`, each of the tokens `[starts, starts + counts)` of `scores`; a page without tokens has 0."""
    pages = np.empty(len(starts), np.float32)
    _aggregate(np.ascontiguousarray(scores), starts, counts, AGGREGATES.index(aggregate), pages)
    return pages


@kernel()
def _aggregate(
    scores: Floats, starts: NDArray[np.int64], counts: NDArray[np.int32], aggregate: int, out: Floats
) -> None:
    for page in range(len(starts)):
        total, first, second = np.float32(0.0), np.float32(-np.inf), np.float32(-np.inf)
        for token in range(starts[page], starts[page] + counts[page]):
            score = scores[token]
            total += score
            second = max(second, min(first, score))
            first = max(first, score)
        if counts[page] <= 0:
            out[page] = 0.0
        elif aggregate == 0:
            out[page] = total / counts[page]
        elif aggregate == 1 or counts[page] == 1:
            out[page] = first
        else:
            out[page] = (first + second) / 2
