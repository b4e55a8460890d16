"""Survival of facts, setting by setting: what the studies of ablations, variants and labels measure, and their table.

A fact survives when every token of its value is kept. Survival is not recall: a value that is kept may still not be
named, because what it stood in is gone (`tierkv study recall` asks). It needs no model, only recorded attention, so
many settings can be compared; and the same contexts are kept by each, so settings compare scenario by scenario.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table

from tierkv.errors import ConfigError
from tierkv.regions import Region
from tierkv.study.memdecay.evict import straddling_share
from tierkv.study.memdecay.results import Probed
from tierkv.study.memdecay.scenarios import Episode
from tierkv.study.memdecay.statistics import Signs, compare
from tierkv.study.memdecay.traces import Trace

BUDGETS = (0.25, 0.5)

Pair = tuple[Episode, Trace]
"""An episode and the attention that was recorded of it."""

Told = Callable[[int, int, str], None]
"""Hears, before each piece of work and after the last: how many are done, how many there are, and what comes."""

Keeps = Callable[[Episode, Trace, float], NDArray[np.bool_]]
"""Which tokens are left, `[tokens]`, of a budget (a share) of them."""


def unheard(done: int, total: int, what: str) -> None:
    """Nobody is told."""


class Case(NamedTuple):
    """A setting to be measured: `value` of `what`. Cases of one name are averaged (the seeds of chance).

    The first case of a policy is its default, which the others are compared with.
    """

    policy: str
    what: str
    value: str
    keeps: Keeps

    @property
    def name(self) -> tuple[str, str, str]:
        return self.policy, self.what, self.value


class Cell(msgspec.Struct, frozen=True):
    """Shares of facts that survive. `signs`: scenarios won, tied and lost against the default, on what is not system.

    `facts` counts an episode's fact once, however many cases are averaged. `by_value`: those that are not system, whose
    value is a `number` or a `word`.
    """

    tier: str
    budget: float
    facts: int
    survival: float
    non_system: float
    by_region: dict[str, float]
    by_value: dict[str, float]
    signs: Signs


class Fate(NamedTuple):
    """What became of a fact, as the answer that a reader without fault would give."""

    probed: Probed
    value: str  # number or word


class Row(msgspec.Struct, frozen=True):
    policy: str
    what: str
    value: str
    cells: list[Cell]

    @property
    def label(self) -> str:
        return f"{self.what} {self.value}".strip()

    def at(self, tier: str, budget: float) -> Cell:
        return next(cell for cell in self.cells if (cell.tier, cell.budget) == (tier, budget))


class Survival(msgspec.Struct, frozen=True):
    """`model` recorded the attention. A policy's default comes first of its rows. `straddling`: by tier, the share of
    pages that hold tokens of more than one region where pages do not heed regions.
    """

    model: str
    scenarios: int
    episodes: int
    straddling: dict[str, float]
    rows: list[Row]


def survival(pairs: Iterable[Pair], cases: Sequence[Case], told: Told = unheard) -> Survival:
    """Every case on every pair, at each budget.

    Raises:
        ConfigError: there are no pairs, their traces are of more than one model, or one is not of its episode's tokens.
    """
    known = list(pairs)
    models = {trace.model for _, trace in known}
    if len(models) != 1:
        raise ConfigError(
            f"{len(known)} traces of {len(models)} models: survival is measured on traces of one model; record some"
        )
    fates: dict[tuple[str, str, str], list[Fate]] = {case.name: [] for case in cases}
    for done, (episode, trace) in enumerate(known):
        told(done, len(known), f"{episode.name}, {len(cases)} settings")
        if trace.tokens.tolist() != episode.tokens:
            raise ConfigError(
                f"the trace {trace.name} is not of the tokens of {episode.name}; record it again"
            )
        for case in cases:
            for budget in BUDGETS:
                fates[case.name] += _fates(case, episode, trace, budget)
    told(len(known), len(known), "done")
    defaults = {policy: name for name in reversed(fates) for policy in [name[0]]}
    rows = [Row(*name, _cells(found, fates[defaults[name[0]]])) for name, found in fates.items()]
    straddling: dict[str, list[float]] = defaultdict(list)
    for episode, trace in known:
        straddling[episode.tier].append(straddling_share(trace))
    means = {tier: sum(shares) / len(shares) for tier, shares in straddling.items()}
    return Survival(models.pop(), len({e.scenario for e, _ in known}), len(known), means, rows)


def _fates(case: Case, episode: Episode, trace: Trace, budget: float) -> list[Fate]:
    kept = case.keeps(episode, trace, budget)
    return [
        Fate(
            Probed(
                episode.tier, case.policy, budget, episode.scenario, episode.variant, fact.region.label,
                bool(kept[fact.start : fact.stop].all()), int(kept.sum()), len(kept), "",
            ),
            "number" if fact.gold.isdigit() else "word",
        )
        for fact in episode.facts
    ]  # fmt: skip


def _cells(found: Sequence[Fate], default: Sequence[Fate]) -> list[Cell]:
    grouped: dict[tuple[str, float], list[Fate]] = defaultdict(list)
    for one in found:
        grouped[one.probed.tier, one.probed.budget].append(one)
    both = [
        *(msgspec.structs.replace(one.probed, policy="this") for one in found),
        *(msgspec.structs.replace(one.probed, policy="default") for one in default),
    ]
    return [
        _cell(tier, budget, fates, compare(both, tier, budget, "this", "default"))
        for (tier, budget), fates in sorted(grouped.items())
    ]


def _cell(tier: str, budget: float, fates: Sequence[Fate], signs: Signs) -> Cell:
    by_region: dict[str, list[bool]] = defaultdict(list)
    by_value: dict[str, list[bool]] = defaultdict(list)
    for one, value in fates:
        by_region[one.region].append(one.right)
        if one.region != Region.SYSTEM.label:
            by_value[value].append(one.right)
    return Cell(
        tier, budget, len({(f.probed.scenario, f.probed.variant, f.probed.region) for f in fates}),
        _share([f.probed.right for f in fates]), _share([right for some in by_value.values() for right in some]),
        {region: _share(kept) for region, kept in by_region.items()},
        {value: _share(kept) for value, kept in sorted(by_value.items())}, signs,
    )  # fmt: skip


def _share(kept: Sequence[bool]) -> float:
    return sum(kept) / len(kept)


def render_rows(title: str, rows: Sequence[Row]) -> Table:
    """At most 80 columns wide, where labels have at most 20 characters."""
    table = Table(
        title=title, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, title_justify="left"
    )
    table.add_column("", no_wrap=True)
    places = [(cell.tier, cell.budget) for cell in rows[0].cells]
    for tier, budget in places:
        table.add_column(f"{tier} {budget:.0%}", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.label, *(_text(row.at(*place)) for place in places))
    return table


def _text(cell: Cell) -> str:
    signs = cell.signs
    return f"{100 * cell.non_system:.0f}/{100 * cell.survival:.0f} {signs.wins}-{signs.ties}-{signs.losses}"


def legend(report: Survival) -> str:
    facts = max(cell.facts for row in report.rows for cell in row.cells)
    straddling = ", ".join(f"{tier} {share:.0%}" for tier, share in report.straddling.items())
    return (
        f"{report.episodes} episodes of {report.scenarios} scenarios, {facts} facts a cell, attention of "
        f"{report.model}. Facts that survive, in percent: all but system / all; then scenarios won-tied-lost against "
        "the default, all but system. A fact that survives may still not be named: survival is not recall. Pages of 16 "
        f"that straddle regions: {straddling}."
    )
