"""The rotated family: keys centered, rotated and coded to 3 bits (k3v2, the default) or 2 bits (rotated2) a value,
values rotated and coded to 2 bits.

Per KV head: a key loses the head's mean key (the codec's state), both are rotated (`rotation.py`), and each token's
vector becomes Lloyd-Max codes (`lloyd.py`) with one gain. The gain is the least-squares one for the codes that the
vector's root mean square gives, stored in 8 bits relative to the largest of its page, layer and head; the codes are
then taken again for the stored gain. Tokens are independent but for that shared scale, so partial pages encode too.
All in, rotated2 takes 2.16 bits a value at head_dim 64 and 2.08 at 128; k3v2 half a bit more.

Attention needs no decoding: `q . k = q . mean + gain * sum(level[code] * rotate(q))`, and the weighted sum of values
is taken in rotated space and rotated back once (`rotated_fused.py`).

Packed page, little-endian, H heads, P page_tokens, D head_dim:

    float32 [layers, 2, H]                the largest gain of each block (keys at 0, values at 1)
    blocks  [layers] of H key blocks, then H value blocks:
      key block    uint8 [P]              gain code c: gain = largest * 2**(-c/16), 255: the token is zero
        k3v2       uint8 [D/4, P]         magnitude indices of channels 4i..4i+3 of a token, 2 bits each, low first
                   uint8 [D/8, P]         signs (1: negative) of channels 8i..8i+7, low first
        rotated2   uint8 [D/4, P]         channels 4i..4i+3 of a token, low first, each magnitude index + 2 * sign
      value block  uint8 [P]              gain code
                   uint8 [P, D/4]         byte j of a token: channels j, j+D/4, j+D/2, j+3D/4, low first, each
                                          magnitude index + 2 * sign

Key bytes run over tokens and value bytes over channels, so that both fused products fill vector lanes without a
horizontal sum. Bytes of tokens that are not encoded are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.quant import codes, rotated_decode, rotated_encode
from tierkv.quant.contract import Bytes, Codec, Floats, NonFiniteValues
from tierkv.quant.floats import KIND, page_words
from tierkv.quant.mean_keys import mean_keys
from tierkv.quant.moments import Moments
from tierkv.quant.rotated_layout import MOST_CHANNELS


class Rotated(Codec):
    """What the family shares; a codec of it says how many bits a key takes."""

    key_bits: ClassVar[int]

    def page_bytes(self, geometry: Geometry) -> int:
        if geometry.head_dim % 8 or geometry.head_dim > MOST_CHANNELS:
            raise ConfigError(
                f"{self.name} packs channels in eights, {MOST_CHANNELS} at most, and head_dim is {geometry.head_dim}; "
                "run this model without a low-bit tier"
            )
        tokens, dim = geometry.page_tokens, geometry.head_dim
        keys = tokens + tokens * dim * self.key_bits // 8
        values = tokens + tokens * dim * 2 // 8
        return geometry.num_layers * geometry.num_kv_heads * (4 + keys + 4 + values)

    def state_floats(self, geometry: Geometry) -> int:
        return geometry.num_layers * geometry.num_kv_heads * geometry.head_dim

    def fit_state(self, geometry: Geometry, pages: Sequence[Bytes], counts: Sequence[int]) -> Floats:
        """`[layers, kv_heads, head_dim]` mean keys over the written tokens, flat; zeros without any token.

        Raises:
            NonFiniteValues: a page holds NaN or infinity.
        """
        self.page_bytes(geometry)
        return mean_keys(self.name, geometry, pages, counts).ravel()

    def fit_moments(self, geometry: Geometry, moments: Moments) -> Floats:
        """Their mean keys."""
        return moments.key_mean.astype(np.float32).ravel()

    def encode(self, geometry: Geometry, exact: Bytes, count: int, state: Floats, out: Bytes) -> None:
        words, kind, mean = page_words(geometry, exact), KIND[geometry.dtype], self._mean(geometry, state)
        packed = self._packed(geometry, out)
        if not rotated_encode.encode_page(words, kind, count, mean, self.key_bits, packed):
            raise NonFiniteValues("the page holds NaN, infinity or values at the end of float32's range")

    def decode(self, geometry: Geometry, packed: Bytes, count: int, state: Floats, out: Bytes) -> None:
        words, kind, mean = page_words(geometry, out), KIND[geometry.dtype], self._mean(geometry, state)
        rotated_decode.decode_page(self._packed(geometry, packed), count, mean, self.key_bits, words, kind)

    def reference_encode(self, geometry: Geometry, exact: Bytes, count: int, state: Floats) -> Bytes:
        from tierkv.quant import rotated_reference as reference

        self.page_bytes(geometry)
        return reference.encode(geometry, exact, count, self._mean(geometry, state), self.key_bits)

    def reference_decode(self, geometry: Geometry, packed: Bytes, count: int, state: Floats) -> Floats:
        from tierkv.quant import rotated_reference as reference

        mean, packed = self._mean(geometry, state), self._packed(geometry, packed)
        return reference.decode(geometry, packed, count, mean, self.key_bits)

    def _mean(self, geometry: Geometry, state: Floats) -> Floats:
        if state.size != self.state_floats(geometry):
            raise ConfigError(
                f"{self.name}'s state has {state.size} floats and this geometry needs "
                f"{self.state_floats(geometry)}; fit it from this model's pages (fit_state)"
            )
        return state.reshape(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)


class K3V2(Rotated):
    name: ClassVar[str] = "k3v2"
    code: ClassVar[int] = codes.K3V2
    key_bits: ClassVar[int] = 3


class Rotated2(Rotated):
    name: ClassVar[str] = "rotated2"
    code: ClassVar[int] = codes.ROTATED2
    key_bits: ClassVar[int] = 2
