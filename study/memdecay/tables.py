"""The study's figures for programs (`out/study.json`) and tables for people, in the shape of the paper's III and IV."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tierkv.study.memdecay.results import Results
from tierkv.study.memdecay.scenarios import PROBED
from tierkv.study.memdecay.statistics import Cell, Signs, cells, compare

PAPER: dict[tuple[str, str, float], str] = {
    ("short", "full", 1.0): ".97/.96",
    ("long", "full", 1.0): ".91/.93",
    ("short", "random", 0.25): ".20/.23",
    ("long", "random", 0.25): ".17/.19",
    ("short", "streaming", 0.25): ".16/.21",
    ("long", "streaming", 0.25): ".10/.11",
    ("short", "h2o", 0.25): ".15/.19",
    ("long", "h2o", 0.25): ".33/.38",
    ("short", "memdecay", 0.25): ".32/.10",
    ("long", "memdecay", 0.25): ".38/.18",
    ("short", "random", 0.5): ".38/.37",
    ("long", "random", 0.5): ".31/.35",
    ("short", "streaming", 0.5): ".27/.36",
    ("long", "streaming", 0.5): ".10/.12",
    ("short", "h2o", 0.5): ".32/.40",
    ("long", "h2o", 0.5): ".46/.53",
    ("short", "memdecay", 0.5): ".49/.32",
    ("long", "memdecay", 0.5): ".43/.28",
}
"""Tables III and IV of the paper (arXiv 2607.10582), Qwen2.5-1.5B, all / non-system: beside ours, not to be reached."""

ORDER = (
    "full", "random", "streaming", "h2o", "h2o-prompts", "tova", "snapkv", "ema", "memdecay", "memdecay-lift",
    "memdecay-lift-prompts", "tiered-digests", "tiered-low-bit", "tiered",
)  # fmt: skip
RIVALS = {
    "memdecay-lift": ("memdecay", "h2o"),
    "memdecay-lift-prompts": ("memdecay", "h2o", "h2o-prompts"),
}
"""Whom each is compared with."""


class Comparison(msgspec.Struct, frozen=True):
    """Scenario by scenario, on what is not system."""

    tier: str
    budget: float
    first: str
    second: str
    signs: Signs


class StudyTables(msgspec.Struct, frozen=True):
    split: str
    cells: list[Cell]
    comparisons: list[Comparison]


def summarize(results: Results, split: str) -> StudyTables:
    found = sorted(cells(results), key=lambda c: (c.tier != "short", ORDER.index(c.policy), -c.budget))
    known = {(c.tier, c.budget, c.policy) for c in found}
    comparisons = [
        Comparison(tier, budget, policy, rival, compare(results, tier, budget, policy, rival))
        for tier, budget, policy in sorted(known)
        for rival in RIVALS.get(policy, ())
        if (tier, budget, rival) in known
    ]
    return StudyTables(split, found, comparisons)


def render(tables: StudyTables) -> Group:
    parts: list[Table | Text] = []
    for tier in dict.fromkeys(cell.tier for cell in tables.cells):
        parts.append(_recall_table(tier, [cell for cell in tables.cells if cell.tier == tier]))
    parts += [
        Text(f"{c.tier}, {c.budget:.0%}: {c.first} against {c.second}, scenarios won/tied/lost "
             f"{c.signs.wins}/{c.signs.ties}/{c.signs.losses} (non-system)")
        for c in tables.comparisons
    ]  # fmt: skip
    notes = (
        f"{tables.split} scenarios, {max(cell.probes for cell in tables.cells)} probes a cell; other: all but system, "
        "with its interval: 95%, bootstrap over scenarios",
        "at: the share of tokens that is kept; of the tiered arms, of the KV bytes that are in HBM",
        "the tiered arms' recall sees the question, the policies choose before it comes",
        "-prompts: the last 8 queries of each prompt are observed as well; lift: memdecay-lift",
        "paper: the same policy on Qwen2.5-1.5B and its own scenarios",
    )
    return Group(*parts, *(Text(line, style="dim") for line in notes))


def _recall_table(tier: str, found: Sequence[Cell]) -> Table:
    """At most 80 columns wide."""
    table = Table(
        title=f"Probe recall, {tier} tier", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False
    )
    table.add_column("policy", no_wrap=True)
    for name in ("at", "all/other", "95%", "sys", "user", "tool", "retr", "paper"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in found:
        table.add_row(
            cell.policy.replace("memdecay-lift", "lift"), f"{cell.budget:.0%}",
            f"{cell.recall:.2f}/{cell.non_system:.2f}",
            f"{cell.non_system_low:.2f}-{cell.non_system_high:.2f}",
            *(f"{cell.by_region[region.label]:.2f}" for region in PROBED),
            PAPER.get((cell.tier, cell.policy, cell.budget), ""),
        )  # fmt: skip
    return table
