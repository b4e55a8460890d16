"""transformers' caches, filled with K/V that the model made already."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, QuantizedCache
from transformers.cache_utils import QuantizedLayer

from tierkv.benchmarks.decode import AT_BASE, DYNAMIC
from tierkv.benchmarks.decode.arm import Arm, Dense, Held
from tierkv.benchmarks.decode.models import Models
from tierkv.benchmarks.quant.hf_peers import PACKAGE, SETTINGS, stored_bytes
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from transformers import Cache, PretrainedConfig

QUANTIZED = {"hqq2": SETTINGS["hqq"], "quanto2": SETTINGS["quanto"]}

IN_LINE = (
    "no CUDA stream here: each layer is fetched and given back in line, and host memory is the device's own, so "
    "nothing is copied"
)


class PeerArm(Arm):
    @property
    def packs_every(self) -> int:
        layer = self.cache.layers[0]
        return int(layer.residual_length) if isinstance(layer, QuantizedLayer) else 0

    def held(self) -> Held:
        kept = sum(map(layer_bytes, self.cache.layers))
        return Held(kept, attended=kept)

    def close(self) -> None:
        self.cache.layers.clear()


class OffloadedInLine(DynamicCache):  # type: ignore[misc]
    """transformers' offloading without its streams: its layers move themselves, before and after their update."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        self.layers[layer].prefetch()
        updated = super().update(keys, values, layer, *args, **kwargs)
        self.layers[layer].offload()
        return updated


def peer(name: str, models: Models, dense: Dense, batch: int) -> PeerArm:
    """An arm that is not tierkv's. Raises `ConfigError` where it cannot run here."""
    config = models.plain.config
    kind = name.removesuffix(AT_BASE)
    make, note = _maker(kind, config)
    cache = make()
    start = time.perf_counter()
    for layer, (keys, values) in enumerate(dense):
        cache.update(keys.expand(batch, -1, -1, -1), values.expand(batch, -1, -1, -1), layer)
    seconds = time.perf_counter() - start
    return PeerArm(name, models.eager if kind == "eager" else models.plain, cache, seconds, note)


def _maker(name: str, config: PretrainedConfig) -> tuple[Callable[[], Cache], str]:
    if setting := QUANTIZED.get(name):
        if importlib.util.find_spec(PACKAGE[setting.backend]) is None:
            raise ConfigError('not installed: pip install ".[bench]" in a checkout of tierkv')
        make = partial(QuantizedCache, setting.backend, config, **setting.options())
        return (
            make,
            "transformers' QuantizedCache; it packs all tokens anew every 128, which no timed step does",
        )
    if name == "offloaded":
        if torch.cuda.is_available():
            return partial(DynamicCache, config=config, offloading=True), ""
        return partial(OffloadedInLine, config=config), IN_LINE
    assert name in (DYNAMIC, "eager")
    return partial(DynamicCache, config=config), ""


def layer_bytes(layer: Any) -> int:
    """Of all tensors that a layer of a cache holds: exact ones, codes, scales and zeros."""
    exact = sum(int(part.nbytes) for part in (layer.keys, layer.values))
    packed = (getattr(layer, name, None) for name in ("_quantized_keys", "_quantized_values"))
    return exact + sum(stored_bytes(part) for part in packed if part is not None)
