"""What a codec is: the one contract that every low-bit form of a page fulfils (tests: `tests/contract/test_codec.py`).

A codec turns the exact bytes of one page, `[layers, 2, kv_heads, page_tokens, head_dim]` in the geometry's dtype, into
`page_bytes(geometry)` packed bytes and back. It is a pure function of its arguments: no clock, no global, no thread.
It may need a small float32 state per model (the rotated family: the mean key of each layer and head), fitted once from
exact pages and then frozen, which pages of all sessions of the model share.

Every codec exists twice: a readable torch reference (`reference_encode`, `reference_decode`) and numba kernels
(`encode`, `decode`), which agree bit for bit on packed bytes, and to the rounding of float32 on decoded values.
Attention never decodes a page: it calls the fused kernels of `quant/fused.py`, which read packed bytes in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.quant.moments import Moments

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class LayerBlock(NamedTuple):
    """`code`, `layer` and `num_layers` are arguments of the fused kernels. Their `page` starts `start` bytes into the
    packed page, and their `state` is that slice of the codec's.
    """

    code: int
    start: int
    state: slice
    layer: int
    num_layers: int


class Codec(ABC):
    """A low-bit form of a page. Instances hold no state."""

    name: ClassVar[str]
    code: ClassVar[int]
    """Small integer by which kernels dispatch; never reused for another format."""
    in_model_space: ClassVar[bool] = False
    """Attention needs neither a prepared query nor finished values, and no state: its sums are those of exact pages."""
    takes_moments: ClassVar[bool] = False
    """Whether the state of `fit_moments` is better than that of `fit_state`."""

    @abstractmethod
    def page_bytes(self, geometry: Geometry) -> int:
        """Packed bytes of a page, all metadata included.

        Raises:
            ConfigError: this geometry cannot be packed (for instance an odd head_dim).
        """

    def state_floats(self, geometry: Geometry) -> int:
        """float32 values of per-model state; 0 when the codec needs none."""
        return 0

    def fit_state(self, geometry: Geometry, pages: Sequence[Bytes], counts: Sequence[int]) -> Floats:
        """The per-model state from exact pages, of which the first `counts[i]` tokens are written."""
        return np.zeros(0, np.float32)

    def fit_moments(self, geometry: Geometry, moments: Moments) -> Floats:
        """The per-model state from what was observed of the model (`tierkv calibrate`)."""
        return self.fit_state(geometry, [], [])

    @abstractmethod
    def encode(self, geometry: Geometry, exact: Bytes, count: int, state: Floats, out: Bytes) -> None:
        """Pack the first `count` tokens of `exact` into `out` (`page_bytes` long; every byte is written).

        Raises:
            NonFiniteValues: the page holds NaN or infinity; `out` is undefined and the page must stay exact.
        """

    @abstractmethod
    def decode(self, geometry: Geometry, packed: Bytes, count: int, state: Floats, out: Bytes) -> None:
        """Unpack into exact layout and dtype; tokens from `count` on are zeroed."""

    @abstractmethod
    def reference_encode(self, geometry: Geometry, exact: Bytes, count: int, state: Floats) -> Bytes:
        """The same as `encode`, in plain torch."""

    @abstractmethod
    def reference_decode(self, geometry: Geometry, packed: Bytes, count: int, state: Floats) -> Floats:
        """`[layers, 2, kv_heads, page_tokens, head_dim]` float32, in plain torch."""

    def kernel_code(self, geometry: Geometry) -> int:
        """What the fused kernels want as `code`; other than `code` only where the format depends on the page dtype."""
        return self.code

    def layer_block(self, geometry: Geometry, layer: int) -> LayerBlock:
        """Where the fused kernels find one layer of a packed page, and what they have to be told."""
        code, floats = self.kernel_code(geometry), self.state_floats(geometry)
        return LayerBlock(code, 0, slice(0, floats), layer, geometry.num_layers)

    def members(self) -> tuple[Codec, ...]:
        """The plain codecs it is made of."""
        return (self,)

    def bits_per_value(self, geometry: Geometry) -> float:
        """Bits a value, all metadata of a full page counted."""
        return self.page_bytes(geometry) * 8 / geometry.values

    def _packed(self, geometry: Geometry, buffer: Bytes) -> Bytes:
        """The page at the start of a buffer.

        Raises:
            ConfigError: the buffer is too short.
        """
        size = self.page_bytes(geometry)
        if buffer.size < size:
            raise ConfigError(
                f"a {self.name} page of this geometry takes {size} bytes, and the buffer has {buffer.size}"
            )
        return buffer[:size]


class NonFiniteValues(ValueError):
    """A page with NaN or infinity is refused for quantization and stays exact."""
