"""The rotated family in machine code: packed bytes to a page's exact words. Format: `rotated.py`.

One pass: 16 tokens of a block at a time are unpacked into columns, rotated back and written out as rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.numba_setup import kernel
from tierkv.quant.columns import columns_to_rows
from tierkv.quant.floats import load_float, store_clamped
from tierkv.quant.lloyd import GAINS
from tierkv.quant.rotated_layout import block_offset, key_octets, scale_offset
from tierkv.quant.rotation import apply_signs, hadamard_columns
from tierkv.quant.tiles import LANES, TERMS, unpack_levels_4, unpack_levels_8

Words = NDArray[np.uint16] | NDArray[np.uint32]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_ZERO = np.float32(0)


@kernel()
def _unpack_keys(
    page: Bytes, block: int, tokens: int, head_dim: int, key_bits: int, first: int, padded: Bytes, columns: Floats
) -> None:  # fmt: skip
    """Levels of tokens `first .. first + 15`; bytes go through `padded` `[48]` where the page has fewer tokens."""
    lanes = min(LANES, tokens - first)
    low, signs = key_octets(block, tokens, head_dim, key_bits, first)
    for octet in range(head_dim // TERMS):
        data, at, step, at_signs = page, low, tokens, signs
        if lanes < LANES:
            for lane in range(lanes):
                padded[lane] = page[low + lane]
                padded[LANES + lane] = page[low + tokens + lane]
                padded[2 * LANES + lane] = page[signs + lane]
            data, at, step, at_signs = padded, 0, LANES, 2 * LANES
        if key_bits == 3:
            unpack_levels_8(data, at, at + step, at_signs, columns[octet * TERMS * LANES :])
        else:
            unpack_levels_4(data, at, columns, TERMS * octet, 1)
            unpack_levels_4(data, at + step, columns, TERMS * octet + 4, 1)
        low += 2 * tokens
        signs += tokens


@kernel()
def _unpack_values(
    page: Bytes, block: int, tokens: int, head_dim: int, first: int, by_byte: Bytes, columns: Floats
) -> None:  # fmt: skip
    """Levels of tokens `first .. first + 15`; `by_byte` is `[head_dim / 4, 16]`."""
    quarter = head_dim // 4
    for lane in range(min(LANES, tokens - first)):
        start = block + tokens + (first + lane) * quarter
        row = page[start : start + quarter]
        for byte in range(quarter):
            by_byte[byte * LANES + lane] = row[byte]
    for byte in range(quarter):
        unpack_levels_4(by_byte, byte * LANES, columns, byte, quarter)


@kernel()
def decode_page(packed: Bytes, count: int, mean: Floats, key_bits: int, words: Words, kind: int) -> None:
    """Unpack the first `count` tokens into `words` and zero the others."""
    layers, _, heads, tokens, head_dim = words.shape
    columns, rows = np.empty(LANES * head_dim, np.float32), np.empty(LANES * head_dim, np.float32)
    padded, by_byte = np.zeros(3 * LANES, np.uint8), np.zeros(head_dim // 4 * LANES, np.uint8)
    sign, no_mean = np.ones(head_dim, np.float32), np.zeros(head_dim, np.float32)
    apply_signs(sign)
    gains = np.zeros(LANES, np.float32)
    flat = words.reshape(words.size)
    for layer in range(layers):
        for side in range(2):
            for head in range(heads):
                block = block_offset(layer, side, head, layers, heads, tokens, head_dim, key_bits)
                top = load_float(packed, scale_offset(layer, side, head, heads))
                center = mean[layer, head] if side == 0 else no_mean
                start = ((layer * 2 + side) * heads + head) * tokens * head_dim
                flat[start + count * head_dim : start + tokens * head_dim] = 0
                for first in range(0, count, LANES):
                    lanes = min(LANES, count - first)
                    for lane in range(lanes):
                        gains[lane] = top * GAINS[packed[block + first + lane]]
                    if side == 0:
                        _unpack_keys(packed, block, tokens, head_dim, key_bits, first, padded, columns)
                    else:
                        _unpack_values(packed, block, tokens, head_dim, first, by_byte, columns)
                    hadamard_columns(columns, head_dim)
                    for channel in range(0, head_dim, TERMS):
                        columns_to_rows(columns, channel, sign, gains, center, rows, head_dim)
                    at = start + first * head_dim  # all tokens in one go: short loops do not vectorize
                    store_clamped(flat[at : at + lanes * head_dim], kind, rows[: lanes * head_dim])
