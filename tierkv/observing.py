"""Which steps look at attention mass, at which layers, and what a session is told of it.

A session's k (`Observing.every`), window and layers are the daemon's settings, given to workers as they attach.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tierkv.paged_step import PagedSession, Step
from tierkv.protocol import Audit, Observing

Floats = NDArray[np.float32]


class Part(NamedTuple):
    """A row's part in an observation."""

    looks: bool  # the step's mass is wanted
    tells: bool  # the session is told, of the mean over the window that ends here
    alone: bool = False  # or of this step only: a chunk averages its own queries


WHOLE_CHUNK, NO_PART = Part(True, True, alone=True), Part(False, False)


def part_of(step: int, observing: Observing) -> Part:
    """The part of decode step `step` (from 1 on): every `every`-th tells, and those of the window before it look."""
    every = max(1, observing.every)
    left = -step % every
    return Part(left < max(1, observing.window), left == 0)


def layers_of(total: int, observing: Sequence[Observing]) -> frozenset[int] | None:
    """Layers whose mass is looked at, spread evenly over `total`: as many as a row of the batch wants; `None`: all."""
    counts = [one.layers or total for one in observing]
    count = min(total, max(counts, default=total))
    if count == total:
        return None
    return frozenset((2 * index + 1) * total // (2 * count) for index in range(count))


class Observation(NamedTuple):
    """What a committed forward saw and did not tell yet."""

    step: Step
    rows: list[tuple[int, PagedSession, int, Part]]
    """Row of the step, session, its tokens then, and its part."""


class Mean:
    """Mean mass of tokens over some steps; of a token that came later, or was not attended always, over fewer."""

    def __init__(self) -> None:
        self._sums, self._counts = np.zeros(0, np.float32), np.zeros(0, np.int32)

    def add(self, mass: Floats) -> None:
        """`mass` `[tokens]`, NaN where it is not known."""
        known, before = ~np.isnan(mass), min(len(mass), len(self._sums))
        sums, counts = np.where(known, mass, np.float32(0)), known.astype(np.int32)
        sums[:before] += self._sums[:before]
        counts[:before] += self._counts[:before]
        self._sums, self._counts = sums, counts

    def take(self) -> Floats:
        """`[tokens of the last mass]`; starts anew."""
        with np.errstate(invalid="ignore"):
            mean: Floats = np.divide(self._sums, self._counts, dtype=np.float32)  # 0 / 0 is NaN: not known
        self._sums, self._counts = self._sums[:0], self._counts[:0]
        return mean


class Teller:
    """Tells sessions of what was observed, in order, once it has arrived."""

    def __init__(self) -> None:
        self.audits: list[Audit] = []
        self._untold: list[Observation] = []
        self._means: WeakKeyDictionary[PagedSession, Mean] = WeakKeyDictionary()

    def add(self, observation: Observation) -> None:
        self._untold.append(observation)

    def forget(self) -> None:
        """What was not told yet: other tokens take the place of what was seen."""
        self._untold.clear()
        self._means.clear()

    def tell(self, sessions: Sequence[PagedSession]) -> None:
        """Observations of attention on a device arrive mostly a step after they were made. Others than `sessions` have
        left the batch.
        """
        while self._untold and self._untold[0].step.arrived:
            step, rows = self._untold.pop(0)
            masses, audits = step.masses(), step.audits()
            self.audits += [audit for audit in audits if audit is not None]
            for index, session, tokens, part in rows:
                if masses and any(session is own for own in sessions):
                    mass = _fitted(masses[index][:tokens], session.length)
                    if (mean := self._mean(session, mass, part)) is not None:
                        session.observe(mean, audits[index] if audits else None)

    def _mean(self, session: PagedSession, mass: Floats, part: Part) -> Floats | None:
        """What is told; `None`: nothing yet."""
        if session.observing.window <= 1 or part.alone:
            return mass if part.tells else None
        mean = self._means.setdefault(session, Mean())
        mean.add(mass)
        return mean.take() if part.tells else None


def _fitted(mass: Floats, length: int) -> Floats:
    """`mass` of the first tokens of `length`: of the others nothing is known."""
    if len(mass) == length:
        return mass
    fitted = np.full(length, np.nan, np.float32)
    fitted[: len(mass)] = mass[:length]
    return fitted


__all__ = ["NO_PART", "WHOLE_CHUNK", "Observation", "Part", "Teller", "layers_of", "part_of"]
