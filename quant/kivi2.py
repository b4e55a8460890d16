"""kivi2: KIVI's axes at 2 bits (Liu et al. 2024, arXiv 2402.02750), the named baseline.

Keys are quantized per channel over the tokens of the page, values per token over groups of 32 channels (where 32 does
not divide head_dim, as in 80, the last group has the 16 channels that are left); both asymmetrically to 2 bits:
`x = zero + scale * code`, code 0..3, with zero the group's minimum and scale a third of its range (a group without
range has scale 0 and code 0). Scales and zeros are stored in 8 bits by bitsandbytes' blockwise quantization
(`dynamic_map.py`, blocks of 64); codes are taken for the stored scales, not the exact ones. What differs from the
paper: groups are the page's tokens (16 by default) instead of 32, and metadata is 8-bit, not fp16. No state. A page
with a group whose range reaches 2**127 is refused like one with infinity.

Packed page, little-endian, H heads, P page_tokens, D head_dim:

    float32 largest magnitude of each block of 64 of, in this order: key scales [layers, H, D], key zeros (same shape),
            value scales [layers, H, P, ceil(D/32)], value zeros (same shape)
    blocks  [layers] of H key blocks, then H value blocks:
      key block    uint8 [D]              scale codes
                   uint8 [D]              zero codes
                   uint8 [D/4, P]         channels 4i..4i+3 of a token, 2 bits each, low first
      value block  uint8 [P, ceil(D/32)]  scale codes
                   uint8 [P, ceil(D/32)]  zero codes
                   uint8 [ceil(P/4), D]   tokens 4i..4i+3 of a channel, 2 bits each, low first

2-bit codes, scale and zero codes of tokens that are not encoded are zero.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.quant import kivi2_kernels as kernels
from tierkv.quant.codes import KIVI2
from tierkv.quant.contract import Bytes, Codec, Floats, NonFiniteValues
from tierkv.quant.dynamic_map import dequantize, quantize
from tierkv.quant.floats import KIND, page_words
from tierkv.quant.tiles import LANES

_REFUSED = "the page holds NaN, infinity or values at the end of float32's range"


class Kivi2(Codec):
    name: ClassVar[str] = "kivi2"
    code: ClassVar[int] = KIVI2
    in_model_space: ClassVar[bool] = True

    def page_bytes(self, geometry: Geometry) -> int:
        if geometry.head_dim % LANES:
            raise ConfigError(
                f"kivi2 reads channels in sixteens, and head_dim is {geometry.head_dim}; use the codec k3v2"
            )
        _, _, heads, tokens, dim = geometry.shape
        return int(kernels.block_offset(geometry.num_layers, 0, 0, geometry.num_layers, heads, tokens, dim))

    def encode(self, geometry: Geometry, exact: Bytes, count: int, state: Floats, out: Bytes) -> None:
        packed = self._packed(geometry, out)
        words, kind = page_words(geometry, exact), KIND[geometry.dtype]
        layers, _, heads, tokens, dim = geometry.shape
        # scale and zero in front, so that each is one run of blocks
        keys = np.zeros((2, layers, heads, dim), np.float32)
        values = np.zeros((2, layers, heads, tokens, kernels.group_count(dim)), np.float32)
        if not kernels.measure(words, kind, count, keys, values):
            raise NonFiniteValues(_REFUSED)
        numbers = [*keys, *values]
        stored = [quantize(part) for part in numbers]
        codes = [code for code, _ in stored]
        for part, (code, largest) in zip(numbers, stored, strict=True):
            part[:] = dequantize(code, largest)
        for code in codes[2:]:
            code[:, :, count:] = 0
        header = np.concatenate([largest for _, largest in stored]).view(np.uint8)
        packed[: header.size] = header
        kernels.pack(words, kind, count, keys, values, codes[0], codes[1], codes[2], codes[3], packed)

    def decode(self, geometry: Geometry, packed: Bytes, count: int, state: Floats, out: Bytes) -> None:
        kernels.decode_page(
            self._packed(geometry, packed), count, page_words(geometry, out), KIND[geometry.dtype]
        )

    def reference_encode(self, geometry: Geometry, exact: Bytes, count: int, state: Floats) -> Bytes:
        from tierkv.quant import kivi2_reference as reference

        self.page_bytes(geometry)
        return reference.encode(geometry, exact, count)

    def reference_decode(self, geometry: Geometry, packed: Bytes, count: int, state: Floats) -> Floats:
        from tierkv.quant import kivi2_reference as reference

        return reference.decode(geometry, self._packed(geometry, packed), count)
