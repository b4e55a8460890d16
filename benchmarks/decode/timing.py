"""Steps of all arms in turn, and what pairs of them say."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tierkv.benchmarks.decode.arm import Arm
from tierkv.benchmarks.decode.plan import WARM_UP
from tierkv.benchmarks.pairs import Figures, compare

BLOCK = 8
"""Steps of tierkv whose mean is one figure."""

LEAST_STEPS = 3


def interleave(
    arms: Sequence[Arm], batch: int, vocabulary: int, steps: int, arm_seconds: float
) -> dict[str, list[float]]:
    """Milliseconds of each arm's steps, in order; of an arm whose steps have taken too long, fewer.

    All arms take one step, then all the next; who goes first is drawn anew each time, since a step leaves the
    processor's caches to the one after it.
    """
    drawn = random.Random(0)
    generator = np.random.default_rng(0)
    timed: dict[str, list[float]] = {arm.name: [] for arm in arms}
    spent = dict.fromkeys(timed, 0.0)
    for index in range(WARM_UP + steps):
        tokens = torch.from_numpy(generator.integers(2, vocabulary, (batch, 1)))
        for arm in drawn.sample(arms, len(arms)):
            taken = timed[arm.name]
            if len(taken) >= LEAST_STEPS and spent[arm.name] >= arm_seconds:
                continue
            start = time.perf_counter()
            arm.step(tokens)
            seconds = time.perf_counter() - start
            spent[arm.name] += seconds
            if index >= WARM_UP:
                taken.append(1e3 * seconds)
    return timed


def block_of(*names: str) -> int:
    """Steps of a pair's figures."""
    return BLOCK if any(name.startswith("tierkv") for name in names) else 1


def blocks(steps: Sequence[float], size: int) -> Iterator[float]:
    """Means of whole blocks of successive steps; of all steps where there is no whole block."""
    size = min(size, len(steps))
    for start in range(0, len(steps) - size + 1, size):
        yield statistics.fmean(steps[start : start + size])


def ratio(ours: Sequence[float], theirs: Sequence[float], block: int) -> Figures:
    """Of steps that both took. Raises `ValueError` where there is none."""
    common = min(len(ours), len(theirs))
    if not common:
        raise ValueError("no step of both was measured")
    return compare(zip(blocks(ours[:common], block), blocks(theirs[:common], block), strict=True))
