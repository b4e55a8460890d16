"""klt2 in machine code: a page's exact words to packed bytes and back. Format: `klt.py`; in torch: `klt_reference.py`.

One pass: a block (a layer's keys or values of one head) goes through buffers that stay in the core's own cache, with 16
tokens at a time as the lanes of a vector (`columns.py`). Values are packed with 16 channels as lanes instead.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tierkv.numba_setup import kernel
from tierkv.quant.columns import add_squares, columns_to_rows, rows_to_columns
from tierkv.quant.floats import BFLOAT16, load_float, store_clamped, store_float
from tierkv.quant.klt_layout import (
    GROUP,
    MAX_BITS,
    analysis_start,
    bits_of_group,
    block_start,
    mean_start,
    plane_bytes,
    record_floats,
    record_start,
    spread_of_group,
    synthesis_start,
)
from tierkv.quant.klt_planes import (
    ROWS,
    fit_group,
    multiply,
    multiply_fused,
    pack_columns,
    pack_rows,
    unpack_rows,
)
from tierkv.quant.lloyd import GAINS, NO_GAIN
from tierkv.quant.rotated_encode import (
    INFINITY_BITS,
    LARGEST_F32,
    MAX_EXPONENT,
    gain_code,
    load_rows,
    power_of_two,
)
from tierkv.quant.rotated_layout import scale_offset
from tierkv.quant.tiles import LANES, TERMS

Words = NDArray[np.uint16] | NDArray[np.uint32]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_ZERO, _ONE = np.float32(0), np.float32(1)


@kernel()
def live_channels(head_dim: int, state: Floats, record: int) -> int:
    """Channels up to the last one that has bits."""
    live = 0
    for group in range(head_dim // GROUP):
        if bits_of_group(state, record, group) > 0:
            live = (group + 1) * GROUP
    return live


@kernel()
def bytes_of_token(head_dim: int, state: Floats, record: int) -> int:
    """Of the planes of a token's values."""
    total = 0
    for group in range(head_dim // GROUP):
        total += 2 * bits_of_group(state, record, group)
    return total


@kernel()
def _analyse(columns: Floats, head_dim: int, state: Floats, record: int, u: Floats) -> None:
    """The channels that have bits, in the space of codes."""
    for row in range(0, head_dim, ROWS):
        if bits_of_group(state, record, row // GROUP) > 0:
            multiply(
                state, analysis_start(record, head_dim), head_dim, head_dim, record_floats(head_dim), columns, u, row
            )  # fmt: skip


@kernel()
def _fit_gains(
    u: Floats, head_dim: int, state: Floats, record: int, gains: Floats, along: Floats, energy: Floats
) -> None:
    """Least-squares gains of 16 tokens, from the codes that the root mean square of their coded channels gives."""
    energy[:] = _ZERO
    live = 0
    for group in range(head_dim // GROUP):
        if bits_of_group(state, record, group) > 0:
            live += GROUP
            for row in range(group * GROUP, (group + 1) * GROUP, TERMS):
                add_squares(u, row, energy)
    for lane in range(LANES):
        gains[lane] = np.float32(math.sqrt(energy[lane] / np.float32(live))) if live > 0 else _ZERO
    along[:] = _ZERO
    energy[:] = _ZERO
    for group in range(head_dim // GROUP):
        cost = spread_of_group(state, record, group, head_dim)
        fit_group(bits_of_group(state, record, group), u, group * GROUP, gains, cost, along, energy)
    for lane in range(LANES):
        gains[lane] = along[lane] / energy[lane] if energy[lane] > _ZERO else _ZERO


@kernel()
def _pack_keys(
    u: Floats, head_dim: int, state: Floats, record: int, gains: Floats, tokens: int, first: int,
    block: Bytes, padded: Bytes,
) -> None:  # fmt: skip
    """Planes of tokens `first .. first + 15`, a channel after the other; `padded` takes those of a last, short byte."""
    width = plane_bytes(tokens)
    whole = width - first // 8 >= 2
    at = tokens + first // 8
    for group in range(head_dim // GROUP):
        bits = bits_of_group(state, record, group)
        if whole:
            pack_columns(bits, u, group * GROUP, gains, block, at, width)
        else:
            pack_columns(bits, u, group * GROUP, gains, padded, 0, 2)
            for plane in range(GROUP * bits):
                block[at + plane * width] = padded[2 * plane]
        at += GROUP * bits * width


@kernel()
def _pack_values(
    u: Floats, rows: Floats, head_dim: int, state: Floats, record: int, gains: Floats, tokens: int, first: int,
    block: Bytes, ones: Floats, zeros: Floats,
) -> None:  # fmt: skip
    """Planes of tokens `first .. first + 15`, a token after the other; `rows` is scratch for `u` turned."""
    for channel in range(0, head_dim, TERMS):
        columns_to_rows(u, channel, ones, ones, zeros, rows, head_dim)
    token_bytes = bytes_of_token(head_dim, state, record)
    at = tokens + first * token_bytes
    for group in range(head_dim // GROUP):
        bits = bits_of_group(state, record, group)
        pack_rows(
            bits, rows, group, head_dim // GROUP, min(LANES, tokens - first), gains, block, at, token_bytes
        )
        at += 2 * bits


@kernel()
def encode_page(words: Words, kind: int, count: int, state: Floats, packed: Bytes) -> bool:
    """Pack the first `count` tokens of `words` `[layers, 2, heads, page_tokens, head_dim]`.

    Returns False, with `packed` undefined, when a value is not finite.
    """
    layers, _, heads, tokens, head_dim = words.shape
    is_bfloat16 = kind == BFLOAT16
    tiles = (count + LANES - 1) // LANES
    size = LANES * head_dim
    rows, columns = np.zeros(tiles * size, np.float32), np.empty(size, np.float32)
    coefficients = np.empty(tiles * size, np.float32)
    gains = np.zeros((tiles, LANES), np.float32)
    along, energy = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    factors, ones, zeros = (
        np.empty(head_dim, np.float32),
        np.ones(max(head_dim, LANES), np.float32),
        np.zeros(head_dim, np.float32),
    )
    padded = np.zeros(2 * GROUP * MAX_BITS, np.uint8)
    if count < tokens:
        packed[:] = 0
    for layer in range(layers):
        for side in range(2):
            for head in range(heads):
                record = record_start(layer, side, head, heads, head_dim)
                center = state[mean_start(record, head_dim) :][:head_dim]
                largest = load_rows(words[layer, side, head], is_bfloat16, count, center, rows)
                if largest >= INFINITY_BITS:
                    return False
                # As in `rotated_encode`: the largest magnitude comes to lie near 1, so that no square overflows.
                exponent = min(max(int(largest >> np.uint32(23)) - 127, -MAX_EXPONENT), MAX_EXPONENT)
                factors[:] = power_of_two(-exponent)
                top = _ZERO
                for tile in range(tiles):
                    u = coefficients[tile * size : (tile + 1) * size]
                    for channel in range(0, head_dim, TERMS):
                        rows_to_columns(
                            rows[tile * size : (tile + 1) * size], head_dim, channel, factors, columns
                        )
                    _analyse(columns, head_dim, state, record, u)
                    _fit_gains(u, head_dim, state, record, gains[tile], along, energy)
                    for lane in range(min(LANES, count - tile * LANES)):
                        top = max(top, gains[tile, lane])
                block = packed[block_start(state, record) :]
                for tile in range(tiles):
                    first = tile * LANES
                    for lane in range(LANES):
                        code = NO_GAIN
                        if first + lane < count:
                            code = gain_code(gains[tile, lane] / top) if top > _ZERO else NO_GAIN
                            block[first + lane] = code
                        gains[tile, lane] = top * GAINS[code]
                    u = coefficients[tile * size : (tile + 1) * size]
                    if side == 0:
                        _pack_keys(u, head_dim, state, record, gains[tile], tokens, first, block, padded)
                    else:
                        _pack_values(
                            u, rows[tile * size : (tile + 1) * size], head_dim, state, record, gains[tile], tokens,
                            first, block, ones, zeros,
                        )  # fmt: skip
                        rows[tile * size : (tile + 1) * size] = _ZERO
                store_float(
                    packed,
                    scale_offset(layer, side, head, heads),
                    min(top * power_of_two(exponent), LARGEST_F32),
                )
    return True


@kernel()
def unpack_keys(
    page: Bytes,
    block: int,
    tokens: int,
    head_dim: int,
    state: Floats,
    record: int,
    first: int,
    columns: Floats,
) -> None:
    """Levels of tokens `first .. first + 15`, columns `[head_dim, 16]`. Lanes behind the last token are noise."""
    width = plane_bytes(tokens)
    at = block + tokens + first // 8
    for group in range(head_dim // GROUP):
        bits = bits_of_group(state, record, group)
        unpack_rows(bits, page, at, width, bits * width, columns, group * GROUP, 1, GROUP)
        at += GROUP * bits * width


@kernel()
def decode_page(packed: Bytes, count: int, state: Floats, words: Words, kind: int) -> None:
    """Unpack the first `count` tokens into `words` and zero the others."""
    layers, _, heads, tokens, head_dim = words.shape
    groups, size = head_dim // GROUP, LANES * head_dim
    levels, columns, rows = np.zeros(size, np.float32), np.empty(size, np.float32), np.zeros(size, np.float32)
    ones, gains = np.ones(head_dim, np.float32), np.zeros(LANES, np.float32)
    flat = words.reshape(words.size)
    for layer in range(layers):
        for side in range(2):
            for head in range(heads):
                record = record_start(layer, side, head, heads, head_dim)
                block = block_start(state, record)
                top = load_float(packed, scale_offset(layer, side, head, heads))
                center = state[mean_start(record, head_dim) :][:head_dim]
                start = ((layer * 2 + side) * heads + head) * tokens * head_dim
                flat[start + count * head_dim : start + tokens * head_dim] = 0
                token_bytes = bytes_of_token(head_dim, state, record)
                live = live_channels(head_dim, state, record)
                for first in range(0, count, LANES):
                    lanes = min(LANES, count - first)
                    for lane in range(lanes):
                        gains[lane] = top * GAINS[packed[block + first + lane]]
                    if side == 0:
                        unpack_keys(packed, block, tokens, head_dim, state, record, first, levels)
                    else:
                        at = block + tokens + first * token_bytes
                        for group in range(groups):
                            bits = bits_of_group(state, record, group)
                            unpack_rows(bits, packed, at, 2, token_bytes, rows, group, groups, lanes)
                            at += 2 * bits
                        for channel in range(0, live, TERMS):
                            rows_to_columns(rows, head_dim, channel, ones, levels)
                    for row in range(0, head_dim, ROWS):
                        multiply_fused(
                            state, synthesis_start(record, head_dim), head_dim, live, record_floats(head_dim), levels,
                            columns, row,
                        )  # fmt: skip
                    for channel in range(0, head_dim, TERMS):
                        columns_to_rows(columns, channel, ones, gains, center, rows, head_dim)
                    at = start + first * head_dim
                    store_clamped(flat[at : at + lanes * head_dim], kind, rows[: lanes * head_dim])
