"""Attention probabilities of tokens and pages, from the weights that `decode` left and the log-sum-exps it ended at.

A weight is exp(logit - top), where `top` was the largest logit so far when its page was attended: a probability is the
weight times exp(top - log_sum_exp), one exponential a page and head.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.attention.online_softmax import ZERO, Floats, exp_negative
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
    """Add to `page_mass` and `token_mass`, whichever is not empty. Serial: rows may share tokens, and it is short."""
    rows, q_heads = log_sum_exp.shape
    for row in range(rows):
        for page in range(row_starts[row], row_starts[row + 1]):
            if token_mass.shape[0] > 0:
                start = token_starts[page]
                mine = token_mass[start : start + counts[page]]
                add_weights(kept[page], page_tops[page], log_sum_exp[row], q_heads, mine)
            if page_mass.shape[0] > 0:
                for head in range(q_heads):
                    share = share_of(page_tops[page, head], log_sum_exp[row, head], q_heads)
                    page_mass[page] += share * page_totals[page, head]
