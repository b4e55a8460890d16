"""The decode kernel: all rows and KV heads of one layer in one parallel call, over exact and low-bit pages in place.

The work is a line of units: row by row, KV head by KV head, page by page. It is cut into one equal piece a core
("lane"), wherever that falls, so that three heads keep two cores busy. What a lane attends of one (row, head)
pair is a *segment*: an online softmax over its pages, for all query heads of the KV head. A pair's segments are
then merged. Pair `i` and lane `j` meet in segment number `i + j`, which no other pair and lane share.

Weighted values of exact and of low-bit pages are summed apart: the latter stay in the codec's own (rotated) space
and leave it once, at the end. The middle form has no space of its own, so its pages are summed with the exact ones.

Arrays that several kernels share:

    query, out            [rows, q_heads, head_dim]; in segment kernels `[group, head_dim]` of one row and KV head
    words, packed, middle    the whole pool, as page words (uint16 or uint32) and as bytes (`layer_view.LayerView`)
    offsets, kinds, counts, row_starts      the batch's pages (`contract.Pages`)
    weights               [lanes, group, PAGES_AT_ONCE * page_tokens]    scratch: logits, then weights, of pages at hand
    page_rows             [lanes, group, page_tokens]        scratch: those of one packed page
    low_query, low_bias   [lanes, group, head_dim], [lanes, group]    scratch: the query as the codec wants it
    tops, totals          [segments, group]           the largest logit; the sum of exp(logit - top)
    exact_sums, low_sums  [segments, group, head_dim] weighted values, not yet divided by the total
    has_low               [segments]                  whether `low_sums` holds anything
    page_tops, page_totals    [pages, q_heads] or empty: the top when the page was attended, and its sum of weights
    kept                  [pages, q_heads, page_tokens] or empty: its weights exp(logit - top), for token masses
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange
from numpy.typing import NDArray

from tierkv.attention.contract import Scale
from tierkv.attention.exact_rows import exact_logits, exact_values, prefetch
from tierkv.attention.layer_view import Middle
from tierkv.attention.online_softmax import (
    LOWEST,
    MINUS_INFINITY,
    ZERO,
    Floats,
    Words,
    copy_rows,
    exp_negative,
    fill_absent,
    scale_and_top,
    scale_row,
    total_of,
    weigh,
)
from tierkv.numba_setup import SHARED_WORK, kernel
from tierkv.quant.fused import finish_values, page_logits, page_values, prepare_query
from tierkv.quant.tiles import borrowed
from tierkv.table import Kind

Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]

EXACT = int(Kind.EXACT)
MIDDLE = int(Kind.MIDDLE)
FUSED_GROUP = 16
"""Query heads that the codecs' fused kernels take at once."""

PAGES_AT_ONCE = 16
"""Pages whose weights are made together: loops over a few tokens do not vectorize."""


@kernel(inline=True)
def attend_segment(
    query: Floats, words: Words, packed: Bytes, is_bfloat16: bool, code: int, state: Floats,
    middle: Middle, layer: int, num_layers: int, kv_heads: int, head: int, scale: Scale,
    offsets: NDArray[np.int64], kinds: NDArray[np.int8], counts: NDArray[np.int32], first: int, last: int,
    page_rows: Floats, weights: Floats, low_query: Floats, low_bias: Floats,
    tops: Floats, totals: Floats, exact_sum: Floats, low_sum: Floats, has_low: Flags,
    page_tops: Floats, page_totals: Floats, kept: Floats,
) -> None:  # fmt: skip
    """Pages `[first, last)` of one row and KV head, for its `group` query heads; `has_low` is `[1]`."""
    query, packed, state, kept = borrowed(query), borrowed(packed), borrowed(state), borrowed(kept)
    page_rows, weights = borrowed(page_rows), borrowed(weights)
    low_query, low_bias = borrowed(low_query), borrowed(low_bias)
    exact_sum, low_sum = borrowed(exact_sum), borrowed(low_sum)
    group, dim = query.shape
    page_tokens, width = page_rows.shape[1], weights.shape[1]
    keys_at = (layer * 2 * kv_heads + head) * page_tokens * dim
    values_at = keys_at + kv_heads * page_tokens * dim
    no_bias = np.zeros(group, np.float32)
    low_ready = False
    tops[:] = LOWEST
    totals[:] = ZERO
    exact_sum[:] = ZERO
    low_sum[:] = ZERO
    for start in range(first, last, width // page_tokens):
        stop = min(last, start + width // page_tokens)
        for page in range(start, stop):
            count, at = counts[page], (page - start) * page_tokens
            if kinds[page] == EXACT:
                word = offsets[page] // words.itemsize
                exact_logits(words, word + keys_at, is_bfloat16, count, query, weights, at, width)
                prefetch(words, word + values_at, count * dim)
            elif kinds[page] == MIDDLE:
                for g in range(0, group, FUSED_GROUP):
                    end = min(group, g + FUSED_GROUP)
                    page_logits(
                        middle.code, middle.data[offsets[page] :], middle.layer, head, middle.num_layers, kv_heads,
                        page_tokens, dim, count, state, query[g:end], no_bias[g:end], page_rows[g:end],
                    )  # fmt: skip
                copy_rows(page_rows, 0, weights, at, count)
            else:
                for g in range(0, group, FUSED_GROUP):
                    end = min(group, g + FUSED_GROUP)
                    if not low_ready:
                        prepare_query(
                            code, query[g:end], layer, head, num_layers, kv_heads, page_tokens, dim, state,
                            low_query[g:end], low_bias[g:end],
                        )  # fmt: skip
                    page_logits(
                        code, packed[offsets[page] :], layer, head, num_layers, kv_heads, page_tokens, dim, count,
                        state, low_query[g:end], low_bias[g:end], page_rows[g:end],
                    )  # fmt: skip
                low_ready = True
                copy_rows(page_rows, 0, weights, at, count)
            fill_absent(weights, at, count, page_tokens)
        for g in range(group):
            row = weights[g, : (stop - start) * page_tokens]
            top = scale_and_top(row, row.shape[0], scale)
            if top > tops[g]:
                shrink = exp_negative(tops[g] - top)
                tops[g] = top
                totals[g] *= shrink
                scale_row(exact_sum[g], shrink)
                scale_row(low_sum[g], shrink)
            weigh(row, tops[g])
        for page in range(start, stop):
            at = (page - start) * page_tokens
            weights[:, at + counts[page] : at + page_tokens] = ZERO
        for g in range(group):
            totals[g] += total_of(weights[g, : (stop - start) * page_tokens])
        for page in range(start, stop):
            count, at = counts[page], (page - start) * page_tokens
            if page_tops.shape[0] > 0:
                for g in range(group):
                    page_tops[page, head * group + g] = tops[g]
                    page_totals[page, head * group + g] = total_of(weights[g, at : at + page_tokens])
            if kept.shape[0] > 0:
                copy_rows(weights, at, kept[page, head * group : (head + 1) * group], 0, page_tokens)
            if kinds[page] == EXACT:
                word = offsets[page] // words.itemsize
                exact_values(words, word + values_at, is_bfloat16, count, weights, at, width, exact_sum)
                if page + stop - start < last and kinds[page + stop - start] == EXACT:
                    ahead = offsets[page + stop - start] // words.itemsize
                    prefetch(words, ahead + keys_at, count * dim)
                continue
            copy_rows(weights, at, page_rows, 0, page_tokens)
            for g in range(0, group, FUSED_GROUP):
                end = min(group, g + FUSED_GROUP)
                if kinds[page] == MIDDLE:
                    page_values(
                        middle.code, middle.data[offsets[page] :], middle.layer, head, middle.num_layers, kv_heads,
                        page_tokens, dim, count, state, page_rows[g:end], exact_sum[g:end],
                    )  # fmt: skip
                else:
                    page_values(
                        code, packed[offsets[page] :], layer, head, num_layers, kv_heads, page_tokens, dim, count,
                        state, page_rows[g:end], low_sum[g:end],
                    )  # fmt: skip
    has_low[0] = low_ready


@kernel(fastmath=True)
def attend_lane(
    lane: np.int64, piece: int,
    query: Floats, words: Words, packed: Bytes, is_bfloat16: bool, code: int, state: Floats,
    middle: Middle, layer: int, num_layers: int, kv_heads: int, scale: Scale,
    offsets: NDArray[np.int64], kinds: NDArray[np.int8], counts: NDArray[np.int32], row_starts: NDArray[np.int64],
    page_rows: Floats, weights: Floats, low_query: Floats, low_bias: Floats,
    tops: Floats, totals: Floats, exact_sums: Floats, low_sums: Floats, has_low: Flags,
    page_tops: Floats, page_totals: Floats, kept: Floats,
) -> None:  # fmt: skip
    """The units `[lane * piece, (lane + 1) * piece)` of the line, one segment after the other."""
    rows, q_heads, _ = query.shape
    group = q_heads // kv_heads
    unit, end, row = int(lane * piece), int(row_starts[rows] * kv_heads), 0
    stop = min(end, unit + piece)
    while unit < stop:
        while row_starts[row + 1] * kv_heads <= unit:
            row += 1
        pages = row_starts[row + 1] - row_starts[row]
        within = unit - row_starts[row] * kv_heads
        head = within // pages
        first = row_starts[row] + within % pages
        last = min(row_starts[row + 1], first + stop - unit)
        i = row * kv_heads + head + lane
        attend_segment(
            query[row, head * group : (head + 1) * group], words, packed, is_bfloat16, code, state, middle,
            layer, num_layers, kv_heads, head, scale, offsets, kinds, counts, first, last,
            page_rows[lane], weights[lane], low_query[lane], low_bias[lane],
            tops[i], totals[i], exact_sums[i], low_sums[i], has_low[i : i + 1], page_tops, page_totals, kept,
        )  # fmt: skip
        unit += last - first


@kernel(fastmath=True)
def merge_segments(
    first: int, last: int, code: int, state: Floats, layer: int, num_layers: int, kv_heads: int, head: int,
    page_tokens: int,
    tops: Floats, totals: Floats, exact_sums: Floats, low_sums: Floats, has_low: Flags,
    out: Floats, log_sum_exp: Floats,
) -> None:  # fmt: skip
    """Segments `[first, last)`, all of one pair, into `out` `[group, head_dim]` and `log_sum_exp` `[group]`.

    Low-bit sums are gathered in the first segment that has one.
    """
    group, dim = out.shape
    low_at = -1
    for i in range(last - 1, first - 1, -1):
        low_at = i if has_low[i] else low_at
    for g in range(group):
        top = MINUS_INFINITY
        for i in range(first, last):
            top = tops[i, g] if tops[i, g] > top else top
        total = ZERO
        for i in range(first, last):
            total += exp_negative(tops[i, g] - top) * totals[i, g]
        log_sum_exp[g] = top + np.float32(math.log(total))
        row = out[g]
        row[:] = ZERO
        for i in range(first, last):
            share = exp_negative(tops[i, g] - top) / total
            part = exact_sums[i, g]
            for d in range(dim):
                row[d] += share * part[d]
            if has_low[i]:
                scale_row(low_sums[i, g], share)
                if i > low_at:
                    low_sums[low_at, g] += low_sums[i, g]
    if low_at >= 0:
        for g in range(0, group, FUSED_GROUP):
            end = min(group, g + FUSED_GROUP)
            finish_values(
                code, low_sums[low_at, g:end], layer, head, num_layers, kv_heads, page_tokens, dim, state, out[g:end]
            )  # fmt: skip


@kernel(fastmath=True)
def join_sinks(sinks: Floats, out: Floats, log_sum_exp: Floats) -> None:
    """Logits `[group]` of which none gives a value take their share of `out` `[group, head_dim]`."""
    for g in range(sinks.shape[0]):
        top = max(log_sum_exp[g], sinks[g])
        mine = exp_negative(log_sum_exp[g] - top)
        total = mine + exp_negative(sinks[g] - top)
        log_sum_exp[g] = top + np.float32(math.log(total))
        scale_row(out[g], mine / total)


@kernel()
def finish_pair(
    pair: int, piece: int, code: int, state: Floats, layer: int, num_layers: int, kv_heads: int, page_tokens: int,
    row_starts: NDArray[np.int64], sinks: Floats,
    tops: Floats, totals: Floats, exact_sums: Floats, low_sums: Floats, has_low: Flags,
    out: Floats, log_sum_exp: Floats,
) -> None:  # fmt: skip
    """Output of one row and KV head from its segments and sink; zeros and -inf for a row without either."""
    group = out.shape[1] // kv_heads
    row, head = pair // kv_heads, pair % kv_heads
    to = out[row, head * group : (head + 1) * group]
    to_log = log_sum_exp[row, head * group : (head + 1) * group]
    pages = row_starts[row + 1] - row_starts[row]
    if pages == 0:
        to[:] = ZERO
        to_log[:] = MINUS_INFINITY
    else:
        unit = row_starts[row] * kv_heads + head * pages
        merge_segments(
            pair + unit // piece, pair + (unit + pages - 1) // piece + 1,
            code, state, layer, num_layers, kv_heads, head, page_tokens,
            tops, totals, exact_sums, low_sums, has_low, to, to_log,
        )  # fmt: skip
    if sinks.shape[0] > 0:
        join_sinks(sinks[head * group : (head + 1) * group], to, to_log)


@kernel(parallel=True)
def decode(
    query: Floats, words: Words, packed: Bytes, is_bfloat16: bool, code: int, state: Floats,
    middle: Middle, layer: int, num_layers: int, kv_heads: int, scale: Scale,
    offsets: NDArray[np.int64], kinds: NDArray[np.int8], counts: NDArray[np.int32], row_starts: NDArray[np.int64],
    sinks: Floats, page_rows: Floats, weights: Floats, low_query: Floats, low_bias: Floats,
    tops: Floats, totals: Floats, exact_sums: Floats, low_sums: Floats, has_low: Flags,
    page_tops: Floats, page_totals: Floats, kept: Floats,
    out: Floats, log_sum_exp: Floats,
) -> None:  # fmt: skip
    """The whole batch; `log_sum_exp` `[rows, q_heads]`, `sinks` `[q_heads]` or empty, as many lanes as `page_rows`."""
    rows, q_heads, dim = query.shape
    lanes, page_tokens = page_rows.shape[0], page_rows.shape[2]
    units = row_starts[rows] * kv_heads
    if units * (q_heads // kv_heads) * dim < SHARED_WORK:
        lanes = 1
    piece = max(1, (units + lanes - 1) // lanes)
    if lanes == 1:
        attend_lane(
            np.int64(0), piece, query, words, packed, is_bfloat16, code, state, middle,
            layer, num_layers, kv_heads, scale,
            offsets, kinds, counts, row_starts, page_rows, weights, low_query, low_bias,
            tops, totals, exact_sums, low_sums, has_low, page_tops, page_totals, kept,
        )  # fmt: skip
    else:
        for lane in prange(lanes):
            attend_lane(
                np.int64(lane), piece, query, words, packed, is_bfloat16, code, state, middle,
                layer, num_layers, kv_heads, scale,
                offsets, kinds, counts, row_starts, page_rows, weights, low_query, low_bias,
                tops, totals, exact_sums, low_sums, has_low, page_tops, page_totals, kept,
            )  # fmt: skip
    # Not worth a second barrier for a few rows: a merge takes microseconds.
    for pair in range(rows * kv_heads):
        finish_pair(
            pair, piece, code, state, layer, num_layers, kv_heads, page_tokens, row_starts, sinks,
            tops, totals, exact_sums, low_sums, has_low, out, log_sum_exp,
        )  # fmt: skip
