"""A session's page table on the worker's side: one row a page, in token order, as ready numpy arrays.

Rows are appended, counted up and cut at the end; replicas change in place. `Row` arrays are what attention reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.protocol import PageChange, PageEntry
from tierkv.regions import Region
from tierkv.table import NOWHERE, Kind

_FIRST_CAPACITY = 64


class PageRows(NamedTuple):
    """Attendable pages in token order. `starts` is the session's index of a page's first token."""

    offsets: NDArray[np.int64]  # bytes into the HBM pool
    kinds: NDArray[np.int8]  # table.Kind: EXACT, QUANTIZED or MIDDLE
    counts: NDArray[np.int32]  # tokens of the page that are attended
    starts: NDArray[np.int64]


class ColdRows(NamedTuple):
    """Pages without an HBM replica whose host replica can be read, in token order."""

    pages: NDArray[np.int64]  # ids
    digests: NDArray[np.int64]  # bytes into the HBM pool, NOWHERE where there is none
    offsets: NDArray[np.int64]  # bytes into the host pool
    kinds: NDArray[np.int8]
    counts: NDArray[np.int32]
    starts: NDArray[np.int64]
    in_hbm: NDArray[np.bool_]  # a low-bit replica is there, but the exact host copy is to be read


NO_COLD_ROWS = ColdRows(
    np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int8),
    np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.bool_),
)  # fmt: skip


Verify = Callable[[int, int, int, int], bool]
"""`(page id, table.Kind, host offset, checksum)`: whether these host bytes are what was stored."""


class PageTable:
    """Not thread-safe: the session's lock guards it."""

    def __init__(self) -> None:
        self.length = 0  # rows
        self.page = np.zeros(_FIRST_CAPACITY, np.int64)
        self.region = np.zeros(_FIRST_CAPACITY, np.int8)
        self.count = np.zeros(_FIRST_CAPACITY, np.int32)
        self.start = np.zeros(_FIRST_CAPACITY, np.int64)
        self.kind = np.zeros(_FIRST_CAPACITY, np.int8)
        self.offset = np.zeros(_FIRST_CAPACITY, np.int64)
        self.host_kind = np.zeros(_FIRST_CAPACITY, np.int8)
        self.host_offset = np.zeros(_FIRST_CAPACITY, np.int64)
        self.host_checksum = np.zeros(_FIRST_CAPACITY, np.uint64)
        self.digest = np.zeros(_FIRST_CAPACITY, np.int64)
        self.verified = np.zeros(
            _FIRST_CAPACITY, np.int8
        )  # of the host replica: 0 not yet, 1 good, -1 damaged
        self.index: dict[int, int] = {}
        self._away = 0  # rows without an HBM replica

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return int(self.start[self.length - 1] + self.count[self.length - 1]) if self.length else 0

    def append(self, entry: PageEntry) -> None:
        if self.length == len(self.page):
            for name, array in list(vars(self).items()):
                if isinstance(array, np.ndarray):
                    setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        row, start = self.length, self.tokens
        self.length += 1
        self.page[row], self.region[row], self.count[row], self.start[row] = (
            entry.page,
            entry.region,
            entry.count,
            start,
        )
        self.index[entry.page] = row
        self._away += entry.kind == Kind.NONE
        self._place(row, entry)

    def change(self, change: PageChange) -> None:
        """New replicas of a page; ignored for a page that the table does not have (any more)."""
        row = self.index.get(change.page)
        if row is not None:
            self._away += int(change.kind == Kind.NONE) - int(self.kind[row] == Kind.NONE)
            self._place(row, change)

    def grow_last(self, tokens: int) -> None:
        self.count[self.length - 1] += tokens

    def last(self) -> tuple[Region, int]:
        """Region and count of the last page; there must be one."""
        return Region(int(self.region[self.length - 1])), int(self.count[self.length - 1])

    def cut(self, tokens: int) -> list[tuple[int, int]]:
        """Keep `[0, tokens)`; returns `(page, offset)` of the rows that went, in token order."""
        keep = int(np.searchsorted(self.start[: self.length], tokens, side="left"))
        gone = [(int(self.page[row]), int(self.offset[row])) for row in range(keep, self.length)]
        for page, _ in gone:
            del self.index[page]
        self._away -= int(np.count_nonzero(self.kind[keep : self.length] == Kind.NONE))
        self.length = keep
        if keep:
            self.count[keep - 1] = min(int(self.count[keep - 1]), tokens - int(self.start[keep - 1]))
        return gone

    def row_of(self, token: int) -> int:
        return int(np.searchsorted(self.start[: self.length], token, side="right")) - 1

    def slots(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Byte offset of the page and slot in it, for each token of `[start, stop)`."""
        last = self.length - 1
        if last >= 0 and start >= self.start[last] and self.kind[last] == Kind.EXACT:  # a decode step
            first = start - int(self.start[last])
            offsets = np.full(stop - start, self.offset[last], np.int64)
            return offsets, np.arange(first, first + stop - start, dtype=np.int32)
        tokens = np.arange(start, stop, dtype=np.int64)
        rows = np.searchsorted(self.start[: self.length], tokens, side="right") - 1
        if np.any(self.kind[rows] != Kind.EXACT):
            raise ValueError(
                f"tokens [{start}, {stop}) do not all lie in exact HBM pages, so they cannot be written"
            )
        return self.offset[rows], (tokens - self.start[rows]).astype(np.int32)

    def rows(self, stop: int) -> PageRows:
        """Attendable pages that hold tokens `[0, stop)`, as arrays of the caller's own."""
        top = int(np.searchsorted(self.start[: self.length], stop, side="left"))
        counts = self.count[:top].copy()
        if top:
            counts[-1] = min(int(counts[-1]), stop - int(self.start[top - 1]))
        if not self._away:
            return PageRows(self.offset[:top].copy(), self.kind[:top].copy(), counts, self.start[:top].copy())
        here = self.kind[:top] != Kind.NONE
        return PageRows(self.offset[:top][here], self.kind[:top][here], counts[here], self.start[:top][here])

    def cold(self, stop: int, verify: Verify) -> ColdRows:
        """Cold pages that hold tokens `[0, stop)`. A host replica is verified once, before it is first named here; one
        that is damaged is left out.
        """
        if not self._away:
            return NO_COLD_ROWS
        top = int(np.searchsorted(self.start[: self.length], stop, side="left"))
        rows = np.flatnonzero((self.kind[:top] == Kind.NONE) & (self.host_kind[:top] != Kind.NONE))
        self._verify(rows, verify)
        return self._cold_rows(rows[self.verified[rows] > 0], stop)

    def exact(self, stop: int, verify: Verify, most: int) -> tuple[PageRows, ColdRows] | None:
        """Like `rows` and `cold`, but packed pages are to be read from their exact host copies: cold rows, too.

        `None` where that is more than `most` pages.
        """
        top = int(np.searchsorted(self.start[: self.length], stop, side="left"))
        packed = (self.kind[:top] == Kind.QUANTIZED) | (self.kind[:top] == Kind.MIDDLE)
        copied = packed & (self.host_kind[:top] == Kind.EXACT)
        far = np.flatnonzero(((self.kind[:top] == Kind.NONE) & (self.host_kind[:top] != Kind.NONE)) | copied)
        if len(far) > most:
            return None
        self._verify(far, verify)
        far = far[self.verified[far] > 0]
        near = self.kind[:top] != Kind.NONE
        near[far] = False
        counts = np.minimum(self.count[:top], stop - self.start[:top]).astype(np.int32)[near]
        here = PageRows(self.offset[:top][near], self.kind[:top][near], counts, self.start[:top][near])
        return here, self._cold_rows(far, stop)

    def _verify(self, rows: NDArray[np.int64], verify: Verify) -> None:
        for row in rows[self.verified[rows] == 0].tolist():
            place = (self.page[row], self.host_kind[row], self.host_offset[row], self.host_checksum[row])
            self.verified[row] = 1 if verify(*(int(value) for value in place)) else -1

    def _cold_rows(self, rows: NDArray[np.int64], stop: int) -> ColdRows:
        counts = np.minimum(self.count[rows], stop - self.start[rows]).astype(np.int32)
        in_hbm = self.kind[rows] != Kind.NONE
        digests = np.where(in_hbm, NOWHERE, self.digest[rows])
        return ColdRows(
            self.page[rows], digests, self.host_offset[rows], self.host_kind[rows], counts, self.start[rows],
            in_hbm,
        )  # fmt: skip

    def trust(self, other: PageTable) -> None:
        """Host replicas that another table has verified at the same place need not be read again."""
        for theirs in np.flatnonzero(other.verified[: other.length] > 0).tolist():
            row = self.index.get(int(other.page[theirs]))
            if row is not None and self.host_offset[row] == other.host_offset[theirs]:
                self.verified[row] = self.host_checksum[row] == other.host_checksum[theirs]

    @property
    def away(self) -> int:
        """Rows without an HBM replica."""
        return self._away

    def entries(self, tokens: int) -> list[PageEntry]:
        """Rows that hold `[0, tokens)`, the last one cut there: what a new owner adopts."""
        top = int(np.searchsorted(self.start[: self.length], tokens, side="left"))
        columns = (
            self.page, self.region, self.count, self.kind, self.offset,
            self.host_kind, self.host_offset, self.host_checksum, self.digest,
        )  # fmt: skip
        entries = [
            PageEntry(*values) for values in zip(*(column[:top].tolist() for column in columns), strict=True)
        ]
        if entries:
            last = entries[-1]
            count = min(last.count, tokens - int(self.start[top - 1]))
            entries[-1] = PageEntry(
                last.page, last.region, count, last.kind, last.offset,
                last.host_kind, last.host_offset, last.host_checksum, last.digest,
            )  # fmt: skip
        return entries

    def after(self, tokens: int) -> list[tuple[int, int]]:
        """`(page, offset)` of rows that hold nothing below `tokens`, in token order."""
        top = int(np.searchsorted(self.start[: self.length], tokens, side="left"))
        return [(int(self.page[row]), int(self.offset[row])) for row in range(top, self.length)]

    def _place(self, row: int, place: PageEntry | PageChange) -> None:
        self.kind[row] = place.kind
        self.offset[row] = place.offset if place.kind != Kind.NONE else NOWHERE
        if self.host_offset[row] != place.host_offset or self.host_checksum[row] != place.host_checksum:
            self.verified[row] = 0
        self.host_kind[row] = place.host_kind
        self.host_offset[row] = place.host_offset
        self.host_checksum[row] = place.host_checksum
        self.digest[row] = place.digest
