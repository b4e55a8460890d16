"""Attention probabilities of tokens and pages, from the weights that `decode` left and the log-sum-exps it ended at.

A weight is exp(logit - top), where `top` was the largest logit so far when its page was attended: a probability is the
weight times exp(top - log_sum_exp), one exponential a page and head.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.attention.exact_rows import weighted_1x1
from tierkv.attention.online_softmax import ONE, ZERO, Floats, exp_negative, scale_row, weigh
from tierkv.numba_setup import kernel


@kernel()
def share_of(top: np.float32, log_sum_exp: np.float32, q_heads: int) -> np.float32:
    """What a weight of one query head adds to a mean over `q_heads` of them."""
    return exp_negative(min(top - log_sum_exp, ZERO)) / np.float32(q_heads)


@kernel(fastmath=True)
def add_weights(kept: Floats, tops: Floats, log_sum_exp: Floats, q_heads: int, mass: Floats) -> None:
    """Add one page's `kept` `[heads, page_tokens]` to `mass` `[tokens]`; `tops` and `log_sum_exp` are `[heads]`."""
    for head in range(kept.shape[0]):
        share = share_of(tops[head], log_sum_exp[head], q_heads)
        weights = kept[head, : mass.shape[0]]
        for t in range(mass.shape[0]):
            mass[t] += share * weights[t]


@kernel(fastmath=True)
def add_masses(
    page_tops: Floats, page_totals: Floats, kept: Floats, counts: NDArray[np.int32], token_starts: NDArray[np.int64],
    row_starts: NDArray[np.int64], log_sum_exp: Floats, page_mass: Floats, token_mass: Floats,
) -> None:  # fmt: skip
    """Add to `page_mass` and `token_mass`, whichever is not empty. Serial: rows may share tokens, and it is short.

    `page_tops` is used up: what a weight of each page and head adds to the mean over heads is made in its place.
    """
    rows, q_heads = log_sum_exp.shape
    for row in range(rows):
        for page in range(row_starts[row], row_starts[row + 1]):
            for head in range(q_heads):
                page_tops[page, head] = min(page_tops[page, head] - log_sum_exp[row, head], ZERO)
    shares = page_tops.reshape(page_tops.size)
    weigh(shares, ZERO)
    scale_row(shares, ONE / np.float32(q_heads))
    words, page_tokens = kept.view(np.uint32), kept.shape[2]
    for page in range(page_tops.shape[0]):
        if token_mass.shape[0] > 0:
            start, count = token_starts[page], counts[page]
            whole = count - count % 16
            for t in range(0, whole, 16):  # a weighted sum of rows, as values are
                at = page * q_heads * page_tokens + t
                weighted_1x1(
                    words, at, page_tokens, False, q_heads, shares, page * q_heads, 0, token_mass, start + t
                )
            for t in range(whole, count):
                for head in range(q_heads):
                    token_mass[start + t] += page_tops[page, head] * kept[page, head, t]
        if page_mass.shape[0] > 0:
            for head in range(q_heads):
                page_mass[page] += page_tops[page, head] * page_totals[page, head]
