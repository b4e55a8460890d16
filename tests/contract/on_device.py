"""`TritonAttention` as the contract's tests call it: arrays in, sums in arrays out. In triton's interpreter only, whose
products are as exact as the contract asks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tierkv.attention.contract import Cold, ColdSeen, PoolView
from tierkv.errors import ConfigError

pytest.importorskip("triton", reason="device kernels need triton: pip install triton")

from tests.triton_device import DEVICE
from tierkv.attention.triton_attention import TritonAttention
from tierkv.triton_setup import interpreting

if not interpreting():
    pytest.skip("the contract's tolerances are the interpreter's", allow_module_level=True)


class OnDevice(TritonAttention):
    """The HBM pool is handed over as a tensor and nothing else, the host pool as the array that it is."""

    def __init__(self) -> None:
        super().__init__()
        self._views: dict[int, tuple[PoolView, PoolView]] = {}

    def write(self, pool: PoolView, *args: Any) -> None:  # type: ignore[override]
        super().write(self._there(pool), *args)

    def decode(self, query: Any, pool: PoolView, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().decode(query, self._there(pool), *map(_sums, args), **_named(kwargs))

    def prefill(self, query: Any, keys: Any, values: Any, pool: PoolView, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().prefill(query, keys, values, self._there(pool), *map(_sums, args), **_named(kwargs))

    def _there(self, pool: PoolView) -> PoolView:
        if "kivi2" in pool.codec.name or (pool.middle is not None and "kivi2" in pool.middle.name):
            with pytest.raises(ConfigError, match="kivi2"):
                self.check(pool)
            pytest.skip("kivi2 is refused")
        self.check(pool)
        found = self._views.get(id(pool))
        if found is None:
            tensor = torch.from_numpy(pool.data).to(DEVICE)
            found = self._views[id(pool)] = pool, pool._replace(data=np.zeros(0, np.uint8), tensor=tensor)
        return found[1]


def _sums(value: Any) -> Any:
    """Arrays that are added to as tensors over the same memory; everything else as it is."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return ColdSeen(*map(_sums, value)) if isinstance(value, ColdSeen) else value


def _named(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, Cold) else _sums(value) for name, value in kwargs.items()}
