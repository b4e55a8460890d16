"""Recall of a cell with its interval, and how two policies compare scenario by scenario.

The probes of a scenario share its text, so scenarios, not probes, are drawn: a cluster bootstrap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from tierkv.regions import Region
from tierkv.study.memdecay.results import Probed

DRAWS = 2000
SEED = 20260710
LEVEL = 0.95


class Cell(msgspec.Struct, frozen=True):
    """A policy at a budget in a tier. `low` and `high` bound `recall` at 95%."""

    tier: str
    policy: str
    budget: float
    probes: int
    recall: float
    non_system: float
    low: float
    high: float
    non_system_low: float
    non_system_high: float
    by_region: dict[str, float]
    kept: float  # share of tokens (or bytes) that were left


class Signs(msgspec.Struct, frozen=True):
    """Scenarios in which the first policy's non-system recall is higher, the same, lower."""

    wins: int
    ties: int
    losses: int


def bootstrap(
    clusters: Sequence[object], value: Callable[[Sequence[int]], float], draws: int = DRAWS, seed: int = SEED
) -> tuple[float, float]:
    """The 95% percentile interval of `value`, which is given the drawn clusters' indices."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(clusters), (draws, len(clusters)))
    values = [value(row.tolist()) for row in drawn]
    low, high = np.nanpercentile(values, [100 * (1 - LEVEL) / 2, 100 * (1 + LEVEL) / 2])
    return float(low), float(high)


def cells(results: Iterable[Probed]) -> list[Cell]:
    """One for each tier, policy and budget, in the order of their first answers."""
    grouped: dict[tuple[str, str, float], list[Probed]] = defaultdict(list)
    for one in results:
        grouped[one.tier, one.policy, one.budget].append(one)
    return [_cell(*where, answers) for where, answers in grouped.items()]


def _cell(tier: str, policy: str, budget: float, answers: list[Probed]) -> Cell:
    others = [one for one in answers if one.region != Region.SYSTEM.label]
    right: dict[str, list[bool]] = defaultdict(list)
    for one in answers:
        right[one.region].append(one.right)
    low, high = _interval(answers)
    other_low, other_high = _interval(others)
    episodes = {(one.scenario, one.variant, one.region) for one in answers}
    return Cell(
        tier, policy, budget, len(episodes), _recall(answers), _recall(others), low, high, other_low, other_high,
        {region: sum(rights) / len(rights) for region, rights in right.items()},
        sum(one.kept for one in answers) / sum(one.of for one in answers),
    )  # fmt: skip


def _recall(answers: Sequence[Probed]) -> float:
    return sum(one.right for one in answers) / len(answers)


def _interval(answers: Sequence[Probed]) -> tuple[float, float]:
    scenarios = sorted({one.scenario for one in answers})
    right = np.array([sum(one.right for one in answers if one.scenario == s) for s in scenarios])
    asked = np.array([sum(one.scenario == s for one in answers) for s in scenarios])
    return bootstrap(scenarios, lambda drawn: float(right[drawn].sum() / asked[drawn].sum()))


def compare(results: Iterable[Probed], tier: str, budget: float, first: str, second: str) -> Signs:
    """Paired by scenario, on what is not system."""
    recalls: dict[str, dict[str, list[bool]]] = {first: defaultdict(list), second: defaultdict(list)}
    for one in results:
        counts = (one.tier, one.budget) == (tier, budget) and one.region != Region.SYSTEM.label
        if counts and one.policy in recalls:
            recalls[one.policy][one.scenario].append(one.right)
    mean = {p: {s: sum(r) / len(r) for s, r in by.items()} for p, by in recalls.items()}
    shared = sorted(mean[first].keys() & mean[second].keys())
    differences = [mean[first][s] - mean[second][s] for s in shared]
    return Signs(
        sum(d > 0 for d in differences), sum(d == 0 for d in differences), sum(d < 0 for d in differences)
    )
