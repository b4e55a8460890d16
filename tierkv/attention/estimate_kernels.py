"""Which cold pages matter: estimates from digests of means and deviations, and from estimates of any form joint shares
and each KV head's choice.

Columns are query heads or, for the last few queries of a chunk, query heads times queries: those of one KV head lie
together, a head's queries next to each other, the last query last.

    query           [rows, columns, head_dim]
    log_sum_exp     [rows, columns]      of what lies in HBM
    estimates       [columns, pages]     estimated log-mass; minus infinity without a digest
    shares          [columns, pages]     estimated share of attention
    wanted          [kv_heads, pages]    shares summed over the KV head's columns; below zero: nothing is known

Pages come last so that everything after the estimates runs along them in long loops that vectorize.

The record's layout and the formula: `tierkv.prefetch.deviation`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange
from numpy.typing import NDArray

from tierkv.attention.contract import Scale
from tierkv.attention.online_softmax import (
    HALF,
    MINUS_INFINITY,
    ONE,
    TWO,
    ZERO,
    Floats,
    capped,
    scale_row,
    total_of,
    weigh,
)
from tierkv.numba_setup import SHARED_WORK, kernel
from tierkv.prefetch.deviation import SCALES_BYTES
from tierkv.quant.floats import load_float

Bytes = NDArray[np.uint8]

UNKNOWN = np.float32(-1.0)
"""Marks in `wanted` a page that a KV head knows nothing about, and so does not choose."""
INFINITY = np.float32(np.inf)


@kernel(fastmath=True)
def estimate_lane(
    lane: np.int64, piece: int, query: Floats, packed: Bytes, digests: NDArray[np.int64], counts: NDArray[np.int32],
    row_starts: NDArray[np.int64], at: int, kv_heads: int, scale: Scale,
    means: Floats, deviations: Floats, estimates: Floats, wanted: Floats,
) -> None:  # fmt: skip
    """The pages `[lane * piece, (lane + 1) * piece)`; their layer's records start `at` bytes into each digest.

    `wanted` gets zeros, and `UNKNOWN` where all of a KV head's columns are minus infinity. `means` and `deviations`
    `[head_dim]` are scratch. Nothing is sliced in here, because counting references to slices
    costs more than a record's arithmetic, and indices are unsigned, which need no wrap-around and so vectorize.
    """
    rows, columns, dim = query.shape
    flat_query = query.reshape(rows * columns * dim)
    group, size = columns // kv_heads, SCALES_BYTES + 2 * dim
    row = 0
    for page in range(lane * piece, min(digests.shape[0], (lane + 1) * piece)):
        while row_starts[row + 1] <= page:
            row += 1
        if digests[page] < 0:
            for c in range(columns):
                estimates[c, page] = MINUS_INFINITY
            for head in range(kv_heads):
                wanted[head, page] = UNKNOWN
            continue
        log_count = np.float32(math.log(np.float32(counts[page])))
        a = np.float32(math.sqrt(TWO * log_count))
        for head in range(kv_heads):
            record = digests[page] + at + head * size
            mean_step = load_float(packed, record) * scale.factor
            deviation_step = load_float(packed, record + 4) * abs(scale.factor)
            codes = np.uint64(record + SCALES_BYTES)
            for d in range(dim):
                means[d] = np.float32(np.int8(packed[codes + np.uint64(d)]))
            codes += np.uint64(dim)
            for d in range(dim):
                deviations[d] = np.float32(packed[codes + np.uint64(d)])
            wanted[head, page] = UNKNOWN
            for c in range(head * group, (head + 1) * group):
                first = np.uint64((row * columns + c) * dim)
                along = across = ZERO
                for d in range(dim):
                    x = flat_query[first + np.uint64(d)]
                    along += x * means[d]
                    spread = x * deviations[d]
                    across += spread * spread
                mean, sigma = mean_step * along, deviation_step * np.float32(math.sqrt(across))
                room = INFINITY
                if scale.cap > ZERO:
                    mean = capped(mean, scale.cap)
                    bent = mean / scale.cap
                    sigma *= ONE - bent * bent
                    room = scale.cap - mean
                above = HALF * sigma * sigma if sigma <= a else a * sigma - HALF * a * a
                known = log_count + mean + (room if above > room else above)
                # Not math.isfinite, which fast math may fold.
                finite = known > MINUS_INFINITY and known < INFINITY
                estimates[c, page] = known if finite else MINUS_INFINITY
                wanted[head, page] = ZERO if finite else wanted[head, page]


@kernel(fastmath=True)
def share(estimates: Floats, log_sum_exp: np.float32, shares: Floats) -> None:
    """Shares of one row's pages for one column, from their estimates `[pages]`.

    What lies in HBM takes part in the maximum, so that no exponent is above zero.
    """
    top = log_sum_exp
    for p in range(estimates.shape[0]):
        top = estimates[p] if estimates[p] > top else top
    if top == MINUS_INFINITY:
        shares[:] = ZERO
        return
    shares[:] = estimates
    weigh(shares, top)
    total = np.float32(math.exp(log_sum_exp - top)) + total_of(shares)
    scale_row(shares, ONE / total)


@kernel(fastmath=True)
def add_row(row: Floats, factor: np.float32, total: Floats) -> None:
    """`total += factor * row`, `[n]`."""
    for i in range(row.shape[0]):
        total[i] += factor * row[i]


@kernel()
def choose(wanted: Floats, first: np.int64, best: NDArray[np.int64]) -> int:
    """Fill `best` with the most wanted pages of `wanted` `[pages]`, ties by index; returns how many.

    `best` is not empty. Pages are counted from `first`.
    """
    count, limit = 0, best.shape[0]
    for page in range(wanted.shape[0]):
        value = wanted[page]
        if not value >= ZERO or (count == limit and value <= wanted[best[count - 1]]):
            continue
        place = count if count < limit else limit - 1
        while place > 0 and wanted[best[place - 1]] < value:
            best[place] = best[place - 1]
            place -= 1
        best[place] = page
        count = min(count + 1, limit)
    for place in range(count):
        best[place] += first
    return count


@kernel(parallel=True)
def estimate_deviations(
    query: Floats, packed: Bytes, digests: NDArray[np.int64], counts: NDArray[np.int32], row_starts: NDArray[np.int64],
    at: int, kv_heads: int, scale: Scale, decoded: Floats, estimates: Floats, wanted: Floats,
) -> None:  # fmt: skip
    """Estimates of all pages of a batch; see `estimate_lane`. `decoded` `[lanes, 2, head_dim]` is scratch."""
    pages, lanes = digests.shape[0], decoded.shape[0]
    if pages * estimates.shape[0] * query.shape[2] < SHARED_WORK:
        lanes = 1
    piece = (pages + lanes - 1) // lanes
    if lanes == 1:
        estimate_lane(
            np.int64(0), piece, query, packed, digests, counts, row_starts, at, kv_heads, scale,
            decoded[0, 0], decoded[0, 1], estimates, wanted,
        )  # fmt: skip
    else:
        for lane in prange(lanes):
            estimate_lane(
                np.int64(lane), piece, query, packed, digests, counts, row_starts, at, kv_heads, scale,
                decoded[lane, 0], decoded[lane, 1], estimates, wanted,
            )  # fmt: skip


@kernel()
def choose_pages(
    row_starts: NDArray[np.int64], kv_heads: int, weights: Floats, log_sum_exp: Floats, queries: int, read: int,
    estimates: Floats, shares: Floats, wanted: Floats,
    seen: Floats, chosen: NDArray[np.int64], chosen_starts: NDArray[np.int64],
) -> None:  # fmt: skip
    """What estimates add to `seen`, and the pages that each row and KV head reads.

    Args:
        weights: `[kv_heads]`, how much a KV head's opinion counts in `seen`.
        queries: columns of one query head.
        read: pages that a KV head chooses at most.
        seen: `[pages]`, gets the last query's share, weighted and averaged over query heads, added; or empty.
        chosen: `[rows * kv_heads * read]`, gets pages; pair `row * kv_heads + head` has `chosen_starts[pair] ..`.
        chosen_starts: `[rows * kv_heads + 1]`.
    """
    columns, taken, rows = estimates.shape[0], 0, log_sum_exp.shape[0]
    group = columns // kv_heads
    for row in range(rows):
        mine = slice(row_starts[row], row_starts[row + 1])
        for c in range(columns):
            share(estimates[c, mine], log_sum_exp[row, c], shares[c, mine])
            add_row(shares[c, mine], ONE, wanted[c // group, mine])
            if seen.shape[0] > 0 and c % queries == queries - 1:
                part = weights[c // group] * np.float32(queries) / np.float32(columns)
                add_row(shares[c, mine], part, seen[mine])
        for head in range(kv_heads):
            chosen_starts[row * kv_heads + head] = taken
            if read > 0:
                taken += choose(wanted[head, mine], row_starts[row], chosen[taken : taken + read])
    chosen_starts[rows * kv_heads] = taken
