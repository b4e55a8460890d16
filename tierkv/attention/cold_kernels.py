"""Cold pages in host memory: attended in place by the KV heads that chose them, or, for an audit, their logits alone.

The chosen pages of all (row, KV head) pairs form one line of units, cut into one equal piece a core and attended
segment by segment as in `decode_kernels` (arrays of those names are the same things); pair `i` has the units
`pair_starts[i]:pair_starts[i + 1]`, and `offsets`, `kinds` and `counts` are those of the line's units.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange
from numpy.typing import NDArray

from tierkv.attention.contract import Scale
from tierkv.attention.decode_kernels import EXACT, FUSED_GROUP, MIDDLE, attend_segment, merge_segments
from tierkv.attention.exact_rows import exact_logits
from tierkv.attention.layer_view import Middle
from tierkv.attention.mass_kernels import add_weights
from tierkv.attention.online_softmax import (
    LOWEST,
    MINUS_INFINITY,
    ZERO,
    Floats,
    Words,
    exp_negative,
    scale_and_top,
)
from tierkv.numba_setup import SHARED_WORK, kernel
from tierkv.quant.fused import page_logits, prepare_query

Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]


@kernel(fastmath=True)
def read_lane(
    lane: np.int64, piece: int,
    query: Floats, words: Words, packed: Bytes, is_bfloat16: bool, code: int, state: Floats,
    middle: Middle, layer: int, num_layers: int, kv_heads: int, scale: Scale,
    offsets: NDArray[np.int64], kinds: NDArray[np.int8], counts: NDArray[np.int32], pair_starts: NDArray[np.int64],
    page_rows: Floats, weights: Floats, low_query: Floats, low_bias: Floats,
    tops: Floats, totals: Floats, exact_sums: Floats, low_sums: Floats, has_low: Flags,
    page_tops: Floats, page_totals: Floats, kept: Floats,
) -> None:  # fmt: skip
    """The units `[lane * piece, (lane + 1) * piece)`."""
    group = query.shape[1] // kv_heads
    pairs = pair_starts.shape[0] - 1
    unit, pair = int(lane * piece), 0
    stop = min(int(pair_starts[pairs]), unit + piece)
    while unit < stop:
        while pair_starts[pair + 1] <= unit:
            pair += 1
        row, head = pair // kv_heads, pair % kv_heads
        last = min(int(pair_starts[pair + 1]), stop)
        i = pair + lane
        attend_segment(
            query[row, head * group : (head + 1) * group], words, packed, is_bfloat16, code, state, middle,
            layer, num_layers, kv_heads, head, scale, offsets, kinds, counts, unit, last,
            page_rows[lane], weights[lane], low_query[lane], low_bias[lane],
            tops[i], totals[i], exact_sums[i], low_sums[i], has_low[i : i + 1], page_tops, page_totals, kept,
        )  # fmt: skip
        unit = last


@kernel()
def join(out: Floats, log_sum_exp: Floats, part: Floats, part_log: Floats) -> None:
    """Merge attention over other tokens, `part` `[group, head_dim]` and `part_log`, into `out` and `log_sum_exp`."""
    for g in range(out.shape[0]):
        top = max(log_sum_exp[g], part_log[g])
        mine, theirs = exp_negative(log_sum_exp[g] - top), exp_negative(part_log[g] - top)
        total = mine + theirs
        log_sum_exp[g] = top + np.float32(math.log(total))
        mine /= total
        theirs /= total
        for d in range(out.shape[1]):
            out[g, d] = mine * out[g, d] + theirs * part[g, d]


@kernel(parallel=True)
def read_in_place(
    query: Floats, words: Words, packed: Bytes, is_bfloat16: bool, code: int, state: Floats,
    middle: Middle, layer: int, num_layers: int, kv_heads: int, scale: Scale,
    cold_offsets: NDArray[np.int64], cold_kinds: NDArray[np.int8], cold_counts: NDArray[np.int32],
    chosen: NDArray[np.int64], pair_starts: NDArray[np.int64],
    page_rows: Floats, weights: Floats, low_query: Floats, low_bias: Floats,
    tops: Floats, totals: Floats, exact_sums: Floats, low_sums: Floats, has_low: Flags,
    page_tops: Floats, page_totals: Floats, kept: Floats, part: Floats, part_log: Floats,
    out: Floats, log_sum_exp: Floats,
) -> None:  # fmt: skip
    """Every pair's own pages, merged into `out` and `log_sum_exp`; `part`, `part_log` (`[group, ..]`) are scratch.

    `words` and `packed` are the host pool, `chosen` `[units]` the pages read among all cold ones. `page_tops`,
    `page_totals` and `kept` have a row for each unit, or none.
    """
    lanes, pairs = page_rows.shape[0], pair_starts.shape[0] - 1
    group, page_tokens = query.shape[1] // kv_heads, page_rows.shape[2]
    offsets, kinds, counts = cold_offsets[chosen], cold_kinds[chosen], cold_counts[chosen]
    if chosen.shape[0] * group * query.shape[2] < SHARED_WORK:
        lanes = 1
    piece = max(1, (chosen.shape[0] + lanes - 1) // lanes)
    if lanes == 1:
        read_lane(
            np.int64(0), piece, query, words, packed, is_bfloat16, code, state, middle,
            layer, num_layers, kv_heads, scale,
            offsets, kinds, counts, pair_starts, page_rows, weights, low_query, low_bias,
            tops, totals, exact_sums, low_sums, has_low, page_tops, page_totals, kept,
        )  # fmt: skip
    else:
        for lane in prange(lanes):
            read_lane(
                np.int64(lane), piece, query, words, packed, is_bfloat16, code, state, middle,
                layer, num_layers, kv_heads, scale,
                offsets, kinds, counts, pair_starts, page_rows, weights, low_query, low_bias,
                tops, totals, exact_sums, low_sums, has_low, page_tops, page_totals, kept,
            )  # fmt: skip
    for pair in range(pairs):
        first, last = int(pair_starts[pair]), int(pair_starts[pair + 1])
        if first == last:
            continue
        row, head = pair // kv_heads, pair % kv_heads
        merge_segments(
            pair + first // piece, pair + (last - 1) // piece + 1,
            code, state, layer, num_layers, kv_heads, head, page_tokens,
            tops, totals, exact_sums, low_sums, has_low, part, part_log,
        )  # fmt: skip
        mine = slice(head * group, (head + 1) * group)
        join(out[row, mine], log_sum_exp[row, mine], part, part_log)


@kernel(fastmath=True)
def add_read_mass(
    page_tops: Floats, kept: Floats, pages: NDArray[np.int64], counts: NDArray[np.int32],
    pair_starts: NDArray[np.int64], token_starts: NDArray[np.int64], kv_heads: int, log_sum_exp: Floats,
    token_mass: Floats,
) -> None:  # fmt: skip
    """Add the mass of the tokens read in place; `pages` are the units' pages, the rest is of all cold pages."""
    q_heads = log_sum_exp.shape[1]
    group = q_heads // kv_heads
    for pair in range(pair_starts.shape[0] - 1):
        row, head = pair // kv_heads, pair % kv_heads
        mine = slice(head * group, (head + 1) * group)
        for unit in range(pair_starts[pair], pair_starts[pair + 1]):
            start, count = token_starts[pages[unit]], counts[pages[unit]]
            add_weights(
                kept[unit, mine], page_tops[unit, mine], log_sum_exp[row, mine], q_heads,
                token_mass[start : start + count],
            )  # fmt: skip


@kernel(fastmath=True)
def audit_lane(
    lane: np.int64, piece: int,
    query: Floats, words: Words, packed: Bytes, is_bfloat16: bool, code: int, state: Floats,
    middle: Middle, layer: int, num_layers: int, kv_heads: int, scale: Scale,
    offsets: NDArray[np.int64], kinds: NDArray[np.int8], counts: NDArray[np.int32], row_starts: NDArray[np.int64],
    weights: Floats, low_query: Floats, low_bias: Floats, page_logs: Floats,
) -> None:  # fmt: skip
    """`page_logs` of the pages `[lane * piece, (lane + 1) * piece)`, KV head by KV head."""
    group, dim = query.shape[1] // kv_heads, query.shape[2]
    page_tokens = weights.shape[1]
    no_bias = np.zeros(group, np.float32)
    for head in range(kv_heads):
        keys_at = (layer * 2 * kv_heads + head) * page_tokens * dim
        row, ready = 0, -1
        for page in range(lane * piece, min(offsets.shape[0], (lane + 1) * piece)):
            while row_starts[row + 1] <= page:
                row += 1
            asked = query[row, head * group : (head + 1) * group]
            count = counts[page]
            if kinds[page] == EXACT:
                start = offsets[page] // words.itemsize + keys_at
                exact_logits(words, start, is_bfloat16, count, asked, weights, 0, page_tokens)
            elif kinds[page] == MIDDLE:
                for g in range(0, group, FUSED_GROUP):
                    end = min(group, g + FUSED_GROUP)
                    page_logits(
                        middle.code, middle.data[offsets[page] :], middle.layer, head, middle.num_layers, kv_heads,
                        page_tokens, dim, count, state, asked[g:end], no_bias[g:end], weights[g:end],
                    )  # fmt: skip
            else:
                for g in range(0, group, FUSED_GROUP):
                    end = min(group, g + FUSED_GROUP)
                    if ready != row:
                        prepare_query(
                            code, asked[g:end], layer, head, num_layers, kv_heads, page_tokens, dim, state,
                            low_query[g:end], low_bias[g:end],
                        )  # fmt: skip
                    page_logits(
                        code, packed[offsets[page] :], layer, head, num_layers, kv_heads, page_tokens, dim, count,
                        state, low_query[g:end], low_bias[g:end], weights[g:end],
                    )  # fmt: skip
                ready = row
            for g in range(group):
                top = max(scale_and_top(weights[g], count, scale), LOWEST)
                total = ZERO
                for t in range(count):
                    total += exp_negative(weights[g, t] - top)
                page_logs[page, head * group + g] = top + np.float32(math.log(total))


@kernel()
def audit_row(
    page_logs: Floats, hbm_log: Floats, attended_log: Floats, true: Floats, attended: Floats, row: int
) -> None:
    """Add one row's true shares; `true` `[pages of the row]` or empty, `attended` `[rows]` or empty."""
    pages, q_heads = page_logs.shape
    share = 1.0 / q_heads
    mean = 0.0
    for h in range(q_heads):
        top = hbm_log[h]
        for p in range(pages):
            top = max(top, page_logs[p, h])
        if top == MINUS_INFINITY:  # nothing here and nothing cold: nothing was missed
            mean += share
            continue
        total = math.exp(np.float64(hbm_log[h] - top))
        for p in range(pages):
            total += math.exp(np.float64(page_logs[p, h] - top))
        mean += share * math.exp(np.float64(attended_log[h] - top)) / total
        if true.shape[0] > 0:
            for p in range(pages):
                true[p] += np.float32(share * math.exp(np.float64(page_logs[p, h] - top)) / total)
    if attended.shape[0] > 0:
        attended[row] += np.float32(mean)


@kernel(parallel=True)
def audit_pages(
    query: Floats, words: Words, packed: Bytes, is_bfloat16: bool, code: int, state: Floats,
    middle: Middle, layer: int, num_layers: int, kv_heads: int, scale: Scale,
    offsets: NDArray[np.int64], kinds: NDArray[np.int8], counts: NDArray[np.int32], row_starts: NDArray[np.int64],
    page_rows: Floats, low_query: Floats, low_bias: Floats, page_logs: Floats,
    hbm_log: Floats, attended_log: Floats, true: Floats, attended: Floats,
) -> None:  # fmt: skip
    """Logits of ALL cold pages from the host pool, and from each page's log-sum-exp the shares of `ColdSeen`.

    Args:
        page_logs: `[pages, q_heads]`, gets each page's log-sum-exp.
        hbm_log, attended_log: `[rows, q_heads]`, log-sum-exp of what lies in HBM, and of what was attended.
    """
    lanes = page_rows.shape[0]
    piece = (offsets.shape[0] + lanes - 1) // lanes
    for lane in prange(lanes):
        audit_lane(
            np.int64(lane), piece, query, words, packed, is_bfloat16, code, state, middle,
            layer, num_layers, kv_heads, scale,
            offsets, kinds, counts, row_starts, page_rows[lane], low_query[lane], low_bias[lane], page_logs,
        )  # fmt: skip
    for row in range(query.shape[0]):
        first, last = row_starts[row], row_starts[row + 1]
        audit_row(page_logs[first:last], hbm_log[row], attended_log[row], true[first:last], attended, row)
