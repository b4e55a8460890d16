"""What one step sees of its rows' cold pages: which there are, what their digests promise, what an audit finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.attention.contract import READ_ALL, Cold, ColdPages, ColdSeen, PoolView
from tierkv.protocol import Audit
from tierkv.recall import Estimates
from tierkv.rows import ColdRows, PageRows
from tierkv.table import NOWHERE, Kind
from tierkv.tally import Tally

NEEDED_LIFT = 2.0
"""A page was needed when it would have had this many times the mass of as many average tokens (tau of Eq. 3)."""

NO_ESTIMATES = Estimates(np.zeros(0, np.int64), np.zeros(0, np.float32))

WHOLE = Audit(attended=1.0, oracle=1.0, missed=0.0, estimated=0.0, needed_cold=0)
"""What an audit finds where no page is cold."""

Floats = NDArray[np.float32]


class Looks(NamedTuple):
    """What a step looks at beside its output."""

    masses: bool = False  # of tokens, for an observation
    estimates: bool = False  # of cold pages
    read: int = 0  # cold pages that a KV head reads in place
    exact: bool = False  # read low-bit pages from their exact host copies, where everything can be read
    audit: bool = False  # true attention over all pages
    layers: frozenset[int] | None = None  # whose masses are looked at; None: all, as in an audit


NOTHING = Looks()


class ColdSession(Protocol):
    @property
    def pool(self) -> PoolView: ...
    @property
    def host(self) -> PoolView: ...
    @property
    def has_cold(self) -> bool: ...
    def cold(self, stop: int) -> ColdRows: ...
    def exact(self, stop: int, most: int) -> tuple[PageRows, ColdRows] | None: ...


class ColdLook:
    """Cold pages of a step's rows; `seen` is filled by attention, layer by layer, and read when it has left."""

    def __init__(
        self,
        rows: list[ColdRows],
        bases: Sequence[int],
        pool: PoolView,
        host: PoolView,
        looks: Looks,
        tally: Tally,
    ) -> None:
        self._rows = rows
        self._tally = tally
        self._digest_layers = host.digest_layers
        self._edges = np.concatenate(([0], np.cumsum([len(row.pages) for row in rows])))
        pages = ColdPages(
            np.concatenate([row.digests for row in rows]),
            np.concatenate([row.offsets for row in rows]),
            np.concatenate([row.kinds for row in rows]),
            np.concatenate([row.counts for row in rows]),
            np.concatenate([row.starts + base for row, base in zip(rows, bases, strict=True)]),
            self._edges,
        )
        count = len(pages.offsets)
        few = (
            looks.read > 0 and max(len(row.pages) for row in rows) <= looks.read
        )  # then nothing has to be chosen
        self.cold = Cold(pages, host, READ_ALL if few else looks.read)
        self.seen = ColdSeen(
            tally.zeros(pool, count),
            tally.zeros(pool, count) if looks.audit else None,
            tally.zeros(pool, len(rows)) if looks.audit else None,
        )

    def _shares(self, row: int, in_hbm: float = 0.0) -> Floats:
        """Estimated shares of the row's cold pages, averaged over the layers that have digests.

        Args:
            in_hbm: share of the low-bit pages that were read from host: estimates were made without them.
        """
        part: Floats = self._tally.read(self.seen.estimates)[self._edges[row] : self._edges[row + 1]]
        return part * np.float32((1.0 - in_hbm) / max(1, self._digest_layers))

    def _tokens(self, row: int) -> NDArray[np.int64]:
        """Tokens of the row's cold pages."""
        rows = self._rows[row]
        tokens: NDArray[np.int64] = np.repeat(rows.starts, rows.counts) + _within(rows.counts)
        return tokens

    def in_hbm(self, row: int, mass: Floats) -> float:
        """Share of attention, by `mass` `[tokens]`, on low-bit pages that were read from host."""
        rows = self._rows[row]
        return float(mass[self._tokens(row)[np.repeat(rows.in_hbm, rows.counts)]].sum())

    def estimates(self, in_hbm: float = 0.0) -> list[Estimates]:
        found = []
        for index, row in enumerate(self._rows):
            known = row.digests != NOWHERE
            found.append(Estimates(row.pages[known], self._shares(index, in_hbm)[known]))
        return found

    def spread(self, row: int, mass: Floats, covered: NDArray[np.bool_]) -> Floats:
        """`mass` `[tokens]` with the estimates of cold tokens put in: 1 in all with what sinks took, NaN where nothing
        is known.

        `covered` are the tokens of HBM pages that were attended.
        """
        rows, cold = self._rows[row], self._tokens(row)
        if self.cold.read == READ_ALL:  # every head read them: nothing is an estimate
            covered = covered.copy()
            covered[cold] = True
            mass[~covered] = np.nan
            return mass
        shares, sunk = self._shares(row), sunk_of(mass)
        mass[~covered] = np.nan  # what was read in place was read by some heads only
        attended = np.nansum(mass)
        if attended > 0:
            mass *= np.float32(max(0.0, 1.0 - float(np.sum(shares))) / (attended + sunk))
        known = np.repeat(rows.digests != NOWHERE, rows.counts)
        mass[cold[known]] = np.repeat(shares / rows.counts, rows.counts)[known]
        return mass

    def audit(
        self,
        row: int,
        tokens: int,
        page_mass: Floats,
        kinds: NDArray[np.int8],
        layers: int,
        sunk: float = 0.0,
    ) -> Audit | None:
        """What the row's query attended of what it would have over all pages.

        Args:
            tokens: of the row, cold ones included.
            page_mass: `[HBM pages of the row]` shares of what was attended, averaged over heads and layers.
            kinds: `[HBM pages]` their `table.Kind`.
            sunk: share of what was attended that sinks took.
        """
        if self.seen.true is None or self.seen.attended is None:
            return None
        rows = self._rows[row]
        true = self._tally.read(self.seen.true)[self._edges[row] : self._edges[row + 1]] / layers
        attended = float(self._tally.read(self.seen.attended)[row]) / layers
        here = page_mass * np.float32(attended)  # of everything; averages multiply only about
        low = kinds == Kind.QUANTIZED
        rivals = np.sort(np.concatenate([here[low], true]))[::-1]
        oracle = float(
            sunk * attended + here[~low].sum() + rivals[: int(low.sum() + rows.in_hbm.sum())].sum()
        )
        cold = ~rows.in_hbm
        needed = int(np.count_nonzero(true[cold] >= NEEDED_LIFT * rows.counts[cold] / tokens))
        estimates = self._shares(row, float(true[rows.in_hbm].sum()))
        estimated = float(np.nan_to_num(estimates, posinf=0.0).sum())  # of a query that is not finite nothing
        return Audit(_share(attended), _share(oracle), _share(float(true[cold].sum())), estimated, needed)


def look_at_cold(
    sessions: Sequence[ColdSession], stops: Sequence[int], bases: Sequence[int], looks: Looks, tally: Tally
) -> ColdLook | None:
    """`None` where nothing is looked for or no page is cold. `stops`: tokens of each row that precede its query."""
    if not (looks.estimates or looks.read or looks.audit) or not any(s.has_cold for s in sessions):
        return None
    rows = [session.cold(stop) for session, stop in zip(sessions, stops, strict=True)]
    if not any(len(row.pages) for row in rows):
        return None
    return ColdLook(rows, bases, sessions[0].pool, sessions[0].host, looks, tally)


def look_at_exact(
    session: ColdSession, stop: int, looks: Looks, tally: Tally
) -> tuple[PageRows, ColdLook] | None:
    """The pages of a chunk that reads everything from where it lies exactly; `None` where it may or need not."""
    found = session.exact(stop, looks.read) if looks.exact and looks.read else None
    if found is None:
        return None
    return found[0], ColdLook([found[1]], [0], session.pool, session.host, looks, tally)


def sunk_of(mass: Floats) -> float:
    """Share of attention that sinks took, by the tokens' mass: 0 but for rounding where a model has none."""
    return max(0.0, 1.0 - float(np.nansum(mass, dtype=np.float64)))


def _within(counts: NDArray[np.int32]) -> NDArray[np.int64]:
    """0..count-1 for each count, one after the other."""
    ends = np.cumsum(counts)
    within: NDArray[np.int64] = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return within


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


__all__ = [
    "NOTHING",
    "NO_ESTIMATES",
    "WHOLE",
    "ColdLook",
    "Looks",
    "look_at_cold",
    "look_at_exact",
    "sunk_of",
]
