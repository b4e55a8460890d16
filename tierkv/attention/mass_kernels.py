"""Attention probabilities of tokens and pages, after `decode` has left its logits and log-sum-exps behind."""

from __future__ import annotations

import numpy as np
from numba import prange
from numpy.typing import NDArray

from tierkv.attention.online_softmax import ONE, ZERO, Floats, exp_in_place, exp_negative, shift
from tierkv.numba_setup import kernel


@kernel(fastmath=True)
def probabilities_of_page(logits: Floats, count: int, log_sum_exp: Floats) -> None:
    """Logits `[q_heads, page_tokens]` of a page; row 0 becomes its tokens' probabilities averaged over the heads."""
    q_heads, page_tokens = logits.shape
    for head in range(q_heads):
        shift(logits[head], count, log_sum_exp[head])
    exp_in_place(logits.reshape(q_heads * page_tokens))
    mean = logits[0]
    for head in range(1, q_heads):
        other = logits[head]
        for t in range(page_tokens):
            mean[t] += other[t]
    share = ONE / np.float32(q_heads)
    for t in range(page_tokens):
        mean[t] *= share


@kernel()
def probabilities_of_lane(
    lane: np.int64, piece: int, logits: Floats, counts: NDArray[np.int32], row_starts: NDArray[np.int64],
    log_sum_exp: Floats,
) -> None:  # fmt: skip
    """`probabilities_of_page` for the pages `[lane * piece, (lane + 1) * piece)`."""
    row = 0
    for page in range(lane * piece, min(counts.shape[0], (lane + 1) * piece)):
        while row_starts[row + 1] <= page:
            row += 1
        probabilities_of_page(logits[page], counts[page], log_sum_exp[row])


@kernel(parallel=True)
def add_token_mass(
    logits: Floats, counts: NDArray[np.int32], token_starts: NDArray[np.int64], row_starts: NDArray[np.int64],
    log_sum_exp: Floats, lanes: int, token_mass: Floats, page_mass: Floats,
) -> None:  # fmt: skip
    """Add to `token_mass` and, unless it is empty, `page_mass`. `logits` `[pages, q_heads, page_tokens]` is used up."""
    pages = counts.shape[0]
    piece = (pages + lanes - 1) // lanes
    for lane in prange(lanes):
        probabilities_of_lane(np.int64(lane), piece, logits, counts, row_starts, log_sum_exp)
    # Serial: rows that share a prefix may name the same tokens.
    for page in range(pages):
        total = ZERO
        for t in range(counts[page]):
            token_mass[token_starts[page] + t] += logits[page, 0, t]
            total += logits[page, 0, t]
        if page_mass.shape[0] > 0:
            page_mass[page] += total


@kernel(fastmath=True)
def add_page_mass(
    page_tops: Floats,
    page_totals: Floats,
    row_starts: NDArray[np.int64],
    log_sum_exp: Floats,
    page_mass: Floats,
) -> None:
    """Add to `page_mass` from the tops and totals `[pages, q_heads]` that `decode` left."""
    rows, q_heads = log_sum_exp.shape
    for row in range(rows):
        for page in range(row_starts[row], row_starts[row + 1]):
            mass = ZERO
            for head in range(q_heads):
                mass += page_totals[page, head] * exp_negative(page_tops[page, head] - log_sum_exp[row, head])
            page_mass[page] += mass / np.float32(q_heads)
