"""How a long prompt is cut into forwards, each of which is committed, so that pages can demote as it goes.

The model's weights are read once a forward, so slices are as long as room allows.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

CHUNK_TOKENS = 4096
"""New tokens that one forward takes at most."""

POOL_SHARE = 4
"""A slice may always take one part in this many of its room: earlier pages and the next slice need some too."""

FREE_SHARE = 2 / 3
"""Of what earlier pages leave, all of them low-bit, a slice takes so much; the rest is the next one's."""

Slice = tuple[int, int]
"""The first column, and the one after the last."""


class Room(NamedTuple):
    """HBM bytes of a row, and of a page in either form."""

    nbytes: int
    page_tokens: int
    exact: int
    packed: int

    def tokens(self, before: int) -> int:
        """That a forward may take if `before` tokens are in low-bit pages."""
        free = FREE_SHARE * (self.nbytes - before * self.packed / self.page_tokens)
        pages = max(int(free), self.nbytes // POOL_SHARE) // self.exact
        return min(CHUNK_TOKENS, max(1, pages) * self.page_tokens)


def even(columns: int, chunk: int) -> list[Slice]:
    """As few slices of at most `chunk` as possible, equally long: a last slice of one token would be a decode step."""
    count = -(-columns // chunk)
    return list(itertools.pairwise(columns * index // count for index in range(count + 1)))


def within(columns: int, before: int, room: Room) -> list[Slice]:
    """Slices as long as `room` allows, the shorter the more tokens precede them; no last one of one token."""
    edges = [0]
    while edges[-1] < columns:
        edges.append(min(columns, edges[-1] + room.tokens(before + edges[-1])))
    if len(edges) > 2 and edges[-1] - edges[-2] == 1 and edges[-2] - edges[-3] > 1:
        edges[-2] -= 1
    return list(itertools.pairwise(edges))


__all__ = ["CHUNK_TOKENS", "Room", "Slice", "even", "within"]
