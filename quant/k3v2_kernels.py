"""k3v2 in machine code: encode and decode of whole pages. Format: `k3v2.py`; in plain torch: `k3v2_reference.py`.

One block (a layer's keys or values of one head) at a time is transposed to `[head_dim, page_tokens]`, so that all steps
run with tokens as vector lanes and sums go over channels in order: that order, and the absence of fast math, is what
makes the packed bytes equal the reference's bit for bit.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tierkv.numba_setup import kernel
from tierkv.quant.floats import (
    BFLOAT16,
    float_of,
    load_float,
    magnitude_bits,
    store_clamped,
    store_float,
    widen,
)
from tierkv.quant.lloyd import BOUNDARIES_4, BOUNDARIES_8, GAIN_FLOORS, GAINS, LEVELS_4, LEVELS_8, NO_GAIN
from tierkv.quant.rotation import apply_signs, hadamard

Words = NDArray[np.uint16] | NDArray[np.uint32]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_ZERO, _ONE = np.float32(0), np.float32(1)
_K1, _K2, _K3, _K4 = LEVELS_8
_KB1, _KB2, _KB3 = BOUNDARIES_8
_V1, _V2 = LEVELS_4
_VB1 = BOUNDARIES_4[0]

INFINITY_BITS = np.uint32(0x7F800000)
_LARGEST_F32 = np.float32(np.finfo(np.float32).max)

MAX_EXPONENT = 126
"""Blocks are scaled by a power of two within 2**-126..2**126, which are all normal numbers."""


@kernel()
def block_offset(
    layer: int, side: int, head: int, layers: int, heads: int, tokens: int, head_dim: int
) -> int:
    """Byte offset of a block in the packed page; `side` 0 is keys, 1 values."""
    key_bytes = tokens + tokens * head_dim * 3 // 8
    value_bytes = tokens + tokens * head_dim // 4
    start = 4 * layers * 2 * heads + layer * heads * (key_bytes + value_bytes)
    return start + head * key_bytes if side == 0 else start + heads * key_bytes + head * value_bytes


@kernel()
def scale_offset(layer: int, side: int, head: int, heads: int) -> int:
    """Byte offset of a block's largest gain."""
    return 4 * ((layer * 2 + side) * heads + head)


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
def _power_of_two(exponent: int) -> np.float32:
    """2**exponent for -126 <= exponent <= 126."""
    power: np.float32 = float_of(np.uint32((exponent + 127) << 23))
    return power


@kernel()
def _load_columns(
    words: Words, is_bfloat16: bool, count: int, mean: Floats, row: Floats, x: Floats
) -> np.uint32:
    """`x[:, :count]` gets the tokens of `words` `[page_tokens, head_dim]` minus `mean`; returns the largest |bits|."""
    largest = np.uint32(0)
    for token in range(count):
        source = words[token]
        for channel in range(row.shape[0]):
            row[channel] = widen(source[channel], is_bfloat16) - mean[channel]
        for channel in range(row.shape[0]):
            largest = max(largest, magnitude_bits(row[channel]))
        for channel in range(row.shape[0]):
            x[channel, token] = row[channel]
    return largest


@kernel()
def _gain_code(fraction: np.float32) -> int:
    """How many of the descending GAIN_FLOORS lie above `fraction`."""
    low, high = 0, GAIN_FLOORS.shape[0]
    while low < high:
        middle = (low + high) >> 1
        if GAIN_FLOORS[middle] > fraction:
            low = middle + 1
        else:
            high = middle
    return low


@kernel()
def _fit_key_gains(x: Floats, gain: Floats, along: Floats, energy: Floats) -> None:
    """Least-squares gain of each token, from the codes that `gain` (the root mean square) gives."""
    for channel in range(x.shape[0]):
        for token in range(x.shape[1]):
            size, g = abs(x[channel, token]), gain[token]
            level = _K1
            level = _K2 if size > _KB1 * g else level
            level = _K3 if size > _KB2 * g else level
            level = _K4 if size > _KB3 * g else level
            along[token] += size * level
            energy[token] += level * level


@kernel()
def _fit_value_gains(x: Floats, gain: Floats, along: Floats, energy: Floats) -> None:
    for channel in range(x.shape[0]):
        for token in range(x.shape[1]):
            size, g = abs(x[channel, token]), gain[token]
            level = _V2 if size > _VB1 * g else _V1
            along[token] += size * level
            energy[token] += level * level


@kernel()
def _pack_keys(x: Floats, gain: Floats, count: int, block: Bytes) -> None:
    """Fill a key block's planes from `x` `[head_dim, page_tokens]` and the stored gains."""
    head_dim, tokens = x.shape
    magnitudes = block[tokens : tokens + tokens * head_dim // 4].reshape(head_dim // 4, tokens)
    negatives = block[tokens + tokens * head_dim // 4 :].reshape(head_dim // 8, tokens)
    magnitudes[:] = 0
    negatives[:] = 0
    for channel in range(head_dim):
        two, one = np.uint8(2 * (channel % 4)), np.uint8(channel % 8)
        source, row, sign_row = x[channel], magnitudes[channel // 4], negatives[channel // 8]
        for token in range(count):
            value, g = source[token], gain[token]
            size = abs(value)
            index = np.uint8(size > _KB1 * g) + np.uint8(size > _KB2 * g) + np.uint8(size > _KB3 * g)
            row[token] |= np.uint8(index << two) if g > _ZERO else np.uint8(0)
            sign_row[token] |= np.uint8(np.uint8(value < _ZERO) << one) if g > _ZERO else np.uint8(0)


@kernel()
def _pack_values(x: Floats, gain: Floats, count: int, block: Bytes) -> None:
    head_dim, tokens = x.shape
    quarter = head_dim // 4
    codes = block[tokens:].reshape(tokens, quarter)
    codes[count:] = 0
    packed = np.empty(tokens, np.uint8)
    for byte in range(quarter):
        packed[:] = 0
        for part in range(4):
            row, shift = x[part * quarter + byte], np.uint8(2 * part)
            for token in range(count):
                far = np.uint8(abs(row[token]) > _VB1 * gain[token])
                code = far | np.uint8(np.uint8(row[token] < _ZERO) << np.uint8(1))
                packed[token] |= np.uint8(code << shift) if gain[token] > _ZERO else np.uint8(0)
        for token in range(count):
            codes[token, byte] = packed[token]


@kernel()
def _encode_block(
    x: Floats, side: int, count: int, exponent: int, gain: Floats, along: Floats, energy: Floats, block: Bytes
) -> np.float32:
    """Pack one block whose values (not yet rotated) were scaled by 2**-exponent; returns its largest gain."""
    head_dim = x.shape[0]
    hadamard(x.reshape(-1), x.shape[1])
    along[:] = _ZERO
    energy[:] = _ZERO
    for channel in range(head_dim):
        for token in range(x.shape[1]):
            energy[token] += x[channel, token] * x[channel, token]
    for token in range(x.shape[1]):
        gain[token] = np.float32(math.sqrt(energy[token] / np.float32(head_dim)))
        energy[token] = _ZERO
    if side == 0:
        _fit_key_gains(x, gain, along, energy)
    else:
        _fit_value_gains(x, gain, along, energy)
    top = _ZERO
    for token in range(count):
        gain[token] = along[token] / energy[token]
        top = max(top, gain[token])
    block[: x.shape[1]] = 0
    for token in range(count):
        code = _gain_code(gain[token] / top) if top > _ZERO else NO_GAIN
        block[token] = code
        gain[token] = top * GAINS[code]
    if side == 0:
        _pack_keys(x, gain, count, block)
    else:
        _pack_values(x, gain, count, block)
    return min(top * _power_of_two(exponent), _LARGEST_F32)


@kernel()
def encode_page(words: Words, kind: int, count: int, mean: Floats, packed: Bytes) -> bool:
    """Pack the first `count` tokens of `words` `[layers, 2, heads, page_tokens, head_dim]`.

    Returns False, with `packed` undefined, when a value is not finite.
    """
    layers, _, heads, tokens, head_dim = words.shape
    is_bfloat16 = kind == BFLOAT16
    x = np.zeros((head_dim, tokens), np.float32)
    gain, along, energy = (
        np.zeros(tokens, np.float32),
        np.zeros(tokens, np.float32),
        np.zeros(tokens, np.float32),
    )
    sign = np.ones(head_dim, np.float32)
    apply_signs(sign)
    no_mean = np.zeros(head_dim, np.float32)
    row = np.empty(head_dim, np.float32)
    for layer in range(layers):
        for side in range(2):
            for head in range(heads):
                center = mean[layer, head] if side == 0 else no_mean
                x[:, count:] = _ZERO
                largest = _load_columns(words[layer, side, head], is_bfloat16, count, center, row, x)
                if largest >= INFINITY_BITS:
                    return False
                # The largest magnitude comes to lie in [1, 2) (or [1, 4) at the top of the range): no square overflows.
                exponent = min(max(int(largest >> np.uint32(23)) - 127, -MAX_EXPONENT), MAX_EXPONENT)
                scale = _power_of_two(-exponent)
                for channel in range(head_dim):
                    factor = sign[channel] * scale
                    for token in range(tokens):
                        x[channel, token] *= factor
                start = block_offset(layer, side, head, layers, heads, tokens, head_dim)
                size = tokens + tokens * head_dim * (3 if side == 0 else 2) // 8
                top = _encode_block(
                    x, side, count, exponent, gain, along, energy, packed[start : start + size]
                )
                store_float(packed, scale_offset(layer, side, head, heads), top)
    return True


@kernel()
def _key_level(block: Bytes, tokens: int, head_dim: int, token: int, channel: int) -> np.float32:
    pair = block[tokens + channel // 4 * tokens + token] >> np.uint8(2 * (channel % 4)) & 3
    sign = block[tokens + tokens * head_dim // 4 + channel // 8 * tokens + token] >> np.uint8(channel % 8) & 1
    level: np.float32 = LEVELS_8[pair]
    return -level if sign else level


@kernel()
def _value_level(block: Bytes, tokens: int, head_dim: int, token: int, channel: int) -> np.float32:
    quarter = head_dim // 4
    code = block[tokens + token * quarter + channel % quarter] >> np.uint8(2 * (channel // quarter)) & 3
    level: np.float32 = LEVELS_4[code & 1]
    return -level if code & 2 else level


@kernel()
def decode_page(packed: Bytes, count: int, mean: Floats, words: Words, kind: int) -> None:
    """Unpack the first `count` tokens into `words` and zero the others."""
    layers, _, heads, tokens, head_dim = words.shape
    row = np.zeros(head_dim, np.float32)
    sign = np.ones(head_dim, np.float32)
    apply_signs(sign)
    for layer in range(layers):
        for side in range(2):
            for head in range(heads):
                start = block_offset(layer, side, head, layers, heads, tokens, head_dim)
                block = packed[start : start + tokens + tokens * head_dim * (3 if side == 0 else 2) // 8]
                top = load_float(packed, scale_offset(layer, side, head, heads))
                words[layer, side, head, count:] = 0
                for token in range(count):
                    for channel in range(head_dim):
                        if side == 0:
                            row[channel] = _key_level(block, tokens, head_dim, token, channel)
                        else:
                            row[channel] = _value_level(block, tokens, head_dim, token, channel)
                    hadamard(row, 1)
                    gain = top * GAINS[block[token]]
                    for channel in range(head_dim):
                        row[channel] *= sign[channel] * gain
                        if side == 0:
                            row[channel] += mean[layer, head, channel]
                    store_clamped(words[layer, side, head, token], kind, row)
