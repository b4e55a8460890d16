"""exact: a page is its own packed form, byte for byte, with the tokens that are not written zeroed.

It is there so that the exact form can be named wherever a codec can. It keeps the contract like any other: kernels read
it in place (by a code for each page dtype, `codes.py`), and NaN and infinity are refused.
"""

from __future__ import annotations

from typing import ClassVar, Final

from tierkv.geometry import Geometry
from tierkv.quant import codes
from tierkv.quant.contract import Bytes, Codec, Floats, NonFiniteValues
from tierkv.quant.floats import KIND, page_words

_EXPONENT: Final = {"float32": 0x7F80_0000, "float16": 0x7C00, "bfloat16": 0x7F80}
"""The exponent bits, which are all set in NaN and infinity only."""


class Exact(Codec):
    name: ClassVar[str] = "exact"
    code: ClassVar[int] = codes.EXACT
    in_model_space: ClassVar[bool] = True

    def page_bytes(self, geometry: Geometry) -> int:
        return geometry.page_bytes

    def kernel_code(self, geometry: Geometry) -> int:
        return self.code + KIND[geometry.dtype]

    def encode(self, geometry: Geometry, exact: Bytes, count: int, state: Floats, out: Bytes) -> None:
        written = page_words(geometry, exact)[:, :, :, :count]
        exponent = written.dtype.type(_EXPONENT[geometry.dtype])
        if ((written & exponent) == exponent).any():
            raise NonFiniteValues("the page holds NaN or infinity")
        self._copy(geometry, exact, count, self._packed(geometry, out))

    def decode(self, geometry: Geometry, packed: Bytes, count: int, state: Floats, out: Bytes) -> None:
        self._copy(geometry, self._packed(geometry, packed), count, out)

    def reference_encode(self, geometry: Geometry, exact: Bytes, count: int, state: Floats) -> Bytes:
        import torch

        from tierkv.quant.rotated_reference import read_exact

        values = read_exact(geometry, exact)
        values[:, :, :, count:] = 0
        if not torch.isfinite(values).all():
            raise NonFiniteValues("the page holds NaN or infinity")
        narrow = values.to(getattr(torch, geometry.dtype))  # they came from this dtype: nothing is rounded
        return narrow.view(torch.uint8).flatten().numpy()

    def reference_decode(self, geometry: Geometry, packed: Bytes, count: int, state: Floats) -> Floats:
        from tierkv.quant.rotated_reference import read_exact

        values = read_exact(geometry, self._packed(geometry, packed))
        values[:, :, :, count:] = 0
        found: Floats = values.numpy()
        return found

    @staticmethod
    def _copy(geometry: Geometry, source: Bytes, count: int, target: Bytes) -> None:
        words, to = page_words(geometry, source), page_words(geometry, target)
        to[:, :, :, :count] = words[:, :, :, :count]
        to[:, :, :, count:] = 0
