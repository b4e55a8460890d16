"""Regions: what the orchestrator says a span of tokens is. They decide how fast a page's score decays."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from tierkv.errors import UnknownRegion


class Region(IntEnum):
    SYSTEM = 0
    PLAN = 1
    USER = 2
    TOOL_IN = 3
    TOOL_OUT = 4
    RETRIEVAL = 5
    SCRATCHPAD = 6

    @property
    def label(self) -> str:
        return self.name.lower()


class Run(NamedTuple):
    """`tokens` consecutive tokens of one region."""

    region: Region
    tokens: int


def default_region(tokens: int) -> Region:
    """Region of tokens that nobody labelled, in a step of so many: a prompt is the user's, a lone one generated."""
    return Region.USER if tokens > 1 else Region.SCRATCHPAD


REGION_NAMES: tuple[str, ...] = tuple(region.label for region in Region)


def parse_region(name: str | int | Region) -> Region:
    """`"tool_out"`, `4` or a `Region`; anything else raises `UnknownRegion`."""
    try:
        if isinstance(name, str):
            return Region[name.upper()]
        return Region(name)
    except (KeyError, ValueError):
        raise UnknownRegion(f"region {name!r} does not exist; use one of {', '.join(REGION_NAMES)}") from None
