"""Where a session's tokens lie: its page table, the blanks for tokens to come, and the plans that will change both.

Reserved pages ("blanks") are taken in the order given. A commit names runs of (region, tokens) only; the daemon lays
them out by the same rule over the same blanks. It knows the pools and that rule, and nothing of steps, locks and
messages: plans wait here until the session says that what it reads may change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.geometry import Geometry
from tierkv.pool import HbmMapping, checksum, codec_state
from tierkv.protocol import BlankPage, PageEntry, Plan, TableState
from tierkv.regions import Region, Run
from tierkv.rows import ColdRows, PageRows, PageTable
from tierkv.table import NOWHERE, Kind, lay_out, pages_needed

if (
    TYPE_CHECKING
):  # attention imports torch and codecs numba: seconds, which a worker's other calls need not pay
    from tierkv.attention.contract import PoolView
    from tierkv.prefetch.digests import Digests
    from tierkv.quant.contract import Codec


class Pools(Protocol):
    """The daemon's memory, and how pages lie in it."""

    @property
    def page_tokens(self) -> int: ...

    @property
    def straddle(self) -> bool: ...

    @property
    def codec(self) -> str: ...

    @property
    def middle(self) -> str: ...

    @property
    def digest_layers(self) -> int: ...

    def mapped(self) -> HbmMapping:
        """HBM."""
        ...

    def host(self) -> NDArray[np.uint8]: ...


class Residency:
    """Not thread-safe: the session's lock guards it.

    Args:
        damaged: told the id of a page whose host replica is not what was stored, once for a replica.
    """

    def __init__(
        self, pools: Pools, geometry: Geometry, table: TableState, damaged: Callable[[int], None]
    ) -> None:
        self.geometry = geometry
        self.table = PageTable()
        self._pools = pools
        self._damaged = damaged
        self._plans: list[Plan] = []
        self.install(table)

    def install(self, table: TableState) -> None:
        """The daemon's table takes the place of this one; plans older than it are dropped."""
        before, self.table = self.table, PageTable()
        for entry in table.pages:
            self.table.append(entry)
        self.table.trust(before)
        self.blanks: deque[BlankPage] = deque(table.blanks)
        self.version = table.version
        self._sealed_rows = self.table.length - int(table.tail_open)
        self._codec_state, self._digest = table.codec_state, table.digest
        self._view: PoolView | None = None
        self._plans = [plan for plan in self._plans if plan.version > self.version]

    def state(self, session: int, horizon: int) -> TableState:
        """Tokens `[0, horizon)` as a new owner adopts them. Pages of later tokens are blanks again."""
        rows = self.table.entries(horizon)
        is_open = len(rows) > self._sealed_rows and rows[-1].count < self.geometry.page_tokens
        blanks = [BlankPage(page, offset) for page, offset in self.table.after(horizon)]
        return TableState(
            session, self.version, horizon, rows, blanks + list(self.blanks), self._codec_state,
            is_open, self._digest,
        )  # fmt: skip

    # Plans -------------------------------------------------------------------------------------------------------

    def offer(self, plan: Plan) -> None:
        self._plans.append(plan)

    def drop_plans(self) -> None:
        self._plans.clear()

    def let_go(self) -> None:
        """Nothing of the session is left: hold no plan, and no view of the pool."""
        self._plans.clear()
        self._view = None

    def adopt(self) -> bool:
        """Do what the plans say; whether there were any."""
        if not self._plans:
            return False
        for plan in self._plans:
            if plan.version <= self.version:
                continue
            for change in plan.changes:
                self.table.change(change)
            self.version = plan.version
            if (plan.codec_state, plan.digest) != (self._codec_state, self._digest):
                self._codec_state, self._digest = plan.codec_state, plan.digest
                self._view = None
        self._plans.clear()
        return True

    # Layout ------------------------------------------------------------------------------------------------------

    def missing(self, runs: Iterable[Run]) -> int:
        """Blanks that `lay_out` would need beyond those that are there; negative where some are left."""
        return pages_needed(*self._tail(), runs, *self._rule()) - len(self.blanks)

    def lay_out(self, runs: Iterable[Run]) -> None:
        """New tokens at the end, over blanks, of which there must be enough."""
        for place in lay_out(*self._tail(), runs, *self._rule()):
            if place.fresh:
                blank = self.blanks.popleft()
                self.table.append(PageEntry(blank.page, place.region, 0, Kind.EXACT, blank.offset))
            self.table.grow_last(place.tokens)

    def cut(self, length: int) -> None:
        """Forget tokens from `length` on; their pages are the first blanks again."""
        gone = self.table.cut(length)
        self.blanks.extendleft(BlankPage(page, offset) for page, offset in reversed(gone))

    def add_blanks(self, blanks: list[BlankPage]) -> None:
        self.blanks.extend(blanks)

    def _rule(self) -> tuple[int, bool]:
        return self._pools.page_tokens, self._pools.straddle

    def _tail(self) -> tuple[Region | None, int]:
        return self.table.last() if self.table.length > self._sealed_rows else (None, 0)

    # What attention reads ----------------------------------------------------------------------------------------

    @property
    def pool(self) -> PoolView:
        """The HBM pool; made anew when the codec's state has moved."""
        view = self._view
        if view is None:
            from tierkv import quant
            from tierkv.attention.contract import PoolView

            codec = quant.get(self._pools.codec)
            hbm = self._pools.mapped()
            state = codec_state(hbm.read, self._codec_state, codec.state_floats(self.geometry))
            middle = quant.get(self._pools.middle) if self._pools.middle else None
            view = self._view = PoolView(
                hbm.data, self.geometry, codec, state, self._digests(hbm, codec), middle, hbm.tensor
            )
        return view

    def _digests(self, hbm: HbmMapping, codec: Codec) -> Digests | None:
        """How digests are read; `None` while there are none."""
        from tierkv.prefetch import digest_forms

        form, geometry = digest_forms.get(self._digest), self.geometry
        floats = form.state_floats(geometry)
        layers = min(self._pools.digest_layers, geometry.num_layers)
        if not layers or (floats and self._codec_state == NOWHERE):
            return None
        behind = self._codec_state + 4 * codec.state_floats(geometry)
        return form.of(geometry, layers, codec_state(hbm.read, behind, floats))

    @property
    def host(self) -> PoolView:
        return self.pool._replace(data=self._pools.host(), tensor=None)

    def cold(self, stop: int) -> ColdRows:
        """Pages of tokens `[0, stop)` to be read from host memory, verified the first time."""
        return self.table.cold(stop, self._verify)

    def exact(self, stop: int, most: int) -> tuple[PageRows, ColdRows] | None:
        """Likewise, and low-bit pages from their exact host copies; `None` where that is none, or more than `most`."""
        found = self.table.exact(stop, self._verify, most)
        return None if found is None or not len(found[1].pages) else found

    def _verify(self, page: int, kind: int, offset: int, expected: int) -> bool:
        """Whether a host replica's bytes are what was stored under the page's id."""
        from tierkv import quant

        geometry = self.geometry
        if kind == Kind.EXACT:
            size = geometry.page_bytes
        else:
            codec = self._pools.middle if kind == Kind.MIDDLE else self._pools.codec
            size = quant.get(codec).page_bytes(geometry)
        good = checksum(self._pools.host()[offset : offset + size], page) == expected
        if not good:
            self._damaged(page)
        return good
