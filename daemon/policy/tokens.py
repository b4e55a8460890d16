"""Per-token memory of one session: the columns that a policy asks for, which grow, are cut and are copied together."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.addresses import address_of
from tierkv.daemon.policy.pages import least, page_scores

if TYPE_CHECKING:
    from tierkv.daemon.policy.contract import Policy

Floats = NDArray[np.float32]

FIRST_TOKENS = 64
"""Room that a new session starts with; it doubles when it is full."""


class Seen(NamedTuple):
    """One observation, as far as the session has tokens."""

    where: slice | NDArray[np.intp]
    """The tokens that were attended: an index for any column."""
    mass: Floats
    """`[where]`: theirs, averaged over heads and layers; finite."""
    attended: int
    """|K|: how many tokens were attended in all."""
    observed: Floats
    """Masses of all tokens from the first on; not finite where a token was not attended."""

    def of_sinks(self, tokens: int) -> tuple[float, int]:
        """Mass of the first `tokens` tokens, and how many of them were attended."""
        first = self.observed[:tokens]
        first = first[np.isfinite(first)]
        return float(first.sum()), len(first)


class TokenState:
    """Grows by `append`, shrinks by `truncate`, is copied by a fork. One thread at a time."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.observations = 0
        """How many this session has had."""
        self._length = 0
        self._region = np.zeros(FIRST_TOKENS, np.int8)
        self._columns = np.zeros((len(policy.insert(0)), FIRST_TOKENS), np.float32)
        self._locate()

    def __len__(self) -> int:
        return self._length

    @property
    def region(self) -> NDArray[np.int8]:
        """`[tokens]`"""
        return self._region[: self._length]

    @property
    def columns(self) -> Floats:
        """`[columns, tokens]`, a view: the policy's, in the order of its `insert`."""
        return self._columns[:, : self._length]

    def _locate(self) -> None:
        self.addresses = (address_of(self._region), address_of(self._columns), self._columns.shape[1])
        """Of the regions and the columns, and how many tokens a column has room for; good until the next append."""

    def append(self, regions: NDArray[np.int8], step: float) -> None:
        """Add tokens inserted at decode step `step`."""
        start, stop = self._length, self._length + len(regions)
        if stop > len(self._region):
            room = max(stop, 2 * len(self._region)) - start
            self._region = np.concatenate([self.region, np.zeros(room, np.int8)])
            fresh = np.zeros((len(self._columns), room), np.float32)
            self._columns = np.concatenate([self.columns, fresh], axis=1)
            self._locate()
        self._length = stop
        self._region[start:stop] = regions
        self._columns[:, start:stop] = np.array(self.policy.insert(step), np.float32)[:, None]

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)

    def copy(self) -> TokenState:
        twin = TokenState(self.policy)
        twin.observations, twin._length = self.observations, self._length
        twin._region, twin._columns = self.region.copy(), self.columns.copy()
        twin._locate()
        return twin

    def observe(self, mass: Floats, step: float) -> None:
        """One observation. mass: `[tokens]` or fewer, averaged over heads and layers; what is not finite (NaN) was not
        attended.
        """
        finite = np.isfinite(mass)
        attended = int(np.count_nonzero(finite))
        if not attended:
            return
        known = min(len(mass), self._length)
        where = slice(0, known) if attended == len(mass) else np.flatnonzero(finite[:known])
        self.policy.observe(self, Seen(where, mass[where], attended, mass[:known]), step)
        self.observations += 1

    def token_scores(self, step: float) -> Floats:
        """`[tokens]` scores at decode step `step`."""
        return self.policy.scores(self, step, slice(0, self._length))

    def page_scores(self, starts: NDArray[np.int64], counts: NDArray[np.int32], step: float) -> Floats:
        """`[pages]` scores at decode step `step` of pages with the tokens `[starts, starts + counts)`, one or more
        each; they may be any pages, in any order.
        """
        if not len(starts):
            return np.zeros(0, np.float32)
        first = int(starts.min())
        span = slice(first, int((starts + counts).max()))
        pages = page_scores(
            self.policy.scores(self, step, span), starts - first, counts, self.policy.aggregate
        )
        if self.policy.aggregate == "relief":
            pages -= least(self.policy.importance(self, step, span), starts - first, counts)
        return pages

    def explain(self, start: int, count: int, step: float) -> dict[str, float]:
        """What the score of the page with the tokens `[start, start + count)` is made of, and `score` itself.

        The terms are the policy's own (see its `terms`). Means of terms do not add up to the score where the policy's
        aggregate is not the mean.
        """
        terms = self.policy.terms(self, step, slice(start, start + count))
        score = self.page_scores(np.array([start]), np.array([count], np.int32), step)
        return {**terms, "score": float(score[0])}
