"""Arithmetic of one page: logits, weights, weighted sums. Small kernels that vectorize, called from inner loops.

Rows are sliced before the innermost loop, because numba's wrap-around of negative indices would stop vectorization.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tierkv.attention.contract import Scale
from tierkv.numba_setup import kernel
from tierkv.quant.floats import float_of, widen

Floats = NDArray[np.float32]
Words = NDArray[np.uint16] | NDArray[np.uint32]
"""Exact pages as unsigned integers of their item size (`quant.floats.page_words`)."""

ZERO, HALF, ONE, TWO = np.float32(0.0), np.float32(0.5), np.float32(1.0), np.float32(2.0)
LOG2_E, LN_2 = np.float32(math.log2(math.e)), np.float32(math.log(2.0))
NEGLIGIBLE = np.float32(-87.0)
"""exp of this is 1.6e-38, the smallest normal float32; weights below it are zero."""
ABSENT = np.float32(-1e4)
"""Logit, relative to the maximum, of a slot that holds no token: its weight is exactly zero."""
MINUS_INFINITY = np.float32(-np.inf)
T2, T3, T4, T5, T6, T7 = (np.float32(1.0 / math.factorial(power)) for power in range(2, 8))


@kernel()
def exp_negative(x: np.float32) -> np.float32:
    """exp(x) for x <= 0 without a library call, so that loops over it vectorize.

    exp(x) = 2**n exp(r) with n = round(x / ln 2), and the Taylor series of exp(r) to degree 7 on |r| <= ln(2) / 2. The
    relative error is below 6e-7 for x > -10, where weights matter, and below 5e-6 everywhere.
    """
    bounded = NEGLIGIBLE if x < NEGLIGIBLE else x  # keeps NaN
    n = np.float32(math.floor(bounded * LOG2_E + HALF))
    r = bounded - n * LN_2
    series = ONE + r * (ONE + r * (T2 + r * (T3 + r * (T4 + r * (T5 + r * (T6 + r * T7))))))
    power = float_of(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))
    return ZERO if x < NEGLIGIBLE else series * power


@kernel(fastmath=True)
def exp_in_place(x: Floats) -> None:
    """`x[i] = exp(x[i])` for `x` `[n]`, all <= 0. One long loop: short ones do not vectorize."""
    for i in range(x.shape[0]):
        x[i] = exp_negative(x[i])


@kernel()
def widen_into(words: Words, is_bfloat16: bool, out: Floats) -> None:
    """float32 values of page words, `[n]`."""
    for i in range(words.shape[0]):
        out[i] = widen(words[i], is_bfloat16)


@kernel(fastmath=True)
def exact_logits(query: Floats, keys: Floats, count: int, out: Floats) -> None:
    """`out[g, t] = query[g] . keys[t]` for t < count; query `[group, head_dim]`, keys `[tokens * head_dim]`."""
    dim = query.shape[1]
    whole = count - count % 4
    for g in range(query.shape[0]):
        q = query[g]
        for t in range(0, whole, 4):  # four tokens at a time share the loads of the query
            at = t * dim
            k0, k1 = keys[at : at + dim], keys[at + dim : at + 2 * dim]
            k2, k3 = keys[at + 2 * dim : at + 3 * dim], keys[at + 3 * dim : at + 4 * dim]
            s0 = s1 = s2 = s3 = ZERO
            for d in range(dim):
                x = q[d]
                s0 += x * k0[d]
                s1 += x * k1[d]
                s2 += x * k2[d]
                s3 += x * k3[d]
            out[g, t], out[g, t + 1], out[g, t + 2], out[g, t + 3] = s0, s1, s2, s3
        for t in range(whole, count):
            k0 = keys[t * dim : (t + 1) * dim]
            s0 = ZERO
            for d in range(dim):
                s0 += q[d] * k0[d]
            out[g, t] = s0


@kernel(fastmath=True)
def exact_values(weights: Floats, values: Floats, count: int, total: Floats) -> None:
    """`total[g] += sum_t weights[g, t] values[t]` for t < count; values `[tokens * head_dim]`."""
    dim = total.shape[1]
    whole = count - count % 4
    for g in range(total.shape[0]):
        row = total[g]
        for t in range(0, whole, 4):
            at = t * dim
            v0, v1 = values[at : at + dim], values[at + dim : at + 2 * dim]
            v2, v3 = values[at + 2 * dim : at + 3 * dim], values[at + 3 * dim : at + 4 * dim]
            w0, w1, w2, w3 = weights[g, t], weights[g, t + 1], weights[g, t + 2], weights[g, t + 3]
            for d in range(dim):
                row[d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
        for t in range(whole, count):
            v0 = values[t * dim : (t + 1) * dim]
            w0 = weights[g, t]
            for d in range(dim):
                row[d] += w0 * v0[d]


@kernel(fastmath=True)
def scale_row(row: Floats, factor: np.float32) -> None:
    """`row *= factor`, `[n]`."""
    for d in range(row.shape[0]):
        row[d] *= factor


@kernel()
def capped(x: np.float32, cap: float) -> np.float32:
    """cap * tanh(x / cap), from `exp_negative` so that loops over it vectorize."""
    e = exp_negative(-abs(TWO * x / cap))
    size = cap * (ONE - e) / (ONE + e)
    return -size if x < ZERO else size


@kernel(fastmath=True)
def scale_and_top(row: Floats, count: int, scale: Scale) -> np.float32:
    """Make logits of the first `count` products in place; their maximum."""
    top = MINUS_INFINITY
    for t in range(count):
        row[t] *= scale.factor
        top = row[t] if row[t] > top else top
    if scale.cap > ZERO:
        for t in range(count):
            row[t] = capped(row[t], scale.cap)
        top = capped(top, scale.cap)
    return top


@kernel(fastmath=True)
def shift(row: Floats, count: int, by: np.float32) -> None:
    """Logits relative to a maximum, in place; slots from `count` on get `ABSENT`."""
    for t in range(count):
        row[t] -= by
    for t in range(count, row.shape[0]):
        row[t] = ABSENT


@kernel(fastmath=True)
def total_of(row: Floats) -> np.float32:
    """Sum of `row` `[n]`."""
    total = ZERO
    for t in range(row.shape[0]):
        total += row[t]
    return total
