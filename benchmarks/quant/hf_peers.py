"""transformers' `QuantizedCache` with its two group-wise backends, hqq and quanto: 2 bits, groups of 64 (its default).

Its layers do the work, as the cache makes them. `hqq` and `quanto` have the axes that its documentation advises, which
for these heads group a token's channels. `-channel` are the axes nearest to KIVI's keys per channel: quanto groups 64
tokens of a channel, hqq 64 values that lie evenly through all heads and tokens, which are one channel's where heads
times tokens is a multiple of 64, as here.

Of the exact tokens at the end the cache has its own (`residual_length`). It keeps no sinks; here they stay exact as for
all forms. Scale and zero have the model's dtype: float32 for this one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from tierkv.benchmarks.quant.held import Held

if TYPE_CHECKING:
    from transformers.cache_utils import QuantizedLayer

Backend = Literal["hqq", "quanto"]

BITS = 2
GROUP = 64
PACKAGE: dict[Backend, str] = {"hqq": "hqq", "quanto": "optimum"}


class Setting(NamedTuple):
    backend: Backend
    axis_key: int
    axis_value: int

    def options(self) -> dict[str, int]:
        """Of the cache and of each of its layers."""
        axes = {"axis_key": self.axis_key, "axis_value": self.axis_value}
        return {"nbits": BITS, "q_group_size": GROUP, **axes}


SETTINGS = {
    "hqq": Setting("hqq", 1, 1),
    "hqq-channel": Setting("hqq", 0, 1),
    "quanto": Setting("quanto", 0, 0),
    "quanto-channel": Setting("quanto", -1, 0),
}


class Cache(Held):
    """Raises `ImportError` where the backend is not installed."""

    def __init__(self, setting: Setting, kv: torch.Tensor) -> None:
        from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer

        kind = HQQQuantizedLayer if setting.backend == "hqq" else QuantoQuantizedLayer
        self._layer: Callable[[], QuantizedLayer] = partial(kind, **setting.options())
        self._exact = [(keys[None].contiguous(), values[None].contiguous()) for keys, values in kv]
        self._layers: list[QuantizedLayer] = []
        self._decoded: list[tuple[torch.Tensor, torch.Tensor]] = []

    def encode(self) -> None:
        self._layers = [self._layer() for _ in self._exact]
        for layer, (keys, values) in zip(self._layers, self._exact, strict=True):
            layer.update(keys, values)  # the first one packs everything

    def decode(self) -> None:
        self._decoded = [
            (layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values))
            for layer in self._layers
        ]

    def kv(self) -> torch.Tensor:
        return torch.stack([torch.cat(pair) for pair in self._decoded])

    @property
    def bits_per_value(self) -> float:
        packed = [part for layer in self._layers for part in (layer._quantized_keys, layer._quantized_values)]
        values = sum(part.numel() for pair in self._exact for part in pair)
        return float(8 * sum(map(stored_bytes, packed)) / values)


def stored_bytes(packed: object) -> int:
    """Of all tensors in what a backend made: codes, scale and zero."""
    if isinstance(packed, tuple):  # hqq: codes and metadata
        codes, meta = packed
        return sum(stored_bytes(part) for part in (codes, meta["scale"], meta["zero"]))
    if hasattr(packed, "__tensor_flatten__"):  # quanto: tensors in a tensor
        parts, _ = packed.__tensor_flatten__()
        return sum(stored_bytes(getattr(packed, name)) for name in parts)
    assert isinstance(packed, torch.Tensor)
    return int(packed.nbytes)
