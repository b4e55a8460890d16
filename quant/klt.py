"""klt2 and klt25: a transform fitted to the model, and bits where they count; 2.16 and 2.66 bits a value.

Each head's keys and values go through a matrix of its own into a space where channels are uncorrelated and sorted by
what their errors cost (`klt_fit.py`, from moments that `tierkv calibrate` measures). There groups of 16 channels get 0
to 5 bits each, 2 (or 2.5) on average over a page: where an error would change the model's answer most. As in the
rotated family (`rotated.py`), keys lose the head's mean first, and each token has one gain, the least-squares one, in 8
bits. Without moments the matrix is the rotated family's and all channels get like bits: klt2 is as good as rotated2
then.

    u = analysis (x - mean)     code = nearest level of u / gain     x' = gain * synthesis levels[code] + mean

Attention needs no decoding: `q . x' = q . mean + gain * (synthesis^T q) . levels[code]`, and the weighted sum of values
is taken in the space of codes and leaves it once (`klt_fused.py`). Transform coding of K/V caches: KVTC (arXiv
2511.01815), which decodes before use; queries as the metric: OSCAR.

The state, float32, a record for each layer, side (0 keys, 1 values) and head:

    [1]       byte offset of the record's block in a packed page
    [D/16]    bits of each group of 16 channels
    [D/16]    what a squared error of a unit in the group costs (weights of the least-squares gain)
    [D]       mean (zeros for values)
    [D, D]    analysis
    [D, D]    synthesis

Packed page, little-endian, H heads, P page_tokens, D head_dim:

    float32 [layers, 2, H]     the largest gain of each block
    a block for each layer, side and head:
      uint8 [P]                gain code c: gain = largest * 2**(-c/16), 255: the token is zero
      keys    channel by channel, for each of its bits ceil(P/8) bytes: bit t is token t's
      values  token by token, group by group, for each of the group's bits 2 bytes: bit c is channel c's

The first bit of a code is its sign, the others are its magnitude index, low first (`klt_levels.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.quant import codes, klt_fit, klt_kernels
from tierkv.quant.contract import Bytes, Codec, Floats, NonFiniteValues
from tierkv.quant.floats import KIND, page_words
from tierkv.quant.klt_layout import GROUP, block_bytes, record_floats
from tierkv.quant.mean_keys import mean_keys
from tierkv.quant.moments import Moments


class KLT(Codec):
    """What both share; a codec of it says how many bits a channel has on average."""

    takes_moments: ClassVar[bool] = True
    mean_bits: ClassVar[float]

    def page_bytes(self, geometry: Geometry) -> int:
        if geometry.head_dim % GROUP:
            raise ConfigError(
                f"{self.name} packs channels in groups of {GROUP}, and head_dim is {geometry.head_dim}; use k3v2"
            )
        bits = klt_fit.layer_bits(geometry, self.mean_bits)
        gains = (geometry.num_kv_heads - 1) * geometry.page_tokens  # `block_bytes` counts one head's
        sides = sum(gains + block_bytes(side, bits, geometry.page_tokens) for side in range(2))
        return geometry.num_layers * (8 * geometry.num_kv_heads + sides)

    def kernel_code(self, geometry: Geometry) -> int:
        return codes.KLT2  # where bits lie is in the state

    def state_floats(self, geometry: Geometry) -> int:
        return geometry.num_layers * 2 * geometry.num_kv_heads * record_floats(geometry.head_dim)

    def fit_state(self, geometry: Geometry, pages: Sequence[Bytes], counts: Sequence[int]) -> Floats:
        """Without moments: the mean keys of the written tokens, and equal bits.

        Raises:
            NonFiniteValues: a page holds NaN or infinity.
        """
        self.page_bytes(geometry)
        mean = mean_keys(self.name, geometry, pages, counts)
        return klt_fit.neutral(geometry, mean, self.mean_bits)

    def fit_moments(self, geometry: Geometry, moments: Moments) -> Floats:
        self.page_bytes(geometry)
        return klt_fit.fit(geometry, moments, self.mean_bits)

    def encode(self, geometry: Geometry, exact: Bytes, count: int, state: Floats, out: Bytes) -> None:
        words, kind, packed = page_words(geometry, exact), KIND[geometry.dtype], self._packed(geometry, out)
        if not klt_kernels.encode_page(words, kind, count, self._checked(geometry, state), packed):
            raise NonFiniteValues("the page holds NaN, infinity or values at the end of float32's range")

    def decode(self, geometry: Geometry, packed: Bytes, count: int, state: Floats, out: Bytes) -> None:
        words, kind, packed = page_words(geometry, out), KIND[geometry.dtype], self._packed(geometry, packed)
        klt_kernels.decode_page(packed, count, self._checked(geometry, state), words, kind)

    def reference_encode(self, geometry: Geometry, exact: Bytes, count: int, state: Floats) -> Bytes:
        from tierkv.quant import klt_reference as reference

        return reference.encode(
            geometry, exact, count, self._checked(geometry, state), self.page_bytes(geometry)
        )

    def reference_decode(self, geometry: Geometry, packed: Bytes, count: int, state: Floats) -> Floats:
        from tierkv.quant import klt_reference as reference

        return reference.decode(
            geometry, self._packed(geometry, packed), count, self._checked(geometry, state)
        )

    def _checked(self, geometry: Geometry, state: Floats) -> Floats:
        if state.size != self.state_floats(geometry):
            raise ConfigError(
                f"{self.name}'s state has {state.size} floats and this geometry needs {self.state_floats(geometry)}; "
                "fit it from this model's moments or pages (fit_moments, fit_state)"
            )
        return state


class KLT2(KLT):
    name: ClassVar[str] = "klt2"
    code: ClassVar[int] = codes.KLT2
    mean_bits: ClassVar[float] = 2.0


class KLT25(KLT):
    name: ClassVar[str] = "klt25"
    code: ClassVar[int] = codes.KLT25
    mean_bits: ClassVar[float] = 2.5
