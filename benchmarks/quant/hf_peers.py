"""transformers' `QuantizedCache` with its two group-wise backends, hqq and quanto, at 2 bits.

Its layers do the work, as the cache makes them: groups of 64 (transformers' default) along a token's channels, that is
axis 1 for hqq and 0 for quanto, as its documentation advises. The cache keeps the latest `residual_length` tokens
exact, which is `RECENT` here, but no sinks. Its scale and zero have the model's dtype: float32 here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from tierkv.benchmarks.quant.held import Held

if TYPE_CHECKING:
    from transformers.cache_utils import QuantizedLayer

Backend = Literal["hqq", "quanto"]

BITS = 2
GROUP = 64
AXIS: dict[Backend, int] = {"hqq": 1, "quanto": 0}
PACKAGE: dict[Backend, str] = {"hqq": "hqq", "quanto": "optimum.quanto"}


def options(backend: Backend) -> dict[str, int]:
    """Of the cache and of each of its layers."""
    return {"nbits": BITS, "axis_key": AXIS[backend], "axis_value": AXIS[backend], "q_group_size": GROUP}


class Cache(Held):
    """Raises `ImportError` where the backend is not installed."""

    def __init__(self, backend: Backend, kv: torch.Tensor) -> None:
        from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer

        kind = HQQQuantizedLayer if backend == "hqq" else QuantoQuantizedLayer
        self._layer: Callable[[], QuantizedLayer] = partial(kind, **options(backend))
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
