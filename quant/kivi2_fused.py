"""kivi2 attended in place: products with packed keys and values of one KV head. Format: `kivi2.py`.

`q . k = sum(q * zero) + sum(q * scale * code)`: scales go into the factors and zeros into one number a query, so
that only small integers are unpacked. Values the same, with the weights of a page's tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.numba_setup import kernel
from tierkv.quant.blocks import BLOCK
from tierkv.quant.dynamic_map import DYNAMIC_MAP
from tierkv.quant.floats import load_float
from tierkv.quant.kivi2_kernels import CHANNELS, block_offset, group_count, header_offset, stored_float
from tierkv.quant.tiles import LANES, TERMS, add_rows, stack_bytes, stack_floats, unpack_integers

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_ZERO = np.float32(0)


@kernel(fastmath=True)
def page_logits(
    page: Bytes, layer: int, head: int, num_layers: int, num_heads: int, page_tokens: int, head_dim: int,
    count: int, query: Floats, bias: Floats, out: Floats,
) -> None:  # fmt: skip
    """`out[:, :count]` = unscaled products of the queries with the page's keys."""
    block = block_offset(layer, 0, head, num_layers, num_heads, page_tokens, head_dim)
    scale_header = header_offset(0, num_layers, num_heads, page_tokens, head_dim)
    zero_header = header_offset(1, num_layers, num_heads, page_tokens, head_dim)
    codes = block + 2 * head_dim
    place = (layer * num_heads + head) * head_dim
    tile, sums, padded = stack_floats(128), stack_floats(256), stack_bytes(32)
    factors, offsets = stack_floats(128), stack_floats(16)
    scales, zeros = stack_floats(8), stack_floats(8)
    groups = query.shape[0]
    for first in range(0, count, LANES):
        lanes = min(LANES, page_tokens - first)
        sums[: groups * LANES] = _ZERO
        offsets[:groups] = bias
        for octet in range(head_dim // TERMS):
            # BLOCK is a multiple of 8 and so is every start: the eight channels share one block.
            shared = 4 * ((place + TERMS * octet) // BLOCK)
            largest_scale = load_float(page, scale_header + shared)
            largest_zero = load_float(page, zero_header + shared)
            for term in range(TERMS):
                channel = TERMS * octet + term
                scales[term] = DYNAMIC_MAP[page[block + channel]] * largest_scale
                zeros[term] = DYNAMIC_MAP[page[block + head_dim + channel]] * largest_zero
            for g in range(groups):
                offset = offsets[g]
                for term in range(TERMS):
                    factors[g * TERMS + term] = query[g, TERMS * octet + term] * scales[term]
                    offset += query[g, TERMS * octet + term] * zeros[term]
                offsets[g] = offset
            low = codes + 2 * octet * page_tokens + first
            if lanes == LANES:
                unpack_integers(page, low, tile, 0, 1)
                unpack_integers(page, low + page_tokens, tile, 4, 1)
            else:
                for lane in range(lanes):
                    padded[lane] = page[low + lane]
                    padded[LANES + lane] = page[low + page_tokens + lane]
                unpack_integers(padded, 0, tile, 0, 1)
                unpack_integers(padded, LANES, tile, 4, 1)
            for g in range(groups):
                add_rows(tile, 0, factors, g * TERMS, sums, g * LANES)
        for g in range(groups):
            for token in range(first, min(first + LANES, count)):
                out[g, token] = offsets[g] + sums[g * LANES + token - first]


@kernel(fastmath=True)
def page_values(
    page: Bytes, layer: int, head: int, num_layers: int, num_heads: int, page_tokens: int, head_dim: int,
    count: int, weights: Floats, acc: Floats,
) -> None:  # fmt: skip
    """`acc += weights[:, :count] @ values`."""
    block = block_offset(layer, 1, head, num_layers, num_heads, page_tokens, head_dim)
    scale_header = header_offset(2, num_layers, num_heads, page_tokens, head_dim)
    zero_header = header_offset(3, num_layers, num_heads, page_tokens, head_dim)
    spans = group_count(head_dim)
    zeros = block + page_tokens * spans
    codes = zeros + page_tokens * spans
    place = (layer * num_heads + head) * page_tokens * spans
    tile, factors, offsets = stack_floats(128), stack_floats(128), stack_floats(16)
    groups = acc.shape[0]
    for span in range(spans):
        offsets[:groups] = _ZERO
        start = span * CHANNELS
        stop = min(head_dim, start + CHANNELS)
        for token in range(0, count, TERMS):
            terms = min(TERMS, count - token)
            if terms < TERMS:
                factors[:] = _ZERO
            if terms <= 4:
                tile[:] = _ZERO
            for term in range(terms):
                group = (token + term) * spans + span
                scale = stored_float(page, scale_header, place + group, page[block + group])
                zero = stored_float(page, zero_header, place + group, page[zeros + group])
                for g in range(groups):
                    factors[g * TERMS + term] = weights[g, token + term] * scale
                    offsets[g] += weights[g, token + term] * zero
            for channel in range(start, stop, LANES):
                row = codes + token // 4 * head_dim + channel
                unpack_integers(page, row, tile, 0, 1)
                if terms > 4:
                    unpack_integers(page, row + head_dim, tile, 4, 1)
                for g in range(groups):
                    add_rows(tile, 0, factors, g * TERMS, acc, g * head_dim + channel)
        for g in range(groups):
            for channel in range(start, stop):
                acc[g, channel] += offsets[g]
