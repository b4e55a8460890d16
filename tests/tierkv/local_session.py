"""An in-memory `Session`: the session API over a numpy pool with exact pages, no daemon. A fast fixture.

It is strict where the real one is forgiving, so that a caller's mistake shows: slots of tokens that were not laid
out, a commit of nothing, a rollback below the horizon or a call on a closed session all raise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import tierkv.quant
from tierkv.attention.contract import PoolView
from tierkv.errors import OutOfCapacity
from tierkv.geometry import Geometry
from tierkv.protocol import Audit, Observing
from tierkv.regions import Region, Run, parse_region
from tierkv.rows import ColdRows
from tierkv.table import Kind, lay_out


class PageRows(NamedTuple):
    offsets: NDArray[np.int64]
    kinds: NDArray[np.int8]
    counts: NDArray[np.int32]
    starts: NDArray[np.int64]


class LocalPool:
    """Frames of one geometry in one byte range; the client of these sessions."""

    def __init__(self, geometry: Geometry, pages: int = 256, observe_every: int = 4) -> None:
        self.geometry = geometry
        self.observing = Observing(observe_every)
        self.data = np.zeros(pages * geometry.page_bytes, np.uint8)
        self.free = [page * geometry.page_bytes for page in reversed(range(pages))]
        self.sessions: list[LocalSession] = []

    def open(self, geometry: Geometry | None = None, model_id: str = "") -> LocalSession:
        assert geometry in (None, self.geometry)
        session = LocalSession(self, len(self.sessions))
        self.sessions.append(session)
        return session


class _Page(NamedTuple):
    offset: int
    region: Region
    count: int


class LocalSession:
    def __init__(self, pool: LocalPool, number: int) -> None:
        self._pool = pool
        self.id = number
        self.geometry = pool.geometry
        self.observing = pool.observing
        self.horizon = self.length = self.step = 0
        codec = tierkv.quant.get("k3v2")
        self.pool = PoolView(pool.data, pool.geometry, codec, np.zeros(0, np.float32))
        self.pages: list[_Page] = []
        self.labels: deque[Run] = deque()
        self.closed = False
        self.running = False
        # What a daemon would have been told.
        self.token_ids: list[int] = []
        self.commits: list[tuple[int, int]] = []  # (tokens, steps)
        self.observations: list[tuple[int, NDArray[np.float32]]] = []  # (step, mass)
        self.cropped = 0  # crops below the horizon
        self.expected: list[tuple[int, int]] = []  # (tokens, length of the session then), while a step ran

    has_cold = False  # every page is exact
    cold_pages = 0
    hbm_budget = 0

    @property
    def host(self) -> PoolView:
        return self.pool

    def exact(self, stop: int, most: int) -> None:
        return None

    def cold(self, stop: int) -> ColdRows:
        raise AssertionError("there are no cold pages")

    def recall(
        self, pages: Sequence[int], masses: Sequence[float], seconds: float, wait: bool = True
    ) -> None:
        raise AssertionError("there are no cold pages")

    def label(self, region: str | Region, tokens: int) -> None:
        self.labels.append(Run(parse_region(region), tokens))

    def reserve(self, tokens: int, regions: Sequence[Run] = ()) -> None:
        """Local pages are there, or `begin` says that they are not."""
        self._alive()

    def expect(self, tokens: int) -> None:
        assert self.running and self.length > self.horizon
        self.expected.append((tokens, self.length))

    def begin(self, tokens: int, regions: Sequence[Run] = ()) -> None:
        self._alive()
        self.running = True
        for place in lay_out(*self._tail(), self._runs(tokens, regions), self.geometry.page_tokens, False):
            if place.fresh:
                if not self._pool.free:
                    raise OutOfCapacity("the local pool is full")
                self.pages.append(_Page(self._pool.free.pop(), place.region, 0))
            page = self.pages[-1]
            assert page.count == place.first
            self.pages[-1] = page._replace(count=page.count + place.tokens)
            self.length += place.tokens

    def slots(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        assert 0 <= start <= stop <= self.length
        offsets = [page.offset for page in self.pages for _ in range(page.count)]
        slots = [slot for page in self.pages for slot in range(page.count)]
        return np.array(offsets[start:stop], np.int64), np.array(slots[start:stop], np.int32)

    def rows(self, stop: int) -> PageRows:
        assert self.running and 0 <= stop <= self.length
        counts = np.array([page.count for page in self.pages], np.int64)
        starts = np.cumsum(counts) - counts
        held = starts < stop
        return PageRows(
            np.array([page.offset for page in self.pages], np.int64)[held],
            np.full(int(held.sum()), Kind.EXACT, np.int8),
            np.minimum(counts, stop - starts)[held].astype(np.int32),
            starts[held].astype(np.int64),
        )

    def commit(self, token_ids: NDArray[np.int32] | None = None, *, steps: int = 0) -> None:
        self._alive()
        fresh = self.length - self.horizon
        assert fresh > 0
        if token_ids is not None:
            assert token_ids.dtype == np.int32 and token_ids.shape == (fresh,)
            self.token_ids += token_ids.tolist()
        self.horizon = self.length
        self.step += steps
        self.commits.append((fresh, steps))

    def observe(self, mass: NDArray[np.float32], audit: Audit | None = None) -> None:
        assert mass.dtype == np.float32 and mass.shape == (self.length,)
        self.observations.append((self.step, mass.copy()))

    def end(self) -> None:
        self.running = False

    def rollback(self, length: int) -> None:
        assert self.horizon <= length <= self.length
        self._cut(length)

    def crop(self, length: int) -> None:
        self._alive()
        assert 0 <= length <= self.horizon == self.length
        self.cropped += 1
        self.horizon = length
        self._cut(length)
        del self.token_ids[length:]

    def fork(self) -> LocalSession:
        self._alive()
        assert self.horizon == self.length
        if len(self._pool.free) < len(self.pages):
            raise OutOfCapacity("the local pool is full")
        child = self._pool.open()
        child.horizon, child.length, child.step = self.horizon, self.length, self.step
        child.token_ids = list(self.token_ids)
        size = self.geometry.page_bytes
        for page in self.pages:
            offset = self._pool.free.pop()
            self._pool.data[offset : offset + size] = self._pool.data[page.offset : page.offset + size]
            child.pages.append(page._replace(offset=offset))
        return child

    def close(self) -> None:
        self._alive()
        self._cut(0)
        self.closed = True

    def _alive(self) -> None:
        assert not self.closed, "the session is closed"

    def _tail(self) -> tuple[Region | None, int]:
        return (self.pages[-1].region, self.pages[-1].count) if self.pages else (None, 0)

    def _runs(self, tokens: int, regions: Sequence[Run]) -> list[Run]:
        runs, left = [], tokens
        while left and self.labels:
            run = self.labels.popleft()
            take = min(left, run.tokens)
            runs.append(Run(run.region, take))
            left -= take
            if run.tokens > take:
                self.labels.appendleft(Run(run.region, run.tokens - take))
        told = [run.region for run in regions for _ in range(run.tokens)]
        runs += [Run(region, 1) for region in told[tokens - left :]]
        if left and not told:
            runs.append(Run(Region.SCRATCHPAD if tokens == 1 else Region.USER, left))
        return runs

    def _cut(self, length: int) -> None:
        """Freed frames are filled with NaN: whoever still reads them sees it."""
        while self.length > length:
            page = self.pages.pop()
            keep = max(0, page.count - (self.length - length))
            self.length -= page.count - keep
            if keep:
                self.pages.append(page._replace(count=keep))
            else:
                self._pool.data[page.offset : page.offset + self.geometry.page_bytes] = 0xFF
                self._pool.free.append(page.offset)
