"""K/V that a form packs and unpacks, and our codecs as such."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from tierkv.benchmarks.quant.pages import from_pages, to_pages
from tierkv.geometry import Geometry
from tierkv.quant.contract import Codec, Floats


class Held(ABC):
    """K/V `[layers, 2, kv_heads, tokens, head_dim]` laid out as the form wants them when it is made, so that `encode`
    and `decode` do nothing else and can be timed.
    """

    @abstractmethod
    def encode(self) -> None:
        """Pack all of it."""

    @abstractmethod
    def decode(self) -> None:
        """Unpack what `encode` packed."""

    @abstractmethod
    def kv(self) -> torch.Tensor:
        """What `decode` gave, shaped as the K/V were."""

    @property
    @abstractmethod
    def bits_per_value(self) -> float:
        """Of what `encode` packed, all metadata counted."""


class Pages(Held):
    """A codec's packed pages."""

    def __init__(self, codec: Codec, geometry: Geometry, state: Floats, kv: torch.Tensor) -> None:
        self.codec, self.geometry, self.state = codec, geometry, state
        self._exact = to_pages(geometry, kv)
        self._packed = np.zeros((len(self._exact), codec.page_bytes(geometry)), np.uint8)
        self._decoded = np.empty_like(self._exact)

    def encode(self) -> None:
        for exact, packed in zip(self._exact, self._packed, strict=True):
            self.codec.encode(self.geometry, exact, self.geometry.page_tokens, self.state, packed)

    def decode(self) -> None:
        for packed, out in zip(self._packed, self._decoded, strict=True):
            self.codec.decode(self.geometry, packed, self.geometry.page_tokens, self.state, out)

    def kv(self) -> torch.Tensor:
        return from_pages(self.geometry, self._decoded)

    @property
    def bits_per_value(self) -> float:
        return self.codec.bits_per_value(self.geometry)
