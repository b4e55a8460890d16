"""Which tokens of a context stay, when a policy's scores must fit a budget: the paper's Algorithm 1, and its pages.

Pages are `straddling` (16 tokens each from the first on, whatever their regions, as in the paper) or `aligned` (a page
holds tokens of one region, as tierkv's are), or there are none and single `tokens` go.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.policy import TokenState
from tierkv.geometry import PAGE_TOKENS
from tierkv.study.memdecay.traces import Trace

Unit = Literal["tokens", "straddling", "aligned"]


class Pages(NamedTuple):
    starts: NDArray[np.int64]
    counts: NDArray[np.int32]


def pages_of(trace: Trace, unit: Unit, size: int = PAGE_TOKENS) -> Pages:
    """Pages of `size` tokens at most, in token order; of one token each for `tokens`."""
    total = len(trace)
    if unit == "tokens":
        starts = np.arange(total, dtype=np.int64)
    elif unit == "straddling":
        starts = np.arange(0, total, size, dtype=np.int64)
    else:
        borders = [*_region_starts(trace), total]
        starts = np.concatenate([np.arange(a, b, size, dtype=np.int64) for a, b in pairwise(borders)])
    return Pages(starts, np.diff(np.append(starts, total)).astype(np.int32))


def _region_starts(trace: Trace) -> list[int]:
    return [0, *(np.flatnonzero(np.diff(trace.regions)) + 1).tolist()]


def straddling_share(trace: Trace, size: int = PAGE_TOKENS) -> float:
    """The share of `straddling` pages that hold tokens of more than one region."""
    starts, counts = pages_of(trace, "straddling", size)
    borders = np.array(_region_starts(trace)[1:])
    inside = np.searchsorted(borders, starts + counts) - np.searchsorted(borders, starts, side="right")
    return float((inside > 0).mean())


def evict(
    pages: Pages, scores: NDArray[np.float32], pinned: NDArray[np.bool_], budget: int
) -> NDArray[np.bool_]:
    """Which tokens stay, `[tokens]`: lowest-scored pages leave until at most `budget` tokens are left (Algorithm 1).

    A pinned page leaves only when no other is left, the last one first: a budget is never exceeded. Of equal scores the
    later page leaves first.
    """
    kept = np.ones(int(pages.counts.sum()), bool)
    order = np.lexsort((-pages.starts, scores, pinned))
    excess = len(kept) - budget
    for page in order.tolist():
        if excess <= 0:
            break
        start, count = int(pages.starts[page]), int(pages.counts[page])
        kept[start : start + count] = False
        excess -= count
    return kept


def budget_tokens(trace: Trace, share: float) -> int:
    """floor(share n)"""
    return math.floor(share * len(trace))


def choose(
    state: TokenState, step: float, trace: Trace, unit: Unit, budget: int, pinned: NDArray[np.bool_],
    size: int = PAGE_TOKENS,
) -> NDArray[np.bool_]:  # fmt: skip
    """Which tokens stay by a policy's scores at decode step `step`. A page with a pinned token is pinned."""
    pages = pages_of(trace, unit, size)
    scores = state.page_scores(pages.starts, pages.counts, step)
    return evict(pages, scores, np.logical_or.reduceat(pinned, pages.starts), budget)
