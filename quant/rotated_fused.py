"""The rotated family attended in place: products with packed keys and values of one KV head. Format: `rotated.py`.

Queries and sums are `[G, head_dim]`, one row for each query head that shares the KV head. Fewer than 16 tokens (keys)
or channels (values) of a tile row are first copied to a padded buffer, so that one vector path serves all shapes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.numba_setup import kernel
from tierkv.quant.floats import load_float
from tierkv.quant.lloyd import GAINS
from tierkv.quant.rotated_layout import block_offset, key_octets, scale_offset
from tierkv.quant.rotation import apply_signs, hadamard
from tierkv.quant.tile_products import LIMIT, key_tile, ready_factors, ready_query, value_tile
from tierkv.quant.tiles import (
    LANES,
    TERMS,
    stack_bytes,
    stack_floats,
    unpack_levels_4,
)

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_ZERO = np.float32(0)


@kernel(fastmath=True)
def prepare_query(
    query: Floats, layer: int, head: int, num_heads: int, state: Floats, out_q: Floats, out_bias: Floats
) -> None:
    """`out_q` gets the rotated rows, as `key_tile` wants them; `out_bias` each row's product with the mean key, or 0
    while there is no state.
    """
    groups, head_dim = query.shape
    start = (layer * num_heads + head) * head_dim
    for g in range(groups):
        bias = _ZERO
        if state.shape[0] > 0:
            mean = state[start : start + head_dim]
            for channel in range(head_dim):
                bias += query[g, channel] * mean[channel]
        out_bias[g] = bias
        for channel in range(head_dim):
            out_q[g, channel] = query[g, channel]
        apply_signs(out_q[g])
        hadamard(out_q[g])
        ready_query(out_q[g])


@kernel()
def load_gains(page: Bytes, start: int, top: np.float32, tokens: int, gains: Floats) -> None:
    """Of the tokens whose gain codes begin at byte `start`; `top` is the largest."""
    for token in range(tokens):
        gains[token] = top * GAINS[page[start + token]]


@kernel(fastmath=True)
def page_logits(
    page: Bytes, layer: int, head: int, num_layers: int, num_heads: int, page_tokens: int, head_dim: int,
    key_bits: int, count: int, query: Floats, bias: Floats, out: Floats,
) -> None:  # fmt: skip
    """`out[:, :count]` = unscaled products of the prepared queries with the page's keys."""
    block = block_offset(layer, 0, head, num_layers, num_heads, page_tokens, head_dim, key_bits)
    top = load_float(page, scale_offset(layer, 0, head, num_heads))
    sums, gains, padded = stack_floats(256), stack_floats(16), stack_bytes(6144)
    groups = query.shape[0]  # `padded` holds MOST_CHANNELS / 8 octets of 48 bytes
    for first in range(0, count, LANES):
        lanes = min(LANES, page_tokens - first)
        low, signs = key_octets(block, page_tokens, head_dim, key_bits, first)
        if lanes == LANES:
            key_tile(key_bits, page, low, signs, page_tokens, query, sums)
        else:
            marks = (head_dim // 4) * LANES
            for row in range(head_dim // 4):
                for lane in range(lanes):
                    padded[row * LANES + lane] = page[low + row * page_tokens + lane]
            for row in range(head_dim // TERMS):
                for lane in range(lanes):
                    padded[marks + row * LANES + lane] = page[signs + row * page_tokens + lane]
            key_tile(key_bits, padded, 0, marks, LANES, query, sums)
        tokens = min(LANES, count - first)
        load_gains(page, block + first, top, tokens, gains)
        for g in range(groups):
            mine, added = out[g, first : first + tokens], sums[g * LANES : g * LANES + tokens]
            for token in range(tokens):
                mine[token] = bias[g] + gains[token] * added[token]


@kernel(fastmath=True)
def page_values(
    page: Bytes, layer: int, head: int, num_layers: int, num_heads: int, page_tokens: int, head_dim: int,
    key_bits: int, count: int, weights: Floats, acc: Floats,
) -> None:  # fmt: skip
    """`acc += weights[:, :count] @ values`, in rotated space."""
    block = block_offset(layer, 1, head, num_layers, num_heads, page_tokens, head_dim, key_bits)
    codes = block + page_tokens
    quarter = head_dim // 4
    top = load_float(page, scale_offset(layer, 1, head, num_heads))
    factors, gains, levels, padded = stack_floats(1024), stack_floats(64), stack_floats(64), stack_bytes(16)
    groups = acc.shape[0]
    for first in range(0, count, LIMIT):
        tokens = min(LIMIT, count - first)
        start = codes + first * quarter
        load_gains(page, block + first, top, tokens, gains)
        for g in range(groups):
            mine, given = factors[g * LIMIT : g * LIMIT + tokens], weights[g, first : first + tokens]
            for token in range(tokens):
                mine[token] = given[token] * gains[token]
        if quarter % LANES > 0:
            byte = quarter - quarter % LANES
            for token in range(tokens):
                for lane in range(quarter - byte):
                    padded[lane] = page[start + token * quarter + byte + lane]
                unpack_levels_4(padded, 0, levels, 0, 1)
                for g in range(groups):
                    factor = factors[g * LIMIT + token]
                    for part in range(4):
                        for lane in range(quarter - byte):
                            acc[g, part * quarter + byte + lane] += factor * levels[part * LANES + lane]
        ready_factors(factors, groups, tokens)
        for byte in range(0, quarter - quarter % LANES, LANES):
            value_tile(page, start, byte, tokens, factors, acc)


@kernel(fastmath=True)
def finish_values(acc: Floats, out: Floats) -> None:
    """`out` gets `acc` rotated back added; `acc` is used up."""
    for g in range(acc.shape[0]):
        hadamard(acc[g])
        apply_signs(acc[g])
        for channel in range(acc.shape[1]):
            out[g, channel] += acc[g, channel]
