"""Room in the host pool. When it is full, give up in this order what costs least:

1. backups of pages that are exact in HBM and score no lower than the page in need (redundant today, and the last to
   be demoted);
2. exact copies in favour of the low-bit form (the page becomes lossy): of low-bit pages in HBM that score no higher
   than the page in need, else of the coldest page that is only in host;
3. cold pages whose score is below `drop_below` (default 0: never).

Only a page that must leave its tier makes room; a routine backup takes what is free or waits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.allocator import SizeClass
from tierkv.daemon.pages import Goal, Reason
from tierkv.daemon.state import State
from tierkv.table import NOWHERE, Kind


class HostRoom:
    """`drop` is how a page is dropped, `Tiers.drop`."""

    def __init__(self, state: State, drop: Callable[[int, Reason], None]) -> None:
        self._state = state
        self._drop = drop
        self._compressing = False

    def allocate(self, size_class: SizeClass, slot: int, compress: Callable[[int], bool]) -> int | None:
        """Offset of a host replica for `slot`; None when there is none now. What is given up retires first."""
        host, pages = self._state.host, self._state.pages
        offset = None if self._last_frame(size_class, slot) else host.allocate(size_class)
        must = pages.goal[slot] != Goal.NONE
        if offset is None and must and not self._compressing and self._state.retiring_host < size_class.frame:
            self._give_up(slot, compress)
            offset = None if self._last_frame(size_class, slot) else host.allocate(size_class)
        return offset

    def _last_frame(self, size_class: SizeClass, slot: int) -> bool:
        """An exact page would take the frame that low-bit pages need: without one, nothing could be compressed."""
        host, model = self._state.host, self._state.model_of(slot)
        low_bit = size_class.item != size_class.frame or host.free_items(model.quant)
        return not low_bit and host.free_frames(size_class.frame) < 2

    def _give_up(self, slot: int, compress: Callable[[int], bool]) -> None:
        pages = self._state.pages
        score = pages.score[slot]
        exact = self._candidates(pages.host_kind == Kind.EXACT)
        redundant = exact[(pages.kind[exact] == Kind.EXACT) & (pages.score[exact] >= score)]
        if len(redundant):
            self._release(int(redundant[np.argmax(pages.score[redundant])]))
            return
        lower = exact[pages.score[exact] <= score]
        doubled = lower[pages.kind[lower] == Kind.QUANTIZED]
        if len(doubled):
            victim = int(doubled[np.argmin(pages.score[doubled])])
            pages.lossy[victim] = True
            self._release(victim)
            return
        cold = exact[(pages.kind[exact] == Kind.NONE) & ~pages.refused[exact]]
        if len(cold):
            self._compressing = True  # its low-bit form must not make room in turn
            started = compress(int(cold[np.argmin(pages.score[cold])]))
            self._compressing = False
            if started:
                return
        dropped = self._candidates(pages.kind == Kind.NONE)
        dropped = dropped[pages.score[dropped] < self._state.thresholds.drop_below]
        if len(dropped):
            self._drop(int(dropped[np.argmin(pages.score[dropped])]), "host-full")

    def _candidates(self, condition: NDArray[np.bool_]) -> NDArray[np.int64]:
        pages = self._state.pages
        idle = pages.live & ~pages.doomed & (pages.goal == Goal.NONE) & (pages.moving == 0)
        return np.flatnonzero(idle & (pages.host != NOWHERE) & condition)

    def _release(self, slot: int) -> None:
        state, pages = self._state, self._state.pages
        state.retire("host", state.host_class(slot), int(pages.host[slot]), slot)
        pages.host[slot], pages.host_kind[slot] = NOWHERE, Kind.NONE
        state.touch(slot, quiet=True)
