"""Blocks of 64 numbers that share a scale, packed by bitsandbytes: what int8, nf4 and kivi2's metadata have in common.

A number is `level[code] * largest`, with the largest magnitude of its block. bitsandbytes divides by that magnitude,
whose inverse is infinite for the smallest subnormals; so a block below the smallest normal number is packed as zeros.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import ConfigError

BLOCK: Final = 64
"""Values that share a scale: the smallest that bitsandbytes offers on every device."""

SMALLEST: Final = np.float32(2.0**-126)
"""A block whose largest magnitude is below this (subnormal) is packed as zeros."""


def block_count(values: int) -> int:
    """Blocks that `values` numbers take; the last may be short."""
    return -(-values // BLOCK)


def normal_blocks(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """`values`, flat, with subnormal blocks zeroed. A copy where that changes anything."""
    flat = np.ascontiguousarray(values).reshape(-1)
    largest = np.maximum.reduceat(np.abs(flat), np.arange(0, flat.size, BLOCK))
    if (largest >= SMALLEST).all():
        return flat
    return np.where(np.repeat(largest < SMALLEST, BLOCK)[: flat.size], np.float32(0), flat)


def bitsandbytes() -> ModuleType:
    """`bitsandbytes.functional`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError as missing:
        raise ConfigError(
            "kivi2, int8 and nf4 pack through bitsandbytes, which is not installed: pip install '.[kivi]' here, or "
            "use a codec of our own, k3v2 or rotated2"
        ) from missing
