"""int8 and nf4 in machine code: a page's words to the numbers that bitsandbytes packs, and its codes back to words.

Format: `blockwise.py`; in plain torch: `blockwise_reference.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.numba_setup import kernel
from tierkv.quant.blocks import BLOCK
from tierkv.quant.dynamic_map import DYNAMIC_MAP
from tierkv.quant.floats import BFLOAT16, load_float, magnitude_bits, store_clamped, widen
from tierkv.quant.normal_float import NORMAL_FLOAT_MAP

Words = NDArray[np.uint16] | NDArray[np.uint32]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_INFINITY_BITS = np.uint32(0x7F800000)


@kernel()
def head_blocks(tokens: int, head_dim: int) -> int:
    """Blocks of the keys or values of one head."""
    return (tokens * head_dim + BLOCK - 1) // BLOCK


@kernel()
def widen_page(words: Words, kind: int, count: int, values: Floats) -> bool:
    """The first `count` tokens of `words` `[layers, 2, heads, page_tokens, head_dim]` into `values`
    `[layers * 2 * heads, n]`, tokens one behind the other. False when a value is not finite."""
    layers, _, heads, tokens, head_dim = words.shape
    is_bfloat16 = kind == BFLOAT16
    flat = words.reshape(words.size)
    largest = np.uint32(0)
    for plane in range(layers * 2 * heads):
        source, row = flat[plane * tokens * head_dim :], values[plane]
        for index in range(count * head_dim):
            row[index] = widen(source[index], is_bfloat16)
        for index in range(count * head_dim):
            largest = max(largest, magnitude_bits(row[index]))
    return bool(largest < _INFINITY_BITS)


@kernel()
def load_values(
    bits: int, page: Bytes, plane: int, planes: int, tokens: int, head_dim: int, first: int, row: Floats
) -> None:  # fmt: skip
    """`row` gets the values from number `first` on of a plane (a layer's keys or values of one head).

    For nf4, `first` and the length of `row` are even.
    """
    blocks = head_blocks(tokens, head_dim)
    at = 4 * planes * blocks + (plane * tokens * head_dim + first) * bits // 8
    size = row.shape[0]
    if bits == 8:
        codes = page[at : at + size]
        for index in range(size):
            row[index] = DYNAMIC_MAP[codes[index]]
    else:
        codes = page[at : at + size // 2]
        for index in range(size // 2):
            row[2 * index] = NORMAL_FLOAT_MAP[codes[index] >> 4]
            row[2 * index + 1] = NORMAL_FLOAT_MAP[codes[index] & 15]
    start = 0
    while start < size:
        block = (first + start) // BLOCK
        stop = min(size, (block + 1) * BLOCK - first)
        largest = load_float(page, 4 * (plane * blocks + block))
        part = row[start:stop]
        for index in range(part.shape[0]):
            part[index] *= largest
        start = stop


@kernel()
def decode_page(bits: int, packed: Bytes, count: int, words: Words, kind: int) -> None:
    """Unpack the first `count` tokens into `words` and zero the others."""
    layers, _, heads, tokens, head_dim = words.shape
    planes = layers * 2 * heads
    flat = words.reshape(words.size)
    row = np.empty(count * head_dim, np.float32)
    for plane in range(planes):
        to = flat[plane * tokens * head_dim : (plane + 1) * tokens * head_dim]
        load_values(bits, packed, plane, planes, tokens, head_dim, 0, row)
        store_clamped(to[: count * head_dim], kind, row)
        to[count * head_dim :] = 0
