"""Sums of an attention that runs in this process's memory: arrays, which are read where they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierkv.attention.contract import Leaving, PoolView, Sums
from tierkv.errors import ConfigError


class Here:
    """`Leaving` of what need not leave."""

    arrived = True

    def __init__(self, sums: Sequence[Sums]) -> None:
        self._sums = [array_of(one) for one in sums]

    def arrays(self) -> list[NDArray[np.float32]]:
        return self._sums


class ArraySums:
    """What `PagedAttention` says of sums and pools, for implementations over numpy arrays."""

    name: str

    def check(self, pool: PoolView) -> None:
        if pool.tensor is not None:
            raise ConfigError(
                f"attention {self.name!r} reads pages in this process's memory, and the pool lies on "
                f"{pool.tensor.device}: use attention='triton'"
            )

    def zeros(self, pool: PoolView, count: int) -> Sums:
        return np.zeros(count, np.float32)

    def leave(self, sums: Sequence[Sums]) -> Leaving:
        return Here(sums)


def array_of(sums: Sums) -> NDArray[np.float32]:
    """Raises TypeError where the sums are another implementation's."""
    if not isinstance(sums, np.ndarray):
        raise TypeError("sums on a device are the implementation's that made them")
    return sums


__all__ = ["ArraySums", "Here", "array_of"]
