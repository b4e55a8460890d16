"""K/V through a form."""

from __future__ import annotations

import torch

from tierkv.benchmarks.quant.held import Held


def kept(held: Held) -> torch.Tensor:
    """What `held` gives back."""
    held.encode()
    held.decode()
    return held.kv()
