"""`tierkv study lifetimes`: how fast attention on a region's tokens fades with their age (the paper's Eqs. 6, 7).

    log A_r(dt) = log c_r - lambda_r dt       weighted least squares over ages          Eq. 6
    half-life   = ln 2 / lambda_r             decode steps                              Eq. 7

A_r(dt) is the mean mass of r's tokens, dt decode steps after they were inserted, over all observations and episodes; a
mean of n token observations weighs n. As in the paper, traces are read with a final burst of 48 decode steps, and ages
come from that burst alone: tokens of earlier stages are then 8 steps a stage older. A query sees itself at age 0.
Beside it are reported: a final burst of 8 (what the paper evicts after); the bursts of all stages; and these with each
mass taken relative to the uniform level, A |K|. Between stages the context grows, which thins every token's share of
attention: what ages over stages fades with it, whatever the region.

The first 16 tokens are attention sinks, which hold much of the mass whatever they say and do not fade. They are system
tokens; the paper does not say that it leaves them out, so `system` is with them, and `system without sinks` beside it.

In one tier, a fit is the paper's. `both` is one rate with an own level c_r for each tier, because the same share of
attention is thinner in a longer context; the policy files take it. A region whose rate is not above 0 does not decay:
its half-life is infinite, here None, in a policy file `inf`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tierkv.daemon import policy
from tierkv.errors import ConfigError
from tierkv.regions import Region
from tierkv.study.memdecay.paper_rates import PAPER_TABLE
from tierkv.study.memdecay.protocol import FIT, PAPER, Protocol
from tierkv.study.memdecay.scenarios import load_scenarios
from tierkv.study.memdecay.statistics import DRAWS, bootstrap
from tierkv.study.memdecay.traces import Trace

Floats = NDArray[np.float64]

SINK_TOKENS = 16
BEYOND_SINKS = "system without sinks"
ROWS = (*(region.label for region in Region), BEYOND_SINKS)
"""What is fitted: the regions, and the system region once more."""

BOTH = "both"
LEAST_AGES = 3
"""Ages that a fit takes at least; fewer leave no freedom to say how well it fits."""


class Sums(NamedTuple):
    """Of one episode, `[rows, ages]` float64: mass that the tokens of each row got at each age, and how many."""

    scenario: str
    tier: str
    mass: Floats
    seen: Floats


class Line(NamedTuple):
    """`level` is c_r of each group, `r2` weighted, of what varies inside groups."""

    level: tuple[float, ...]
    rate: float
    r2: float


class Fit(msgspec.Struct, frozen=True):
    """A row (of `ROWS`) in a tier. Rates per decode step, half-lives in decode steps; None where it does not decay.

    `low` and `high` bound the half-life at 95% (scenarios drawn), `left_out_*` over fits that leave one scenario out.
    """

    row: str
    tier: str
    rate: float
    rate_low: float
    rate_high: float
    half_life: float | None
    low: float | None
    high: float | None
    left_out_low: float | None
    left_out_high: float | None
    r2: float
    level: list[float]
    ages: int
    observations: int


class Points(msgspec.Struct, frozen=True):
    """What a fit in one tier was made of: `mass` is the mean at each of `ages`."""

    row: str
    tier: str
    ages: list[int]
    mass: list[float]
    observations: list[int]


class Report(msgspec.Struct, frozen=True):
    """`fits` are the paper's way. `order` is Spearman's rank correlation of half-lives (regions only) with each column
    of the paper's, by tier.
    """

    model: str
    episodes: int
    scenarios: list[str]
    fits: list[Fit]
    eviction_burst: list[Fit]
    every_burst: list[Fit]
    every_burst_relative: list[Fit]
    order: dict[str, dict[str, float]]
    order_every_burst: dict[str, dict[str, float]]
    points: list[Points]
    policies: dict[str, str]
    """Policy files (TOML) by file name: of the dev scenarios, to report with, and of all of them."""


def run(traces: Iterable[Trace], draws: int = DRAWS) -> Report:
    """Fit everything, from traces averaged over heads that hold the last 48 queries of each stage.

    Raises:
        ConfigError: traces of more than one model, no trace, or no region with enough ages to fit.
    """
    model, paper, short, every, relative = "", [], [], [], []
    for trace in traces:
        if model not in ("", trace.model):
            raise ConfigError(f"traces of {model} and of {trace.model} lie together; fit one model at a time")
        model = trace.model
        paper.append(sums(trace, FIT))
        short.append(sums(trace, PAPER))
        every.append(sums(trace, FIT, final_only=False))
        relative.append(sums(trace, FIT, final_only=False, relative=True))
    if not paper:
        raise ConfigError("there is no attention trace to fit; run: tierkv study record")
    fits, every_fits = fit(paper, draws), fit(every, draws)
    if not fits:
        raise ConfigError(
            f"none of {len(paper)} traces has a region seen at {LEAST_AGES} ages; record longer ones"
        )
    return Report(
        model, len(paper), sorted({one.scenario for one in paper}), fits, fit(short, draws), every_fits,
        fit(relative, draws), order(fits), order(every_fits), points(paper), policies(paper),
    )  # fmt: skip


# What was observed ----------------------------------------------------------------------------------------------------


def sums(trace: Trace, protocol: Protocol, final_only: bool = True, relative: bool = False) -> Sums:
    """Mass by region and age, of the observed queries of the final burst or of all bursts; relative: A |K|.

    Raises:
        ConfigError: the trace lacks a query that the protocol observes, or is by head.
    """
    if trace.mass.ndim != 1:
        raise ConfigError(f"trace {trace.name} is by head; lifetimes are fitted on averages over heads")
    inserted, observed = clocks(trace, protocol)
    ages = max(observed.values()) + 1
    rows = dict(trace.rows())
    mass, count = np.zeros((len(ROWS), ages)), np.zeros((len(ROWS), ages))
    beyond = np.flatnonzero(trace.regions == Region.SYSTEM)
    beyond = beyond[beyond >= SINK_TOKENS]
    last_stage = int(trace.stages[-2]) if len(trace.stages) > 1 else 0
    for query, step in observed.items():
        if final_only and query < last_stage:
            continue
        if query not in rows:
            raise ConfigError(
                f"trace {trace.name} lacks query {query}; record it with a window of 48 or more"
            )
        seen, age = rows[query], step - inserted[: query + 1]
        if relative:
            seen = seen * np.float32(len(seen))
        place = trace.regions[: query + 1].astype(np.int64) * ages + age
        regions = len(Region) * ages
        mass[:-1] += np.bincount(place, seen, regions).reshape(-1, ages)
        count[:-1] += np.bincount(place, minlength=regions).reshape(-1, ages)
        far = beyond[beyond <= query]
        mass[-1] += np.bincount(age[far], seen[far], ages)
        count[-1] += np.bincount(age[far], minlength=ages)
    found = re.fullmatch(r"(.+)-\d+-(short|long)", trace.name)
    scenario, tier = found.groups() if found else (trace.name, "chat")
    return Sums(scenario, tier, mass, count)


def clocks(trace: Trace, protocol: Protocol) -> tuple[NDArray[np.int64], dict[int, int]]:
    """The decode step at which each token was inserted, and of each observed query its step (see `protocol.run`)."""
    inserted = np.zeros(len(trace), np.int64)
    observed: dict[int, int] = {}
    step, begin, stages = 0, 0, trace.stages.tolist()
    for end in stages:
        burst = min(protocol.final_burst if end == stages[-1] else protocol.burst, end - begin)
        inserted[begin : end - burst] = step
        for query in range(end - burst, end):
            step += 1
            inserted[query] = step
            if step % protocol.every == 0:
                observed[query] = step
        begin = end
    return inserted, observed


# The fit --------------------------------------------------------------------------------------------------------------


def regress(mass: Floats, count: Floats) -> Line | None:
    """Eq. 6 over groups `[groups, ages]` of summed mass and token observations: one rate, a level for each group.

    An age without mass has no logarithm and is left out. None where too few ages are left.
    """
    used = (count > 0) & (mass > 0)
    if used.sum() < LEAST_AGES:
        return None
    weight = np.where(used, count, 0.0)
    logs = np.log(np.where(used, mass, 1.0) / np.where(used, count, 1.0))
    ages = np.broadcast_to(np.arange(mass.shape[1], dtype=float), mass.shape)
    total = np.maximum(weight.sum(1, keepdims=True), 1e-300)
    mean_age, mean_log = (
        (weight * ages).sum(1, keepdims=True) / total,
        (weight * logs).sum(1, keepdims=True) / total,
    )
    age, log = ages - mean_age, logs - mean_log
    spread = float((weight * age**2).sum())
    if spread == 0:
        return None
    slope = float((weight * age * log).sum()) / spread
    varies = float((weight * log**2).sum())
    left = float((weight * (log - slope * age) ** 2).sum())
    level = np.exp(mean_log - slope * mean_age)[:, 0]
    return Line(tuple(level.tolist()), -slope, 1 - left / varies if varies > 0 else 1.0)


def half_life(rate: float) -> float | None:
    """Eq. 7; None where nothing decays."""
    return math.log(2.0) / rate if rate > 0 else None


def fit(episodes: Sequence[Sums], draws: int = DRAWS) -> list[Fit]:
    """Every row in every tier, and in both where there are two. A row that cannot be fitted is left out."""
    tiers = sorted({one.tier for one in episodes}, reverse=True)
    scopes = [(tier, [tier]) for tier in tiers] + ([(BOTH, tiers)] if len(tiers) > 1 else [])
    fits = []
    for name, members in scopes:
        scenarios, mass, count = _stack(episodes, members)
        for row, label in enumerate(ROWS):
            if (
                found := _fit(label, name, scenarios, mass[..., row, :], count[..., row, :], draws)
            ) is not None:
                fits.append(found)
    return fits


def _stack(episodes: Sequence[Sums], tiers: Sequence[str]) -> tuple[list[str], Floats, Floats]:
    """The scenarios, and `[scenarios, tiers, rows, ages]` of mass and count."""
    scenarios = sorted({one.scenario for one in episodes if one.tier in tiers})
    ages = max(one.mass.shape[1] for one in episodes)
    mass, count = np.zeros((2, len(scenarios), len(tiers), len(ROWS), ages))
    for one in episodes:
        if one.tier in tiers:
            at = scenarios.index(one.scenario), tiers.index(one.tier)
            mass[at][:, : one.mass.shape[1]] += one.mass
            count[at][:, : one.mass.shape[1]] += one.seen
    return scenarios, mass, count


def _fit(row: str, tier: str, scenarios: list[str], mass: Floats, count: Floats, draws: int) -> Fit | None:
    """mass, count: `[scenarios, tiers, ages]`."""
    line = regress(mass.sum(0), count.sum(0))
    if line is None:
        return None

    def rate(drawn: Sequence[int]) -> float:
        often = np.bincount(drawn, minlength=len(scenarios)).astype(float)
        found = regress(np.tensordot(often, mass, 1), np.tensordot(often, count, 1))
        return math.nan if found is None else found.rate

    low, high = bootstrap(scenarios, rate, draws)
    everyone = range(len(scenarios))
    left_out = (
        [rate([i for i in everyone if i != out]) for out in everyone] if len(scenarios) > 1 else [line.rate]
    )
    return Fit(
        row, tier, line.rate, low, high, half_life(line.rate), half_life(high), half_life(low),
        half_life(float(np.nanmax(left_out))), half_life(float(np.nanmin(left_out))),
        line.r2, list(line.level), int(((count > 0) & (mass > 0)).any((0, 1)).sum()), int(count.sum()),
    )  # fmt: skip


def points(episodes: Sequence[Sums]) -> list[Points]:
    """Mean mass by age of each row and tier."""
    found = []
    for tier in sorted({one.tier for one in episodes}, reverse=True):
        _, mass, count = _stack(episodes, [tier])
        total, many = mass.sum((0, 1)), count.sum((0, 1))
        for row, label in enumerate(ROWS):
            ages = np.flatnonzero((many[row] > 0) & (total[row] > 0))
            mean = [float(f"{value:.4g}") for value in total[row, ages] / many[row, ages]]
            if len(ages):
                found.append(Points(label, tier, ages.tolist(), mean, many[row, ages].astype(int).tolist()))
    return found


# What is made of it ---------------------------------------------------------------------------------------------------


def order(fits: Iterable[Fit]) -> dict[str, dict[str, float]]:
    """By tier: Spearman's rank correlation of the regions' half-lives with each of the paper's columns."""
    found: dict[str, dict[str, float]] = {}
    rates: dict[str, dict[str, float]] = {}
    for one in fits:
        if one.row != BEYOND_SINKS:
            rates.setdefault(one.tier, {})[one.row] = one.rate
    for tier, ours in rates.items():
        if len(ours) > 1:
            found[tier] = {
                column: spearman([-rate for rate in ours.values()], [theirs[row][0] for row in ours])
                for column, theirs in PAPER_TABLE.items()
            }
    return found


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's correlation of ranks; equal values share the mean of theirs."""
    a, b = _ranks(first), _ranks(second)
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum()))


def _ranks(values: Sequence[float]) -> Floats:
    return np.array([sum(b < a for b in values) + sum(b == a for b in values) / 2 for a in values])


def policies(episodes: Sequence[Sums]) -> dict[str, str]:
    """Policy files of MemDecay and its variant: half-lives from the dev scenarios where there are any, and from all."""
    dev = {scenario.name for scenario in load_scenarios("dev")}
    files = {}
    for split, chosen in (("dev", [one for one in episodes if one.scenario in dev]), ("all", episodes)):
        if chosen:
            half_lives = calibrated(chosen)
            for name in ("memdecay", "memdecay-lift"):
                files[f"{name}-{split}.toml"] = policy.dumps(policy.get(name, half_life=half_lives))
    return files


def calibrated(episodes: Sequence[Sums]) -> dict[str, float]:
    """Half-lives by region, one rate for all tiers; infinite where nothing decays. A region without data is left out.

    The system region's is the one without sinks: how its content fades, which pages are scored by.
    """
    _, mass, count = _stack(episodes, sorted({one.tier for one in episodes}))
    lines = {
        label: regress(mass[..., row, :].sum(0), count[..., row, :].sum(0)) for row, label in enumerate(ROWS)
    }
    lines[Region.SYSTEM.label] = lines.pop(BEYOND_SINKS) or lines[Region.SYSTEM.label]
    return {row: half_life(line.rate) or math.inf for row, line in lines.items() if line is not None}
