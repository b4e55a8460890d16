"""Estimates of cold pages from transform digests, on CPU cores. Names are those of `estimate_kernels`.

A query is turned once a row and column. Pages go in blocks of `BLOCK`, and lie last in what is computed of them, so
that loops along them vectorize: a KV head's records are unpacked to coefficients; their products with a turned query,
summed cosine by cosine and turned back along the tokens, are the pages' logits. What codes lack is taken for normal
noise on them. `tierkv.prefetch.transform` has the formulas.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange
from numpy.typing import NDArray

from tierkv.attention.contract import Scale
from tierkv.attention.estimate_kernels import INFINITY, UNKNOWN, Bytes
from tierkv.attention.online_softmax import (
    HALF,
    LOWEST,
    MINUS_INFINITY,
    ONE,
    TWO,
    ZERO,
    Floats,
    capped,
    exp_negative,
)
from tierkv.numba_setup import SHARED_WORK, kernel
from tierkv.prefetch.transform import GAIN, NOTHING
from tierkv.prefetch.transform_digests import CODE_LEVELS, COSINES, SLOTS, TOGETHER, Ints, Tables

BLOCK = 32
"""Pages that are estimated together: loops of 16 are not vectorized, and longer blocks leave the cache."""
STEP, TWO_STEPS, THREE_STEPS = np.uint64(BLOCK), np.uint64(2 * BLOCK), np.uint64(3 * BLOCK)


@kernel(fastmath=True)
def turn(
    query: Floats, kv_heads: int, scale: Scale, tables: Tables, turned: Floats, common: Floats, noise: Floats
) -> None:
    """The queries along the axes, `turned` `[rows, columns, head_dim]`, their products with the mean key `common`
    `[rows, columns]`, and the variance of what codes lack, at gain 1, `noise` `[rows, columns]`. All are scaled.
    """
    rows, columns, dim = query.shape
    group = columns // kv_heads
    for row in range(rows):
        for c in range(columns):
            head, asking, out = c // group, query[row, c], turned[row, c]
            axes, mean, lost = tables.axes[head], tables.mean[head], tables.lost[head]
            out[:] = ZERO
            along = across = ZERO
            for d in range(dim):
                x, axis = asking[d] * scale.factor, axes[d]
                along += x * mean[d]
                for i in range(dim):
                    out[i] += x * axis[i]
            for i in range(dim):
                across += out[i] * out[i] * lost[i]
            common[row, c], noise[row, c] = along, across


@kernel()
def gather(
    packed: Bytes,
    digests: NDArray[np.int64],
    first: int,
    last: int,
    at: int,
    size: int,
    raw: Ints,
    gains: Floats,
) -> None:
    """Records at `at` of pages' digests, to `raw` `[size * BLOCK]`, pages last. One that is not there tells nothing."""
    for p in range(BLOCK):
        place = np.uint64(p)
        there = first + p < last and digests[first + p] >= 0
        if there:
            record = np.uint64(digests[first + p] + at)
            for b in range(np.uint64(size)):
                raw[b * np.uint64(BLOCK) + place] = packed[record + b]
        else:
            for b in range(np.uint64(size)):
                raw[b * np.uint64(BLOCK) + place] = 0
            raw[place] = NOTHING
        gains[p] = GAIN[raw[place]]


@kernel(fastmath=True)
def unpack(raw: Ints, tables: Tables, head: int, coefficients: Floats) -> None:
    """To `coefficients` `[C * BLOCK]`."""
    for j in range(tables.counts[head]):
        low, high = np.uint64(tables.low[head, j] * BLOCK), np.uint64(tables.high[head, j] * BLOCK)
        shift, mask, size = tables.shift[head, j], tables.mask[head, j], tables.size[head, j]
        place = np.uint64(j * BLOCK)
        for p in range(np.uint64(BLOCK)):
            code = ((raw[low + p] | (raw[high + p] << 8)) >> shift) & mask
            coefficients[place + p] = CODE_LEVELS[np.uint64(mask + code)] * size


@kernel(fastmath=True)
def logits_of(
    turned: Floats, common: np.float32, coefficients: Floats, gains: Floats, tables: Tables, head: int,
    cosine: Floats, logits: Floats,
) -> None:  # fmt: skip
    """Of one query `[head_dim]`; `cosine` and `logits` are `[SLOTS * BLOCK]`."""
    used = tables.slots[head]
    cosine[:] = ZERO
    for j in range(0, tables.counts[head], TOGETHER):
        a, b = turned[tables.axis[head, j]], turned[tables.axis[head, j + 1]]
        c, d = turned[tables.axis[head, j + 2]], turned[tables.axis[head, j + 3]]
        at, first = np.uint64(tables.slot[head, j] * BLOCK), np.uint64(j * BLOCK)
        second, third, fourth = first + STEP, first + TWO_STEPS, first + THREE_STEPS
        for p in range(np.uint64(BLOCK)):
            cosine[at + p] += (
                a * coefficients[first + p]
                + b * coefficients[second + p]
                + c * coefficients[third + p]
                + d * coefficients[fourth + p]
            )
    for k in range(1, used):
        at = np.uint64(k * BLOCK)
        for p in range(np.uint64(BLOCK)):
            cosine[at + p] *= gains[p]
    for t in range(
        SLOTS // 2
    ):  # even cosines are the same from both ends of a page, odd ones of opposite sign
        near, far = np.uint64(t * BLOCK), np.uint64((SLOTS - 1 - t) * BLOCK)
        for p in range(np.uint64(BLOCK)):
            even = odd = ZERO
            for k in range(0, SLOTS, 2):
                even += COSINES[k, t] * cosine[np.uint64(k * BLOCK) + p]
                odd += COSINES[k + 1, t] * cosine[np.uint64((k + 1) * BLOCK) + p]
            logits[near + p] = common + even + odd
            logits[far + p] = common + even - odd


@kernel(fastmath=True)
def log_masses(
    logits: Floats, counts: Ints, short: bool, log_counts: Floats, gains: Floats, noise: np.float32, scale: Scale,
    tops: Floats, totals: Floats,
) -> None:  # fmt: skip
    """From logits `[SLOTS * BLOCK]` to log-masses `totals` `[BLOCK]`; `tops` `[BLOCK]` is scratch."""
    if scale.cap > ZERO:
        for i in range(SLOTS * BLOCK):
            logits[i] = capped(logits[i], scale.cap)
    if short:
        for t in range(SLOTS):
            for p in range(BLOCK):
                if t >= counts[p]:
                    logits[t * BLOCK + p] = LOWEST
    tops[:] = LOWEST
    for t in range(SLOTS):
        place = np.uint64(t * BLOCK)
        for p in range(np.uint64(BLOCK)):
            tops[p] = logits[place + p] if logits[place + p] > tops[p] else tops[p]
    for t in range(SLOTS):
        place = np.uint64(t * BLOCK)
        for p in range(np.uint64(BLOCK)):
            logits[place + p] = exp_negative(logits[place + p] - tops[p])
    totals[:] = ZERO
    for t in range(SLOTS):
        place = np.uint64(t * BLOCK)
        for p in range(np.uint64(BLOCK)):
            totals[p] += logits[place + p]
    deviation = np.float32(math.sqrt(noise))
    for p in range(BLOCK):
        level = tops[p] + np.float32(math.log(totals[p])) - log_counts[p]
        sigma, room = gains[p] * deviation, INFINITY
        if scale.cap > ZERO:
            bent = level / scale.cap
            sigma *= ONE - bent * bent
            room = scale.cap - level
        a = np.float32(math.sqrt(TWO * log_counts[p]))
        above = HALF * sigma * sigma if sigma <= a else a * sigma - HALF * a * a
        totals[p] = log_counts[p] + level + (room if above > room else above)


@kernel(fastmath=True)
def transform_lane(
    lane: np.int64, piece: int, packed: Bytes, digests: NDArray[np.int64], counts: NDArray[np.int32],
    row_starts: NDArray[np.int64], at: int, size: int, kv_heads: int, scale: Scale, tables: Tables,
    turned: Floats, common: Floats, noise: Floats, estimates: Floats, wanted: Floats,
) -> None:  # fmt: skip
    """As `estimate_kernels.estimate_lane`; `turned`, `common`, `noise` are those of `turn`."""
    group = turned.shape[1] // kv_heads
    raw, coefficients = np.empty(size * BLOCK, np.int32), np.empty(tables.low.shape[1] * BLOCK, np.float32)
    cosine, logits = np.empty(SLOTS * BLOCK, np.float32), np.empty(SLOTS * BLOCK, np.float32)
    tokens = np.empty(BLOCK, np.int32)
    log_counts, gains, tops, totals = (
        np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32),
        np.empty(BLOCK, np.float32),
    )  # fmt: skip
    page, stop, row = int(lane * piece), min(digests.shape[0], int((lane + 1) * piece)), 0
    while page < stop:
        while row_starts[row + 1] <= page:
            row += 1
        last = min(stop, page + BLOCK, int(row_starts[row + 1]))
        short = False
        for p in range(BLOCK):
            tokens[p] = counts[page + p] if page + p < last else SLOTS
            log_counts[p] = math.log(np.float32(tokens[p]))
            short |= tokens[p] < SLOTS
        for head in range(kv_heads):
            gather(packed, digests, page, last, at + head * size, size, raw, gains)
            unpack(raw, tables, head, coefficients)
            wanted[head, page:last] = UNKNOWN
            for c in range(head * group, (head + 1) * group):
                logits_of(turned[row, c], common[row, c], coefficients, gains, tables, head, cosine, logits)
                log_masses(logits, tokens, short, log_counts, gains, noise[row, c], scale, tops, totals)
                for p in range(last - page):
                    # Not math.isfinite, which fast math may fold.
                    finite = totals[p] > MINUS_INFINITY and totals[p] < INFINITY and raw[p] != NOTHING
                    estimates[c, page + p] = totals[p] if finite else MINUS_INFINITY
                    wanted[head, page + p] = ZERO if finite else wanted[head, page + p]
        page = last


@kernel(parallel=True)
def estimate_transforms(
    query: Floats, packed: Bytes, digests: NDArray[np.int64], counts: NDArray[np.int32], row_starts: NDArray[np.int64],
    at: int, size: int, kv_heads: int, scale: Scale, tables: Tables, lanes: int,
    turned: Floats, common: Floats, noise: Floats, estimates: Floats, wanted: Floats,
) -> None:  # fmt: skip
    """Estimates of all pages of a batch, from records of `size` bytes; `turn` fills `turned`, `common` and `noise`."""
    pages = digests.shape[0]
    turn(query, kv_heads, scale, tables, turned, common, noise)
    if pages * estimates.shape[0] * query.shape[2] < SHARED_WORK:
        lanes = 1
    piece = (pages + lanes - 1) // lanes
    if lanes == 1:
        transform_lane(
            np.int64(0), piece, packed, digests, counts, row_starts, at, size, kv_heads, scale, tables,
            turned, common, noise, estimates, wanted,
        )  # fmt: skip
    else:
        for lane in prange(lanes):
            transform_lane(
                np.int64(lane), piece, packed, digests, counts, row_starts, at, size, kv_heads, scale, tables,
                turned, common, noise, estimates, wanted,
            )  # fmt: skip
