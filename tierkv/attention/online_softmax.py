"""Arithmetic of one page: logits, weights, weighted sums. Small kernels that vectorize, called from inner loops.

Rows are sliced before the innermost loop, because numba's wrap-around of negative indices would stop vectorization.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tierkv.attention.contract import Scale
from tierkv.numba_setup import kernel
from tierkv.quant.floats import bits_of, float_of, widen
from tierkv.quant.tiles import largest

Floats = NDArray[np.float32]
Words = NDArray[np.uint16] | NDArray[np.uint32]
"""Exact pages as unsigned integers of their item size (`quant.floats.page_words`)."""

ZERO, HALF, ONE, TWO = np.float32(0.0), np.float32(0.5), np.float32(1.0), np.float32(2.0)
LOG2_E, LN_2 = np.float32(math.log2(math.e)), np.float32(math.log(2.0))
NEGLIGIBLE = np.float32(-87.0)
"""exp of this is 1.6e-38, the smallest normal float32; weights below it are zero."""
ROUNDER = np.float32(1.5 * 2**23)
"""A float32 plus this is rounded to an integer, which stands in the low bits."""
BIAS = np.uint32(127)
MINUS_INFINITY = np.float32(-np.inf)
LOWEST = np.float32(np.finfo(np.float32).min)
"""The largest of no logits so far: logits of minus infinity less this are that still, and no NaN."""
T2, T3, T4, T5, T6, T7 = (np.float32(1.0 / math.factorial(power)) for power in range(2, 8))


@kernel()
def exp_negative(x: np.float32) -> np.float32:
    """exp(x) for x <= 0 without a library call, so that loops over it vectorize.

    exp(x) = 2**n exp(r) with n = round(x / ln 2), and the Taylor series of exp(r) to degree 7 on |r| <= ln(2) / 2. The
    relative error is below 6e-7 for x > -10, where weights matter, and below 5e-6 everywhere. Adding `ROUNDER` leaves n
    in the low bits of the sum: no conversion to an integer, which would halve the vectors.
    """
    bounded = NEGLIGIBLE if x < NEGLIGIBLE else x  # keeps NaN
    rounded = bounded * LOG2_E + ROUNDER
    r = bounded - (rounded - ROUNDER) * LN_2
    series = ONE + r * (ONE + r * (T2 + r * (T3 + r * (T4 + r * (T5 + r * (T6 + r * T7))))))
    power = float_of(np.uint32((bits_of(rounded) + BIAS) << np.uint32(23)))
    return ZERO if x < NEGLIGIBLE else series * power


@kernel(fastmath=True)
def weigh(row: Floats, top: np.float32) -> None:
    """Logits `[n]`, none above `top`, become weights exp(logit - top) in place."""
    for t in range(row.shape[0]):
        row[t] = exp_negative(row[t] - top)


@kernel()
def copy_rows(source: Floats, start: int, target: Floats, at: int, count: int) -> None:
    """`target[g, at : at + count] = source[g, start : start + count]` for all rows."""
    for g in range(source.shape[0]):
        mine, theirs = source[g, start : start + count], target[g, at : at + count]
        for t in range(count):
            theirs[t] = mine[t]


@kernel()
def fill_absent(logits: Floats, at: int, count: int, page_tokens: int) -> None:
    """Give the slots of a page (from `at` on) that hold no token the logit of one that does: no maximum changes."""
    if count < page_tokens:
        for g in range(logits.shape[0]):
            logits[g, at + count : at + page_tokens] = logits[g, at]


@kernel()
def widen_into(words: Words, is_bfloat16: bool, out: Floats) -> None:
    """float32 values of page words, `[n]`."""
    for i in range(words.shape[0]):
        out[i] = widen(words[i], is_bfloat16)


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
    for t in range(count):
        row[t] *= scale.factor
    if scale.cap > ZERO:
        for t in range(count):
            row[t] = capped(row[t], scale.cap)
    top: np.float32 = largest(row, count // 16)
    for t in range(count - count % 16, count):
        top = row[t] if row[t] > top else top
    return top


@kernel(fastmath=True)
def total_of(row: Floats) -> np.float32:
    """Sum of `row` `[n]`."""
    total = ZERO
    for t in range(row.shape[0]):
        total += row[t]
    return total
