"""Which cold pages matter, from their digests: estimates, joint shares and each KV head's choice, in one parallel call.

Columns are query heads or, for the last few queries of a chunk, query heads times queries: those of one KV head lie
together, a head's queries next to each other, the last query last.

    query           [rows, columns, head_dim]
    log_sum_exp     [rows, columns]      of what lies in HBM
    estimates       [pages, columns]     estimated log-mass; minus infinity without a digest
    shares          [pages, columns]     estimated share of attention
    wanted          [pages, kv_heads]    shares summed over the KV head's columns; below zero: nothing is known

The record's layout and the formula: `tierkv.prefetch.digests`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange
from numpy.typing import NDArray

from tierkv.attention.online_softmax import HALF, MINUS_INFINITY, ZERO, Floats, exp_in_place
from tierkv.numba_setup import kernel
from tierkv.prefetch.digests import SCALES_BYTES
from tierkv.quant.floats import load_float

Bytes = NDArray[np.uint8]

UNKNOWN = np.float32(-1.0)
"""Marks in `wanted` a page that a KV head knows nothing about, and so does not choose."""
TWO, INFINITY = np.float32(2.0), np.float32(np.inf)


@kernel(fastmath=True)
def estimate_record(
    query: Floats, record: Bytes, scale: np.float32, log_count: np.float32, means: Floats, deviations: Floats,
    out: Floats,
) -> None:  # fmt: skip
    """Estimated log-mass `out` `[columns]` of one page and KV head; `means`, `deviations` `[head_dim]` are scratch."""
    columns, dim = query.shape
    mean_step = load_float(record, 0) * scale
    deviation_step = load_float(record, 4) * abs(scale)
    mean_codes, deviation_codes = record[SCALES_BYTES : SCALES_BYTES + dim], record[SCALES_BYTES + dim :]
    for d in range(dim):
        means[d] = np.float32(np.int8(mean_codes[d]))
    for d in range(dim):
        deviations[d] = np.float32(deviation_codes[d])
    a = np.float32(math.sqrt(TWO * log_count))
    for c in range(columns):
        q = query[c]
        along = across = ZERO
        for d in range(dim):
            along += q[d] * means[d]
            spread = q[d] * deviations[d]
            across += spread * spread
        sigma = deviation_step * np.float32(math.sqrt(across))
        above = HALF * sigma * sigma if sigma <= a else a * sigma - HALF * a * a
        known = log_count + mean_step * along + above
        # Not math.isfinite, which fast math may fold.
        out[c] = known if known > MINUS_INFINITY and known < INFINITY else MINUS_INFINITY


@kernel()
def estimate_lane(
    lane: np.int64, piece: int, query: Floats, packed: Bytes, digests: NDArray[np.int64], counts: NDArray[np.int32],
    row_starts: NDArray[np.int64], at: int, kv_heads: int, scale: np.float32,
    means: Floats, deviations: Floats, estimates: Floats,
) -> None:  # fmt: skip
    """The pages `[lane * piece, (lane + 1) * piece)`; their layer's records start `at` bytes into each digest."""
    _, columns, dim = query.shape
    group, size = columns // kv_heads, SCALES_BYTES + 2 * dim
    row = 0
    for page in range(lane * piece, min(digests.shape[0], (lane + 1) * piece)):
        while row_starts[row + 1] <= page:
            row += 1
        if digests[page] < 0:
            estimates[page] = MINUS_INFINITY
            continue
        log_count = np.float32(math.log(np.float64(counts[page])))
        for head in range(kv_heads):
            start = digests[page] + at + head * size
            estimate_record(
                query[row, head * group : (head + 1) * group], packed[start : start + size], scale, log_count,
                means, deviations, estimates[page, head * group : (head + 1) * group],
            )  # fmt: skip


@kernel(fastmath=True)
def share_row(estimates: Floats, log_sum_exp: Floats, tops: Floats, totals: Floats, shares: Floats) -> None:
    """Shares of one row's pages from estimates `[pages, columns]`; `tops`, `totals` `[columns]` are scratch.

    What lies in HBM takes part in the maximum, so that no exponent is above zero.
    """
    pages, columns = estimates.shape
    tops[:] = log_sum_exp
    for p in range(pages):
        row = estimates[p]
        for c in range(columns):
            tops[c] = row[c] if row[c] > tops[c] else tops[c]
    for c in range(columns):  # a column without anything: shift by zero, and all exponentials stay zero
        tops[c] = ZERO if tops[c] == MINUS_INFINITY else tops[c]
        totals[c] = np.float32(math.exp(log_sum_exp[c] - tops[c]))
    for p in range(pages):
        for c in range(columns):
            shares[p, c] = estimates[p, c] - tops[c]
    exp_in_place(shares.reshape(pages * columns))
    for p in range(pages):
        for c in range(columns):
            totals[c] += shares[p, c]
    for c in range(columns):
        totals[c] = np.float32(1.0) / totals[c] if totals[c] > ZERO else ZERO
    for p in range(pages):
        for c in range(columns):
            shares[p, c] *= totals[c]


@kernel()
def want_page(estimates: Floats, shares: Floats, wanted: Floats) -> None:
    """`wanted` `[kv_heads]` of one page."""
    group = shares.shape[0] // wanted.shape[0]
    for head in range(wanted.shape[0]):
        total, known = ZERO, False
        for c in range(head * group, (head + 1) * group):
            total += shares[c]
            known = known or estimates[c] > MINUS_INFINITY
        wanted[head] = total if known else UNKNOWN


@kernel()
def choose(wanted: Floats, head: int, best: NDArray[np.int64]) -> int:
    """Fill `best` with the pages that `head` wants most, the most wanted first, ties by index; returns how many.

    `best` is not empty.
    """
    count, limit = 0, best.shape[0]
    for page in range(wanted.shape[0]):
        value = wanted[page, head]
        if not value >= ZERO or (count == limit and value <= wanted[best[count - 1], head]):
            continue
        place = count if count < limit else limit - 1
        while place > 0 and wanted[best[place - 1], head] < value:
            best[place] = best[place - 1]
            place -= 1
        best[place] = page
        count = min(count + 1, limit)
    return count


@kernel(parallel=True)
def estimate(
    query: Floats, packed: Bytes, digests: NDArray[np.int64], counts: NDArray[np.int32], row_starts: NDArray[np.int64],
    at: int, kv_heads: int, scale: np.float32, log_sum_exp: Floats, queries: int, read: int,
    decoded: Floats, sums: Floats, estimates: Floats, shares: Floats, wanted: Floats,
    seen: Floats, chosen: NDArray[np.int64], chosen_starts: NDArray[np.int64],
) -> None:  # fmt: skip
    """Estimates of all pages of a batch, what they add to `seen`, and the pages that each row and KV head reads.

    Args:
        queries: columns of one query head.
        read: pages that a KV head chooses at most.
        decoded, sums: scratch, `[lanes, 2, head_dim]` and `[2, columns]`.
        seen: `[pages]`, gets the last query's share averaged over query heads added; or empty.
        chosen: `[rows * kv_heads * read]`, gets pages; pair `row * kv_heads + head` has `chosen_starts[pair] ..`.
        chosen_starts: `[rows * kv_heads + 1]`.
    """
    pages, lanes = digests.shape[0], decoded.shape[0]
    piece = (pages + lanes - 1) // lanes
    for lane in prange(lanes):
        estimate_lane(
            np.int64(lane), piece, query, packed, digests, counts, row_starts, at, kv_heads, scale,
            decoded[lane, 0], decoded[lane, 1], estimates,
        )  # fmt: skip
    columns = estimates.shape[1]
    taken = 0
    for row in range(query.shape[0]):
        first, last = row_starts[row], row_starts[row + 1]
        share_row(estimates[first:last], log_sum_exp[row], sums[0], sums[1], shares[first:last])
        for page in range(first, last):
            want_page(estimates[page], shares[page], wanted[page])
            if seen.shape[0] > 0:
                total = ZERO
                for c in range(queries - 1, columns, queries):
                    total += shares[page, c]
                seen[page] += total * np.float32(queries) / np.float32(columns)
        for head in range(kv_heads):
            chosen_starts[row * kv_heads + head] = taken
            if read == 0:
                continue
            count = choose(wanted[first:last], head, chosen[taken : taken + read])
            chosen[taken : taken + count] += first
            taken += count
    chosen_starts[query.shape[0] * kv_heads] = taken
