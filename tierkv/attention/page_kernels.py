"""Writing tokens into exact pages, and reading pages of one layer back as dense float32 blocks for prefill."""

from __future__ import annotations

import numpy as np
from numba import prange
from numpy.typing import NDArray

from tierkv.attention.layer_view import Middle
from tierkv.attention.online_softmax import ONE, ZERO, Floats, Words, widen_into
from tierkv.numba_setup import kernel
from tierkv.quant.floats import narrow_bfloat16, narrow_float16
from tierkv.quant.fused import finish_values, page_logits, page_values, prepare_query
from tierkv.table import Kind

Bytes = NDArray[np.uint8]

EXACT = int(Kind.EXACT)
MIDDLE = int(Kind.MIDDLE)
FUSED_GROUP = 16
"""Query heads that the codecs' fused kernels take at once."""


@kernel()
def store_words(
    words: Words, layer: int, page_tokens: int, offsets: NDArray[np.int64], slots: NDArray[np.int32],
    keys: Words, values: Words,
) -> None:  # fmt: skip
    """Copy K/V `[n, kv_heads, head_dim]` that already are page words into their slots."""
    n, kv_heads, dim = keys.shape
    for i in range(n):
        page = offsets[i] // words.itemsize
        for head in range(kv_heads):
            at = page + ((layer * 2 * kv_heads + head) * page_tokens + slots[i]) * dim
            words[at : at + dim] = keys[i, head]
            at += kv_heads * page_tokens * dim
            words[at : at + dim] = values[i, head]


@kernel()
def narrow_row(row: Floats, is_bfloat16: bool, out: Words) -> None:
    """Page words of `row` `[n]`, rounded to nearest even."""
    if is_bfloat16:
        for d in range(row.shape[0]):
            out[d] = narrow_bfloat16(row[d])
    else:
        for d in range(row.shape[0]):
            out[d] = narrow_float16(row[d])


@kernel()
def store_narrowed(
    words: Words, is_bfloat16: bool, layer: int, page_tokens: int,
    offsets: NDArray[np.int64], slots: NDArray[np.int32], keys: Floats, values: Floats,
) -> None:  # fmt: skip
    """Round float32 K/V `[n, kv_heads, head_dim]` to the pages' half type and store them."""
    n, kv_heads, dim = keys.shape
    for i in range(n):
        page = offsets[i] // words.itemsize
        for head in range(kv_heads):
            at = page + ((layer * 2 * kv_heads + head) * page_tokens + slots[i]) * dim
            narrow_row(keys[i, head], is_bfloat16, words[at : at + dim])
            at += kv_heads * page_tokens * dim
            narrow_row(values[i, head], is_bfloat16, words[at : at + dim])


@kernel()
def unit_rows(rows: int, columns: int, first: int) -> Floats:
    """Rows `first ..` of an identity matrix: `[rows, columns]`."""
    units = np.zeros((rows, columns), np.float32)
    for i in range(rows):
        units[i, first + i] = ONE
    return units


@kernel(inline=True)
def read_head(
    words: Words, packed: Bytes, is_bfloat16: bool, code: int, state: Floats,
    middle: Middle, layer: int, num_layers: int, kv_heads: int, head: int, page_tokens: int,
    offsets: NDArray[np.int64], kinds: NDArray[np.int8], counts: NDArray[np.int32], places: NDArray[np.int64],
    first: int, last: int, keys: Floats, values: Floats,
) -> None:  # fmt: skip
    """Pages `[first, last)` of one KV head into `keys`, `values` `[tokens, head_dim]`; page `p` goes to `places[p]`.

    A packed page is read with the codec's fused kernels: its keys are their products with the unit vectors, its values
    their sums with unit weights.
    """
    dim = keys.shape[1]
    keys_at = (layer * 2 * kv_heads + head) * page_tokens * dim
    values_at = keys_at + kv_heads * page_tokens * dim
    unit_query = np.empty((dim, dim), np.float32)
    unit_bias = np.empty(dim, np.float32)
    no_bias = np.zeros(FUSED_GROUP, np.float32)
    products = np.empty((FUSED_GROUP, page_tokens), np.float32)
    sums = np.empty((FUSED_GROUP, dim), np.float32)
    ready = False
    for page in range(first, last):
        count = counts[page]
        to = places[page]
        if kinds[page] == EXACT:
            start = offsets[page] // words.itemsize
            flat_keys = keys[to : to + count].reshape(count * dim)
            flat_values = values[to : to + count].reshape(count * dim)
            widen_into(words[start + keys_at : start + keys_at + count * dim], is_bfloat16, flat_keys)
            widen_into(words[start + values_at : start + values_at + count * dim], is_bfloat16, flat_values)
            continue
        is_middle = kinds[page] == MIDDLE
        low = (middle.data if is_middle else packed)[offsets[page] :]
        form, at, of = (
            (middle.code, middle.layer, middle.num_layers) if is_middle else (code, layer, num_layers)
        )
        for d in range(0, dim, FUSED_GROUP):
            end = min(dim, d + FUSED_GROUP)
            units = unit_rows(end - d, dim, d)
            if not (ready or is_middle):
                prepare_query(
                    code, units, layer, head, num_layers, kv_heads, page_tokens, dim, state,
                    unit_query[d:end], unit_bias[d:end],
                )  # fmt: skip
            page_logits(
                form, low, at, head, of, kv_heads, page_tokens, dim, count, state,
                units if is_middle else unit_query[d:end], no_bias[: end - d] if is_middle else unit_bias[d:end],
                products,
            )  # fmt: skip
            for t in range(count):
                for j in range(end - d):
                    keys[to + t, d + j] = products[j, t]
        ready = ready or not is_middle
        for t in range(0, count, FUSED_GROUP):
            end = min(count, t + FUSED_GROUP)
            sums[:] = ZERO
            values[to + t : to + end] = ZERO
            page_values(
                form, low, at, head, of, kv_heads, page_tokens, dim, count,
                state, unit_rows(end - t, page_tokens, t), sums[: end - t],
            )  # fmt: skip
            finish_values(
                form, sums[: end - t], at, head, of, kv_heads, page_tokens, dim, state,
                values[to + t : to + end],
            )  # fmt: skip


@kernel()
def read_lane(
    lane: np.int64, piece: int,
    words: Words, packed: Bytes, is_bfloat16: bool, code: int, state: Floats,
    middle: Middle, layer: int, num_layers: int, kv_heads: int, page_tokens: int,
    offsets: NDArray[np.int64], kinds: NDArray[np.int8], counts: NDArray[np.int32], places: NDArray[np.int64],
    keys: Floats, values: Floats,
) -> None:  # fmt: skip
    """The pages `[lane * piece, (lane + 1) * piece)`, all heads."""
    first = int(lane * piece)
    last = min(offsets.shape[0], first + piece)
    for head in range(kv_heads):
        read_head(
            words, packed, is_bfloat16, code, state, middle,
            layer, num_layers, kv_heads, head, page_tokens,
            offsets, kinds, counts, places, first, last, keys[head], values[head],
        )  # fmt: skip


@kernel(parallel=True)
def read_block(
    words: Words, packed: Bytes, is_bfloat16: bool, code: int, state: Floats,
    middle: Middle, layer: int, num_layers: int, kv_heads: int, page_tokens: int,
    offsets: NDArray[np.int64], kinds: NDArray[np.int8], counts: NDArray[np.int32], places: NDArray[np.int64],
    lanes: int, keys: Floats, values: Floats,
) -> None:  # fmt: skip
    """All given pages into dense `keys`, `values` `[kv_heads, tokens, head_dim]`, one layer."""
    piece = (offsets.shape[0] + lanes - 1) // lanes
    for lane in prange(lanes):
        # A prange index is unsigned, and a second compilation of everything below it would follow from that.
        read_lane(
            np.int64(lane), piece, words, packed, is_bfloat16, code, state, middle,
            layer, num_layers, kv_heads, page_tokens,
            offsets, kinds, counts, places, keys, values,
        )  # fmt: skip
