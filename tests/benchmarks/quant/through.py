"""K/V through a form, and a form that keeps nothing."""

from __future__ import annotations

import torch

from tierkv.benchmarks.quant.held import Held


def kept(held: Held) -> torch.Tensor:
    """What `held` gives back."""
    held.encode()
    held.decode()
    return held.kv()


class Zeros(Held):
    """Loses everything."""

    def __init__(self, kv: torch.Tensor) -> None:
        self._kv = torch.zeros_like(kv)

    def encode(self) -> None: ...

    def decode(self) -> None: ...

    def kv(self) -> torch.Tensor:
        return self._kv

    @property
    def bits_per_value(self) -> float:
        return 0.0
