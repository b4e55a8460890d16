"""The rotated family in machine code: a page's exact words to packed bytes. Format: `rotated.py`.

In plain torch: `rotated_reference.py`, whose bytes these are, bit for bit. A page is read once: one block (a layer's
keys or values of one head) at a time goes through buffers that stay in the core's own cache.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tierkv.numba_setup import kernel
from tierkv.quant.columns import (
    add_fit_4,
    add_fit_8,
    add_squares,
    pack_levels_4,
    pack_levels_8,
    rows_to_columns,
)
from tierkv.quant.floats import BFLOAT16, float_of, magnitude_bits, store_float, widen
from tierkv.quant.lloyd import GAIN_FLOORS, GAINS, NO_GAIN
from tierkv.quant.rotated_layout import block_bytes, block_offset, key_octets, scale_offset
from tierkv.quant.rotation import apply_signs, hadamard_columns
from tierkv.quant.tiles import LANES, TERMS

Words = NDArray[np.uint16] | NDArray[np.uint32]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_ZERO = np.float32(0)
INFINITY_BITS = np.uint32(0x7F800000)
LARGEST_F32 = np.float32(np.finfo(np.float32).max)

MAX_EXPONENT = 126
"""Blocks are scaled by a power of two within 2**-126..2**126, which are all normal numbers."""


@kernel()
def add_keys(words: Words, kind: int, count: int, total: NDArray[np.float64]) -> None:
    """`total` `[layers, heads, head_dim]` gets the page's first `count` keys added."""
    is_bfloat16 = kind == BFLOAT16
    for layer in range(words.shape[0]):
        for head in range(words.shape[2]):
            for token in range(count):
                for channel in range(words.shape[4]):
                    total[layer, head, channel] += widen(words[layer, 0, head, token, channel], is_bfloat16)


@kernel()
def power_of_two(exponent: int) -> np.float32:
    """2**exponent for -126 <= exponent <= 126."""
    power: np.float32 = float_of(np.uint32((exponent + 127) << 23))
    return power


@kernel()
def load_rows(words: Words, is_bfloat16: bool, count: int, mean: Floats, rows: Floats) -> np.uint32:
    """`rows` gets the first `count` tokens of `words` `[page_tokens, head_dim]` minus `mean`; the largest |bits|."""
    head_dim = mean.shape[0]
    largest = np.uint32(0)
    for token in range(count):
        source, row = words[token], rows[token * head_dim : (token + 1) * head_dim]
        for channel in range(head_dim):
            row[channel] = widen(source[channel], is_bfloat16) - mean[channel]
        for channel in range(head_dim):
            largest = max(largest, magnitude_bits(row[channel]))
    return largest


@kernel()
def gain_code(fraction: np.float32) -> int:
    """How many of the 255 descending GAIN_FLOORS lie above `fraction`."""
    above = 0
    step = 128
    while step > 0:
        above += step if GAIN_FLOORS[above + step - 1] > fraction else 0
        step >>= 1
    return above


@kernel()
def _fit_gains(
    columns: Floats, head_dim: int, eight_levels: bool, gains: Floats, along: Floats, energy: Floats
) -> None:
    """Least-squares gain of 16 tokens, from the codes that their root mean squares give."""
    energy[:] = _ZERO
    for channel in range(0, head_dim, TERMS):
        add_squares(columns, channel, energy)
    for lane in range(LANES):
        gains[lane] = np.float32(math.sqrt(energy[lane] / np.float32(head_dim)))
    along[:] = _ZERO
    energy[:] = _ZERO
    for channel in range(0, head_dim, TERMS):
        if eight_levels:
            add_fit_8(columns, channel, gains, along, energy)
        else:
            add_fit_4(columns, channel, gains, along, energy)
    for lane in range(LANES):
        gains[lane] = along[lane] / energy[lane]


@kernel()
def _pack_keys(
    columns: Floats, head_dim: int, key_bits: int, gains: Floats, tokens: int, first: int, block: Bytes, padded: Bytes
) -> None:  # fmt: skip
    """Level codes of tokens `first .. first + 15`; `padded` `[48]` takes them where the page has fewer tokens."""
    lanes = min(LANES, tokens - first)
    whole = lanes == LANES
    low, signs = key_octets(0, tokens, head_dim, key_bits, first)
    for octet in range(head_dim // TERMS):
        to, at, step, at_signs = (block, low, tokens, signs) if whole else (padded, 0, LANES, 2 * LANES)
        if key_bits == 3:
            pack_levels_8(columns, TERMS * octet, gains, to, at, at + step, at_signs)
        else:
            pack_levels_4(columns, TERMS * octet, 1, gains, to, at)
            pack_levels_4(columns, TERMS * octet + 4, 1, gains, to, at + step)
        if not whole:
            for lane in range(lanes):
                if key_bits == 3:
                    block[signs + lane] = padded[2 * LANES + lane]
                block[low + lane] = padded[lane]
                block[low + tokens + lane] = padded[LANES + lane]
        low += 2 * tokens
        signs += tokens


@kernel()
def _pack_values(
    columns: Floats, head_dim: int, gains: Floats, tokens: int, first: int, block: Bytes, by_byte: Bytes
) -> None:  # fmt: skip
    """The same for values; `by_byte` is `[head_dim / 4, 16]`."""
    quarter = head_dim // 4
    for byte in range(quarter):
        pack_levels_4(columns, byte, quarter, gains, by_byte, byte * LANES)
    for lane in range(min(LANES, tokens - first)):
        start = tokens + (first + lane) * quarter
        row = block[start : start + quarter]
        for byte in range(quarter):
            row[byte] = by_byte[byte * LANES + lane]


@kernel()
def encode_page(words: Words, kind: int, count: int, mean: Floats, key_bits: int, packed: Bytes) -> bool:
    """Pack the first `count` tokens of `words` `[layers, 2, heads, page_tokens, head_dim]`.

    Returns False, with `packed` undefined, when a value is not finite.
    """
    layers, _, heads, tokens, head_dim = words.shape
    is_bfloat16 = kind == BFLOAT16
    tiles = (count + LANES - 1) // LANES
    size = LANES * head_dim  # floats of a tile
    rows, columns = np.zeros(tiles * size, np.float32), np.empty(tiles * size, np.float32)
    gains = np.zeros((tiles, LANES), np.float32)
    along, energy = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    sign, factors = np.ones(head_dim, np.float32), np.empty(head_dim, np.float32)
    apply_signs(sign)
    no_mean = np.zeros(head_dim, np.float32)
    padded, by_byte = np.empty(3 * LANES, np.uint8), np.empty(head_dim // 4 * LANES, np.uint8)
    for layer in range(layers):
        for side in range(2):
            for head in range(heads):
                center = mean[layer, head] if side == 0 else no_mean
                largest = load_rows(words[layer, side, head], is_bfloat16, count, center, rows)
                if largest >= INFINITY_BITS:
                    return False
                # The largest magnitude comes to lie in [1, 2) (or [1, 4) at the top of the range): no square overflows.
                exponent = min(max(int(largest >> np.uint32(23)) - 127, -MAX_EXPONENT), MAX_EXPONENT)
                for channel in range(head_dim):
                    factors[channel] = sign[channel] * power_of_two(-exponent)
                top = _ZERO
                for tile in range(tiles):
                    x = columns[tile * size : (tile + 1) * size]
                    for channel in range(0, head_dim, TERMS):
                        rows_to_columns(rows[tile * size : (tile + 1) * size], head_dim, channel, factors, x)
                    hadamard_columns(x, head_dim)
                    _fit_gains(x, head_dim, side == 0 and key_bits == 3, gains[tile], along, energy)
                    for lane in range(min(LANES, count - tile * LANES)):
                        top = max(top, gains[tile, lane])
                start = block_offset(layer, side, head, layers, heads, tokens, head_dim, key_bits)
                block = packed[start : start + block_bytes(side, tokens, head_dim, key_bits)]
                if count < tokens:
                    block[:] = 0
                for tile in range(tiles):
                    first = tile * LANES
                    for lane in range(LANES):
                        code = NO_GAIN
                        if first + lane < count:
                            code = gain_code(gains[tile, lane] / top) if top > _ZERO else NO_GAIN
                            block[first + lane] = code
                        gains[tile, lane] = top * GAINS[code]
                    x = columns[tile * size : (tile + 1) * size]
                    if side == 0:
                        _pack_keys(x, head_dim, key_bits, gains[tile], tokens, first, block, padded)
                    else:
                        _pack_values(x, head_dim, gains[tile], tokens, first, block, by_byte)
                largest_gain = min(top * power_of_two(exponent), LARGEST_F32)
                store_float(packed, scale_offset(layer, side, head, heads), largest_gain)
    return True
