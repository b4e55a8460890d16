"""The page table of one session, and the one rule that lays tokens out over pages.

The daemon and the worker both run `lay_out`, over the same runs and the same reserved pages in the same order, so
a commit names regions and counts only and both sides agree on which token is where.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from tierkv.regions import Region, Run

NOWHERE = -1
"""An offset that names no byte: the replica does not exist."""


class Kind(IntEnum):
    """Form of a replica; also what attention finds at a page's HBM offset."""

    NONE = 0
    EXACT = 1
    QUANTIZED = 2
    MIDDLE = 3  # packed by the middle form, between the two


class Placement(NamedTuple):
    """Tokens `[first, first + tokens)` of a page, written in order. `fresh` means: takes the next reserved page."""

    fresh: bool
    first: int
    tokens: int
    region: Region


def lay_out(
    tail_region: Region | None, tail_count: int, runs: Iterable[Run], page_tokens: int, straddle: bool
) -> Iterator[Placement]:
    """Where the tokens of `runs` go, given the last page's region and count (`None`, 0 when there is no page).

    Region-aligned layout closes a page where the region changes; `straddle=True` (the paper's layout) fills every
    page and labels it by its first token's region.
    """
    region, count = tail_region, tail_count
    for run in runs:
        left = run.tokens
        while left > 0:
            fresh = region is None or count == page_tokens or (run.region != region and not straddle)
            if fresh:
                region, count = run.region, 0
            take = min(left, page_tokens - count)
            yield Placement(fresh, count, take, region if region is not None else run.region)
            count += take
            left -= take


def pages_needed(
    tail_region: Region | None, tail_count: int, runs: Iterable[Run], page_tokens: int, straddle: bool
) -> int:
    """Reserved pages that `lay_out` would take."""
    return sum(p.fresh for p in lay_out(tail_region, tail_count, runs, page_tokens, straddle))
