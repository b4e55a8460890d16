"""What a step's attention adds up, from where it runs to where it is read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.attention.contract import Leaving, PagedAttention, PoolView, Sums


class Tally:
    """The sums of one step. They leave together, once, after the last layer has added to them."""

    def __init__(self, attention: PagedAttention) -> None:
        self._attention = attention
        self._sums: list[Sums] = []
        self._leaving: Leaving | None = None

    def zeros(self, pool: PoolView, count: int) -> Sums:
        """New sums over pages of the pool."""
        made = self._attention.zeros(pool, count)
        self._sums.append(made)
        return made

    def leave(self) -> Leaving:
        """Nothing more is added. Does not wait."""
        if self._leaving is None:
            self._leaving = self._attention.leave(self._sums)
        return self._leaving

    def read(self, sums: Sums) -> NDArray[np.float32]:
        """What sums of this tally came to; waits for them where they have not arrived."""
        index = next(i for i, made in enumerate(self._sums) if made is sums)
        return self.leave().arrays()[index]


__all__ = ["Tally"]
