"""From scores of tokens to scores of pages (Eq. 5 of MemDecay takes the mean)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierkv.geometry import PAGE_TOKENS
from tierkv.numba_setup import kernel

if TYPE_CHECKING:
    from tierkv.daemon.policy.contract import Aggregate

Floats = NDArray[np.float32]
Longs = NDArray[np.int64]

MEAN, MAX, TOP2, LEAST = range(4)
MODES: dict[Aggregate, int] = {"mean": MEAN, "max": MAX, "top2": TOP2, "relief": MEAN}
"""What is made of the scores; of relief it is the mean, from which the least importance is still to be taken off."""


def page_scores(scores: Floats, starts: Longs, counts: NDArray[np.int32], aggregate: Aggregate) -> Floats:
    """`[pages]`, each of the tokens `[starts, starts + counts)` of `scores`; a page without tokens has 0."""
    return _pages(scores, starts, counts, MODES[aggregate])


def least(importance: Floats, starts: Longs, counts: NDArray[np.int32]) -> Floats:
    """`[pages]`: the smallest of the tokens of each."""
    return _pages(importance, starts, counts, LEAST)


def _pages(scores: Floats, starts: Longs, counts: NDArray[np.int32], mode: int) -> Floats:
    pages = np.empty(len(starts), np.float32)
    _score_pages(np.ascontiguousarray(scores), starts, counts, mode, pages)
    return pages


@kernel()
def _score_pages(scores: Floats, starts: Longs, counts: NDArray[np.int32], mode: int, out: Floats) -> None:
    for page in range(len(starts)):
        start = starts[page]
        out[page] = score_of(scores[start : start + counts[page]], mode)


@kernel(fastmath=True)
def score_table(scores: Floats, starts: Longs, mode: int, out: Floats) -> None:
    """Pages that hold all tokens of `scores`, each from its start up to the next one's."""
    pages = len(starts)
    for page in range(pages):
        stop = starts[page + 1] if page + 1 < pages else len(scores)
        out[page] = score_of(scores[starts[page] : stop], mode)


@kernel(fastmath=True)
def relieve_table(importance: Floats, weight: np.float32, starts: Longs, out: Floats) -> None:
    """Take `weight` times the smallest `importance` of each page off its score."""
    pages = len(starts)
    for page in range(pages):
        stop = starts[page + 1] if page + 1 < pages else len(importance)
        out[page] -= weight * score_of(importance[starts[page] : stop], LEAST)


@kernel(fastmath=True, inline=True)
def score_of(page: Floats, mode: int) -> np.float32:
    """One page's score from its tokens'. Loops over the usual length are unrolled: a sum then takes a quarter."""
    if len(page) == 0:
        return np.float32(0.0)
    if mode == MEAN:
        total = np.float32(0.0)
        if len(page) == PAGE_TOKENS:
            for token in range(PAGE_TOKENS):
                total += page[token]
        else:
            for token in range(len(page)):
                total += page[token]
        mean: np.float32 = total / np.float32(len(page))
        return mean
    first: np.float32 = page[0]
    if mode == MAX:
        for token in range(1, len(page)):
            first = max(first, page[token])
        return first
    if mode == LEAST:
        if len(page) == PAGE_TOKENS:
            for token in range(PAGE_TOKENS):
                first = min(first, page[token])
        else:
            for token in range(len(page)):
                first = min(first, page[token])
        return first
    second = np.float32(-np.inf)
    for token in range(1, len(page)):
        score = page[token]
        second = max(second, min(first, score))
        first = max(first, score)
    top: np.float32 = first if len(page) == 1 else (first + second) / np.float32(2.0)
    return top
