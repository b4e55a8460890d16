"""Paused sessions: since when, for how long, and what they had in HBM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.durations import Duration

EARLY, LATE = 0.05, 0.99
"""From this share of the expected resumes to that one a session is *near*."""

FAR = 1.5
"""A page takes the place of one that is expected so many times later; else both would trade places for ever."""


@dataclass
class Absence:
    """Of one session. Times in seconds, as the brain's.

    Attributes:
        tool, hinted: as the caller said; `hinted` is negative where it did not say how long.
        known: what `duration` comes from: `hinted`, `learned`, `unknown` or `predicted`.
        pages: slots of what comes back before it resumes, those with most mass first.
        working: how many of them are the working set: what makes a resume `ready`.
        until: when the session is not expected back any more.
    """

    since: float
    tool: str
    hinted: float
    known: str
    duration: Duration
    pages: NDArray[np.int64]
    working: int
    until: float = np.inf
    back_at: float = 0.0
    """Expected resume (median), as of `due`."""
    due: float = 0.0
    """When it is worked out again."""

    near: bool = False
    """It may resume any moment: its pages are back, or on their way, and give way as those of a session that runs."""

    def approach(self, now: float, ahead: float) -> None:
        """Work out `near`: from `ahead` seconds before the first resumes that can be expected to the last ones."""
        early, late = (self.since + self.duration.remaining(0.0, share) for share in (EARLY, LATE))
        self.near = self.expected and now <= late and (self.near or early - ahead <= now)

    def look(self, now: float) -> None:
        """Work out when the session comes back, given that it has not come yet."""
        if now < self.due:
            return
        if now >= self.until:
            self.back_at = self.due = np.inf
            return
        rest = self.duration.remaining(now - self.since)
        self.back_at = now + rest
        self.due = min(self.until, now + max(0.05, 0.1 * rest))

    @property
    def expected(self) -> bool:
        """It may still come back."""
        return self.back_at < np.inf

    def later_than(self, back_at: float, now: float) -> bool:
        """Expected so much later than a page that is wanted `back_at` that it gives way to that."""
        return self.back_at - now > FAR * max(0.0, back_at - now) + 0.01
