"""kivi2 in machine code: encode and decode of whole pages. Format: `kivi2.py`; in plain torch: `kivi2_reference.py`.

Encoding is two kernels, because bitsandbytes packs the scales in between: `measure` finds scales and zeros, `pack`
takes the codes for the scales as they were stored.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.numba_setup import kernel
from tierkv.quant.blocks import BLOCK
from tierkv.quant.dynamic_map import DYNAMIC_MAP
from tierkv.quant.floats import BFLOAT16, load_float, magnitude_bits, store_clamped, widen

Words = NDArray[np.uint16] | NDArray[np.uint32]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

CHANNELS = 32
"""Channels of a value group; the last group of a token may have fewer (head_dim 80: 32, 32 and 16)."""

RANGE = 2.0**127
"""A group whose range reaches this is refused: three steps from its minimum could overflow."""

_ZERO, _THREE = np.float32(0), np.float32(3)
_INFINITY_BITS = np.uint32(0x7F800000)
_RANGE_BITS = np.uint32(np.float32(RANGE).view(np.uint32))


@kernel()
def _blocks(values: int) -> int:
    return (values + BLOCK - 1) // BLOCK


@kernel()
def group_count(head_dim: int) -> int:
    """Value groups of a token."""
    return (head_dim + CHANNELS - 1) // CHANNELS


@kernel()
def header_offset(part: int, layers: int, heads: int, tokens: int, head_dim: int) -> int:
    """Byte offset of the block magnitudes of key scales (0), key zeros (1), value scales (2), value zeros (3), or of
    what follows them (4)."""
    keys = 4 * _blocks(layers * heads * head_dim)
    values = 4 * _blocks(layers * heads * tokens * group_count(head_dim))
    return min(part, 2) * keys + max(part - 2, 0) * values


@kernel()
def block_offset(
    layer: int, side: int, head: int, layers: int, heads: int, tokens: int, head_dim: int
) -> int:
    """Byte offset of a block in the packed page; `side` 0 is keys, 1 values. Layer `layers` is the end of the page."""
    key_bytes = 2 * head_dim + tokens * (head_dim // 4)
    value_bytes = 2 * tokens * group_count(head_dim) + (tokens + 3) // 4 * head_dim
    start = header_offset(4, layers, heads, tokens, head_dim) + layer * heads * (key_bytes + value_bytes)
    return start + head * key_bytes if side == 0 else start + heads * key_bytes + head * value_bytes


@kernel()
def stored_float(page: Bytes, header: int, index: int, code: int) -> np.float32:
    """Number `index` of a part whose block magnitudes begin at byte `header`."""
    value: np.float32 = DYNAMIC_MAP[code] * load_float(page, header + 4 * (index // BLOCK))
    return value


@kernel()
def _code(value: np.float32, scale: np.float32, zero: np.float32) -> np.uint8:
    """The nearest of 0..3 (the lower one of two equally near)."""
    if scale <= _ZERO:
        return np.uint8(0)
    steps = (value - zero) / scale
    return np.uint8(
        np.uint8(steps > np.float32(0.5))
        + np.uint8(steps > np.float32(1.5))
        + np.uint8(steps > np.float32(2.5))
    )


@kernel()
def measure(words: Words, kind: int, count: int, keys: Floats, values: Floats) -> bool:
    """Scales (index 0) and zeros (1) of keys `[2, layers, heads, head_dim]` and values
    `[2, layers, heads, page_tokens, groups]`. False when a value is not finite or a group's range reaches RANGE."""
    layers, _, heads, _, head_dim = words.shape
    is_bfloat16 = kind == BFLOAT16
    low, high = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    largest, widest = np.uint32(0), np.uint32(0)
    for layer in range(layers):
        for head in range(heads):
            low[:], high[:] = np.float32(np.inf), np.float32(-np.inf)
            for token in range(count):
                for channel in range(head_dim):
                    value = widen(words[layer, 0, head, token, channel], is_bfloat16)
                    largest = max(largest, magnitude_bits(value))
                    low[channel], high[channel] = min(low[channel], value), max(high[channel], value)
            for channel in range(head_dim):
                keys[0, layer, head, channel] = high[channel] / _THREE - low[channel] / _THREE
                keys[1, layer, head, channel] = low[channel]
                widest = max(widest, magnitude_bits(high[channel] - low[channel]))
            for token in range(count):
                for group in range(group_count(head_dim)):
                    bottom, top = np.float32(np.inf), np.float32(-np.inf)
                    for channel in range(group * CHANNELS, min(head_dim, (group + 1) * CHANNELS)):
                        value = widen(words[layer, 1, head, token, channel], is_bfloat16)
                        largest = max(largest, magnitude_bits(value))
                        bottom, top = min(bottom, value), max(top, value)
                    values[0, layer, head, token, group] = top / _THREE - bottom / _THREE
                    values[1, layer, head, token, group] = bottom
                    widest = max(widest, magnitude_bits(top - bottom))
    return bool(largest < _INFINITY_BITS and widest < _RANGE_BITS)


@kernel()
def pack(
    words: Words, kind: int, count: int, keys: Floats, values: Floats,
    key_scales: Bytes, key_zeros: Bytes, value_scales: Bytes, value_zeros: Bytes, packed: Bytes,
) -> None:  # fmt: skip
    """Fill all blocks from the stored scales and zeros (`keys`, `values`) and their 8-bit codes."""
    layers, _, heads, tokens, head_dim = words.shape
    groups = group_count(head_dim)
    is_bfloat16 = kind == BFLOAT16
    packed[block_offset(0, 0, 0, layers, heads, tokens, head_dim) :] = 0
    for layer in range(layers):
        for head in range(heads):
            start = block_offset(layer, 0, head, layers, heads, tokens, head_dim)
            packed[start : start + head_dim] = key_scales[layer, head]
            packed[start + head_dim : start + 2 * head_dim] = key_zeros[layer, head]
            codes = start + 2 * head_dim
            scale, zero = keys[0, layer, head], keys[1, layer, head]
            for token in range(count):
                for channel in range(head_dim):
                    value = widen(words[layer, 0, head, token, channel], is_bfloat16)
                    code = _code(value, scale[channel], zero[channel])
                    packed[codes + channel // 4 * tokens + token] |= np.uint8(
                        code << np.uint8(2 * (channel % 4))
                    )
            start = block_offset(layer, 1, head, layers, heads, tokens, head_dim)
            for token in range(tokens):
                for group in range(groups):
                    packed[start + token * groups + group] = value_scales[layer, head, token, group]
                    packed[start + (tokens + token) * groups + group] = value_zeros[layer, head, token, group]
            codes = start + 2 * tokens * groups
            for token in range(count):
                for channel in range(head_dim):
                    value = widen(words[layer, 1, head, token, channel], is_bfloat16)
                    group = channel // CHANNELS
                    code = _code(
                        value, values[0, layer, head, token, group], values[1, layer, head, token, group]
                    )
                    packed[codes + token // 4 * head_dim + channel] |= np.uint8(
                        code << np.uint8(2 * (token % 4))
                    )


@kernel()
def decode_page(packed: Bytes, count: int, words: Words, kind: int) -> None:
    """Unpack the first `count` tokens into `words` and zero the others."""
    layers, _, heads, tokens, head_dim = words.shape
    groups = group_count(head_dim)
    row = np.zeros(head_dim, np.float32)
    for layer in range(layers):
        for head in range(heads):
            place = layer * heads + head
            start = block_offset(layer, 0, head, layers, heads, tokens, head_dim)
            scale_header = header_offset(0, layers, heads, tokens, head_dim)
            zero_header = header_offset(1, layers, heads, tokens, head_dim)
            words[layer, 0, head, count:] = 0
            words[layer, 1, head, count:] = 0
            for token in range(count):
                for channel in range(head_dim):
                    byte = packed[start + 2 * head_dim + channel // 4 * tokens + token]
                    index = place * head_dim + channel
                    scale = stored_float(packed, scale_header, index, packed[start + channel])
                    zero = stored_float(packed, zero_header, index, packed[start + head_dim + channel])
                    row[channel] = zero + scale * np.float32(byte >> np.uint8(2 * (channel % 4)) & 3)
                store_clamped(words[layer, 0, head, token], kind, row)
            start = block_offset(layer, 1, head, layers, heads, tokens, head_dim)
            scale_header = header_offset(2, layers, heads, tokens, head_dim)
            zero_header = header_offset(3, layers, heads, tokens, head_dim)
            zeros = start + tokens * groups
            for token in range(count):
                for channel in range(head_dim):
                    byte = packed[start + 2 * tokens * groups + token // 4 * head_dim + channel]
                    group = token * groups + channel // CHANNELS
                    index = place * tokens * groups + group
                    scale = stored_float(packed, scale_header, index, packed[start + group])
                    zero = stored_float(packed, zero_header, index, packed[zeros + group])
                    row[channel] = zero + scale * np.float32(byte >> np.uint8(2 * (token % 4)) & 3)
                store_clamped(words[layer, 1, head, token], kind, row)
