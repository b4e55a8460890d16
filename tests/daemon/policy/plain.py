"""The policies once more, as loops over tokens in Python floats: what the arrays are compared with.

Written from the formulas, without numpy. `step` of an operation never goes back.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierkv.daemon.policy.decay import BASE, HALF_LIFE
from tierkv.regions import Region


@dataclass
class Token:
    region: Region
    inserted: float
    history: list[tuple[float, float, int, float, int]] = field(default_factory=list)
    """Observations that attended it: step, A, |K|, mass of the first 16 tokens, how many of those were attended."""
    seen_at: list[int] = field(default_factory=list)
    """Their numbers."""


class Plain:
    """Remembers everything that happened to every token; each policy is a function of that."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.observations = 0
        self.masses: list[list[float]] = []
        """Of each observation, as far as there were tokens."""

    def append(self, regions: Sequence[int], step: float) -> None:
        self.tokens += [Token(Region(region), step) for region in regions]

    def truncate(self, length: int) -> None:
        self.tokens = self.tokens[:length]

    def copy(self) -> Plain:
        return copy.deepcopy(self)

    def observe(self, mass: Sequence[float], step: float) -> None:
        attended = [i for i, a in enumerate(mass) if not math.isnan(a)]
        if not attended:
            return
        sinks = [i for i in attended if i < 16]
        sink_mass = sum(mass[i] for i in sinks)
        for i in attended:
            if i < len(self.tokens):
                self.tokens[i].history.append((step, mass[i], len(attended), sink_mass, len(sinks)))
                self.tokens[i].seen_at.append(self.observations)
        self.masses.append(list(mass[: len(self.tokens)]))
        self.observations += 1

    def scores(self, name: str, step: float) -> list[float]:
        return {
            "memdecay": self.memdecay,
            "memdecay-lift": self.lift,
            "ema": self.ema,
            "h2o": self.h2o,
            "streaming": self.streaming,
            "tova": self.tova,
            "snapkv": self.snapkv,
            "full": self.full,
        }[name](step)

    def memdecay(self, now: float) -> list[float]:
        scores = []
        for token in self.tokens:
            a, t_ref = 0.0, token.inserted
            for step, mass, attended, _, _ in token.history:
                a = 0.9 * a + 0.1 * mass
                t_ref = step if mass >= 2 / attended else t_ref
            scores.append(self.decay(token, now - t_ref) + 0.5 * a)
        return scores

    def lift(self, now: float) -> list[float]:
        scores = []
        for i, token in enumerate(self.tokens):
            u, t_ref = 0.0, token.inserted
            for number, (step, mass, *_) in zip(token.seen_at, token.history, strict=True):
                row = self.masses[number]
                far = [a for j, a in enumerate(row) if 4 <= j < len(row) - 64 and not math.isnan(a)]
                if not 4 <= i < len(row) - 64:
                    continue
                lift = min(mass * len(far) / max(sum(far), 1e-6), len(far))
                u = 0.98 * u + 0.02 * lift / (1 + lift)
                t_ref = step if lift >= 4 else t_ref
            scores.append(self.decay(token, now - t_ref) + 24 * u)
        return scores

    def decay(self, token: Token, age: float) -> float:
        return BASE[token.region] * 0.5 ** (age / HALF_LIFE[token.region])

    def ema(self, now: float) -> list[float]:
        scores = []
        for token in self.tokens:
            e, accessed = 0.0, token.inserted
            for step, mass, attended, _, _ in token.history:
                e = 0.2 * mass + 0.8 * e
                accessed = step if mass >= 2 / attended else accessed
            scores.append(1 - (1 - e) * (1 - math.exp(-0.001 * (now - accessed))))
        return scores

    def h2o(self, now: float) -> list[float]:
        return [sum(mass for _, mass, *_ in token.history) for token in self.tokens]

    def tova(self, now: float) -> list[float]:
        return [token.history[-1][1] if token.history else 2.0 for token in self.tokens]

    def streaming(self, now: float) -> list[float]:
        after = range(len(self.tokens) - 1, -1, -1)
        return [2.0 if i < 4 else 1 / (1 + later) for i, later in enumerate(after)]

    def snapkv(self, now: float) -> list[float]:
        means = []
        for token in self.tokens:
            recent = [
                entry[1]
                for number, entry in zip(token.seen_at, token.history, strict=True)
                if number >= self.observations - 32
            ]
            means.append(sum(recent) / len(recent) if recent else 0.0)
        prefix = max(0, len(means) - 32)
        pooled = []
        for i in range(prefix):
            near = [means[j] for j in range(i - 2, i + 3) if 0 <= j < prefix]
            pooled.append(sum(near) / len(near))
        return pooled + [2.0] * (len(means) - prefix)

    def full(self, now: float) -> list[float]:
        return [1.0] * len(self.tokens)
