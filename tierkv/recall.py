"""How a worker gets at pages that left HBM: the modes, and what a step found out about cold pages.

Each mode adds to the one before:

off         cold pages are not attended and not estimated; they come back when the daemon has room
background  steps estimate from digests what cold pages would get; the daemon brings the best back, a step late
direct      attention also reads the cold pages with the largest estimates in place, from host memory
strict      a new chunk of a query that cannot read every cold page runs twice: once to find out which pages it wants
            (the scout, whose tokens are rolled back), and again when they are there; a decode step that misses much is
            replayed likewise
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import ConfigError
from tierkv.protocol import MAX_REQUEST_PAGES

MAX_SECONDS = 3600.0
"""Longest wait for pages that a daemon takes."""

RecallMode = Literal["off", "background", "direct", "strict"]


@dataclass(frozen=True)
class RecallOptions:
    """What recall may cost.

    Args:
        mode: see the module.
        pages: cold pages that a query chunk (or a replayed step) asks the daemon for at most.
        read: cold pages that each KV head reads in place in a decode step at most.
        chunk_read: the same for a chunk of many tokens, whose reading is shared by all of them: a chunk sees everything
            while no more than so many pages are cold.
        seconds: how long a strict step waits for pages at most.
        missing: estimated share of attention, on pages that were not asked for lately, from which strict replays a
            decode step.
        audit_every: observations between audits (true attention over all pages); 0 for none.
        exact_chunks: a chunk that may read so many pages also reads the exact host copies of pages that are low-bit in
            HBM, instead of those.
        exact_steps: a decode step does so as well: the answer is that of exact pages, at the price of reading up to
            `chunk_read` pages from host memory in every step.
    """

    mode: RecallMode = "direct"
    pages: int = 16
    read: int = 8
    chunk_read: int = 256
    seconds: float = 1.0
    missing: float = 0.15
    audit_every: int = 16
    exact_chunks: bool = True
    exact_steps: bool = False

    def __post_init__(self) -> None:
        if self.mode not in get_args(RecallMode):
            raise ConfigError(
                f"recall mode {self.mode!r} does not exist; use one of {', '.join(get_args(RecallMode))}"
            )
        for name in ("pages", "read", "chunk_read", "audit_every", "seconds", "missing"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} of recall is {getattr(self, name)}; it must be 0 or more")
        if self.seconds > MAX_SECONDS or self.pages > MAX_REQUEST_PAGES:
            raise ConfigError(
                f"recall of {self.pages} pages within {self.seconds:g} s; "
                f"at most {MAX_REQUEST_PAGES} within {MAX_SECONDS:g}"
            )

    @property
    def estimates(self) -> bool:
        return self.mode != "off"

    @property
    def reads(self) -> bool:
        return self.mode in ("direct", "strict")


class Estimates(NamedTuple):
    """Cold pages of one session and the share of attention that each is expected to get, averaged over heads."""

    pages: NDArray[np.int64]  # ids
    shares: NDArray[np.float32]

    def best(self, count: int) -> tuple[list[int], list[float]]:
        """Ids and shares of the `count` pages with the largest, largest first; pages without any are left out."""
        order = np.argsort(-self.shares, kind="stable")[:count]
        order = order[self.shares[order] > 0]
        return self.pages[order].tolist(), np.minimum(self.shares[order], 1.0).tolist()


__all__ = ["Estimates", "RecallMode", "RecallOptions"]
