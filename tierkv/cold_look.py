"""What one step sees of its rows' cold pages: which there are, what their digests promise, what an audit finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.attention.contract import READ_ALL, Cold, ColdPages, ColdSeen, PoolView
from tierkv.protocol import Audit
from tierkv.recall import Estimates
from tierkv.rows import ColdRows
from tierkv.table import NOWHERE, Kind

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
    audit: bool = False  # true attention over all pages


NOTHING = Looks()


class ColdSession(Protocol):
    @property
    def pool(self) -> PoolView: ...
    @property
    def host(self) -> PoolView: ...
    @property
    def has_cold(self) -> bool: ...
    def cold(self, stop: int) -> ColdRows: ...


class ColdLook:
    """Cold pages of a step's rows; `seen` is filled by attention, layer by layer."""

    def __init__(self, rows: list[ColdRows], bases: Sequence[int], host: PoolView, looks: Looks) -> None:
        self._rows = rows
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
            np.zeros(count, np.float32),
            np.zeros(count, np.float32) if looks.audit else None,
            np.zeros(len(rows), np.float32) if looks.audit else None,
        )

    def _shares(self, row: int) -> Floats:
        """Estimated shares of the row's cold pages, averaged over the layers that have digests."""
        part: Floats = self.seen.estimates[self._edges[row] : self._edges[row + 1]]
        return part / np.float32(max(1, self._digest_layers))

    def estimates(self) -> list[Estimates]:
        found = []
        for index, row in enumerate(self._rows):
            known = row.digests != NOWHERE
            found.append(Estimates(row.pages[known], self._shares(index)[known]))
        return found

    def spread(self, row: int, mass: Floats) -> Floats:
        """`mass` `[tokens]` of HBM tokens with the estimates of cold ones put in; all of it sums to 1."""
        rows, shares = self._rows[row], self._shares(row)
        cold = np.repeat(rows.starts, rows.counts) + _within(rows.counts)
        mass[cold] = np.nan  # what was read in place of them was read by some heads only
        attended = np.nansum(mass)
        expected = float(np.sum(shares))
        if attended > 0:
            mass *= np.float32(max(0.0, 1.0 - expected) / attended)
        known = np.repeat(rows.digests != NOWHERE, rows.counts)
        mass[cold[known]] = np.repeat(shares / rows.counts, rows.counts)[known]
        return mass

    def audit(
        self, row: int, tokens: int, page_mass: Floats, kinds: NDArray[np.int8], layers: int
    ) -> Audit | None:
        """What the row's query attended of what it would have over all pages.

        Args:
            tokens: of the row, cold ones included.
            page_mass: `[HBM pages of the row]` shares of what was attended, averaged over heads and layers.
            kinds: `[HBM pages]` their `table.Kind`.
        """
        if self.seen.true is None or self.seen.attended is None:
            return None
        rows = self._rows[row]
        true = self.seen.true[self._edges[row] : self._edges[row + 1]] / layers
        attended = float(self.seen.attended[row]) / layers
        here = page_mass * np.float32(attended)  # of everything; averages multiply only about
        low = kinds == Kind.QUANTIZED
        rivals = np.sort(np.concatenate([here[low], true]))[::-1]
        oracle = float(here[~low].sum() + rivals[: int(low.sum())].sum())
        needed = int(np.count_nonzero(true >= NEEDED_LIFT * rows.counts / tokens))
        return Audit(
            _share(attended),
            _share(oracle),
            _share(float(true.sum())),
            float(
                np.nan_to_num(self._shares(row), posinf=0.0).sum()
            ),  # of a query that is not finite nothing
            needed,
        )


def look_at_cold(
    sessions: Sequence[ColdSession], stops: Sequence[int], bases: Sequence[int], looks: Looks
) -> ColdLook | None:
    """`None` where nothing is looked for or no page is cold. `stops`: tokens of each row that precede its query."""
    if not (looks.estimates or looks.read or looks.audit) or not any(s.has_cold for s in sessions):
        return None
    rows = [session.cold(stop) for session, stop in zip(sessions, stops, strict=True)]
    if not any(len(row.pages) for row in rows):
        return None
    return ColdLook(rows, bases, sessions[0].host, looks)


def _within(counts: NDArray[np.int32]) -> NDArray[np.int64]:
    """0..count-1 for each count, one after the other."""
    ends = np.cumsum(counts)
    within: NDArray[np.int64] = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return within


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


__all__ = ["NOTHING", "NO_ESTIMATES", "WHOLE", "ColdLook", "Looks", "look_at_cold"]
