"""What a step reads of a session: its page table as it stands, hot pages and cold ones."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierkv.residency import Residency
from tierkv.rows import ColdRows, PageRows

if TYPE_CHECKING:  # imports torch: seconds, which a worker's other calls need not pay
    from tierkv.attention.contract import PoolView


class SessionView:
    """Reads under `changed`, the session's lock; a step's table stands still."""

    def __init__(self, changed: threading.Condition, residency: Residency, horizon: int) -> None:
        self._changed = changed
        self._residency = residency
        self._horizon = horizon

    @property
    def horizon(self) -> int:
        """Committed tokens."""
        return self._horizon

    @property
    def length(self) -> int:
        """Committed and tentative tokens."""
        return self._residency.table.tokens

    @property
    def version(self) -> int:
        """Version of the page table in use."""
        return self._residency.version

    @property
    def pool(self) -> PoolView:
        """The HBM pool as attention reads it."""
        return self._residency.pool

    @property
    def host(self) -> PoolView:
        """The host pool, read-only, as attention reads cold pages in place."""
        return self._residency.host

    def slots(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """For each token of `[start, stop)`: byte offset of its page in the pool, and its slot in the page.

        Raises:
            ValueError: a token is not in an exact HBM page (newly begun ones always are).
        """
        with self._changed:
            if not 0 <= start <= stop <= self.length:
                raise ValueError(f"tokens [{start}, {stop}) are not within the session's {self.length}")
            return self._residency.table.slots(start, stop)

    def rows(self, stop: int) -> PageRows:
        """Attendable pages that hold tokens `[0, stop)`, in token order; the arrays are the caller's."""
        with self._changed:
            return self._residency.table.rows(stop)

    @property
    def has_cold(self) -> bool:
        """Some page has no replica in HBM."""
        return self._residency.table.away > 0

    @property
    def cold_pages(self) -> int:
        """Pages without a replica in HBM."""
        return self._residency.table.away

    def cold(self, stop: int) -> ColdRows:
        """Cold pages that hold tokens `[0, stop)` and can be read in host memory, in token order.

        Their bytes are verified against the checksum the first time. A damaged page is left out, and the daemon is
        asked to bring it back, which makes it find the damage too and count the page as lost.
        """
        with self._changed:
            return self._residency.cold(stop)

    def exact(self, stop: int, most: int) -> tuple[PageRows, ColdRows] | None:
        """Pages of tokens `[0, stop)` that are exact in HBM, and those to be read from host, where low-bit pages lie
        exactly, too. `None` where the latter are more than `most`, or none.
        """
        with self._changed:
            return self._residency.exact(stop, most)
