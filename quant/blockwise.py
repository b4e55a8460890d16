"""int8 and nf4: the bytes that bitsandbytes makes of a page, in blocks of 64 values, read in place by our own kernels.

int8 is 8-bit blockwise quantization (Dettmers et al., arXiv 2110.02861, `dynamic_map.py`), nf4 is 4-bit NormalFloat
(arXiv 2305.14314, `normal_float.py`): each value is `level[code] * largest`, with the largest magnitude of its block.

The keys or values of one layer and head are one run of `[page_tokens, head_dim]` values, token by token, cut into
blocks. Where head_dim is a multiple of 64 a block lies within a token; else (80, 96) blocks go on into the next token,
which costs no more bits, and reads as well: a token's values lie next to each other either way. 8.5 and 4.5 bits a
value. No state. Blocks of subnormal numbers are packed as zeros (`blocks.py`).

Packed page, little-endian, H heads, P page_tokens, D head_dim:

    float32 [layers, 2, H, ceil(P*D/64)]    largest magnitude of each block (keys at 0, values at 1)
    int8    uint8 [layers, 2, H, P, D]      codes
    nf4     uint8 [layers, 2, H, P, D/2]    codes of channels 2i (high half) and 2i+1 (low half)

Numbers and codes of tokens that are not encoded are zero, also where they share a block with one that is.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.quant import blockwise_kernels as kernels
from tierkv.quant import codes, dynamic_map, normal_float
from tierkv.quant.blocks import BLOCK, block_count
from tierkv.quant.contract import Bytes, Codec, Floats, NonFiniteValues
from tierkv.quant.floats import KIND, page_words


class Blockwise(Codec):
    """What both share; a codec of the family says how many bits a code takes."""

    bits: ClassVar[int]
    in_model_space: ClassVar[bool] = True

    def page_bytes(self, geometry: Geometry) -> int:
        if geometry.head_dim * self.bits % 8:
            raise ConfigError(
                f"{self.name} packs channels in pairs, and head_dim is {geometry.head_dim}; use the codec int8"
            )
        blocks = block_count(geometry.page_tokens * geometry.head_dim)
        return self._planes(geometry) * 4 * blocks + geometry.values * self.bits // 8

    def encode(self, geometry: Geometry, exact: Bytes, count: int, state: Floats, out: Bytes) -> None:
        packed = self._packed(geometry, out)
        planes, size = self._planes(geometry), geometry.page_tokens * geometry.head_dim
        values = np.zeros((planes, block_count(size) * BLOCK), np.float32)
        if not kernels.widen_page(page_words(geometry, exact), KIND[geometry.dtype], count, values):
            raise NonFiniteValues("the page holds NaN or infinity")
        quantize = dynamic_map.quantize if self.bits == 8 else normal_float.quantize
        packed_codes, largest = quantize(values)
        body = packed[4 * largest.size :].reshape(planes, -1)
        written = count * geometry.head_dim * self.bits // 8
        packed[: 4 * largest.size] = largest.view(np.uint8)
        body[:, :written] = packed_codes.reshape(planes, -1)[:, :written]
        body[:, written:] = 0

    def decode(self, geometry: Geometry, packed: Bytes, count: int, state: Floats, out: Bytes) -> None:
        words, kind = page_words(geometry, out), KIND[geometry.dtype]
        kernels.decode_page(self.bits, self._packed(geometry, packed), count, words, kind)

    def reference_encode(self, geometry: Geometry, exact: Bytes, count: int, state: Floats) -> Bytes:
        from tierkv.quant import blockwise_reference as reference

        self.page_bytes(geometry)
        return reference.encode(geometry, exact, count, self.bits)

    def reference_decode(self, geometry: Geometry, packed: Bytes, count: int, state: Floats) -> Floats:
        from tierkv.quant import blockwise_reference as reference

        return reference.decode(geometry, self._packed(geometry, packed), count, self.bits)

    @staticmethod
    def _planes(geometry: Geometry) -> int:
        return geometry.num_layers * 2 * geometry.num_kv_heads


class Int8(Blockwise):
    name: ClassVar[str] = "int8"
    code: ClassVar[int] = codes.INT8
    bits: ClassVar[int] = 8


class NF4(Blockwise):
    name: ClassVar[str] = "nf4"
    code: ClassVar[int] = codes.NF4
    bits: ClassVar[int] = 4
