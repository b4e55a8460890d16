"""What the study of variants found: whether an idea is to be kept, by the rule that was set before, and the table.

An idea is kept if, in the long tier at both budgets, it wins more scenarios against lift than it loses, and if the
survival of what is not system in the short tier is not lower at either. Survival is not recall: an idea that passes
here is still to be measured by probes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Group
from rich.text import Text

from tierkv.errors import ConfigError
from tierkv.study.memdecay.scenarios import TIERS
from tierkv.study.memdecay.survival import BUDGETS, Row, Survival, legend, render_rows


class Verdict(msgspec.Struct, frozen=True):
    """In words, `against`: each condition of the rule that does not hold; `price`: where survival of all facts falls,
    system's among them, of which the rule says nothing.
    """

    name: str
    kept: bool
    against: list[str]
    price: list[str]


class Report(msgspec.Struct, frozen=True):
    """The first row is lift itself. `chosen`: what was fitted, where something was, and on which scenarios."""

    survival: Survival
    verdicts: list[Verdict]
    chosen: dict[str, list[int]] = {}


def judge(found: Survival) -> list[Verdict]:
    """The rule, for every row but the first.

    Raises:
        ConfigError: the rule needs both tiers, and one has no episodes.
    """
    default, *others = found.rows
    tiers = {cell.tier for cell in default.cells}
    if tiers != set(TIERS):
        raise ConfigError(
            f"variants are judged in the tiers {' and '.join(TIERS)}; record episodes of both, not only of "
            f"{' and '.join(sorted(tiers))}"
        )
    return [
        Verdict(row.label, not against, against, _price(row, default))
        for row in others
        for against in [_against(row, default)]
    ]


def _against(row: Row, default: Row) -> list[str]:
    found = []
    for budget in BUDGETS:
        signs = row.at("long", budget).signs
        if signs.wins <= signs.losses:
            found.append(f"long {budget:.0%} wins {signs.wins} and loses {signs.losses}")
    for budget in BUDGETS:
        now, before = (one.at("short", budget).non_system for one in (row, default))
        if now < before:
            found.append(f"short {budget:.0%} falls from {before:.1%} to {now:.1%}")
    return found


def _price(row: Row, default: Row) -> list[str]:
    return [
        f"{cell.tier} {cell.budget:.0%} from {before:.1%} to {cell.survival:.1%}"
        for cell in row.cells
        for before in [default.at(cell.tier, cell.budget).survival]
        if cell.survival < before
    ]


def render(report: Report) -> Group:
    lines = [_line(one) for one in report.verdicts]
    lines += [f"{name}: {', '.join(map(str, parts))}" for name, parts in _few(report.chosen)]
    return Group(
        render_rows("Variants of memdecay-lift", report.survival.rows),
        *map(Text, lines),
        Text(legend(report.survival), style="dim"),
    )


def _line(one: Verdict) -> str:
    verdict = "passes" if one.kept else f"does not pass: {', '.join(one.against)}"
    price = f"; of all facts fewer survive, {', '.join(one.price)}" if one.kept and one.price else ""
    return f"{one.name} {verdict}{price}"


FEW = 16
"""More parts than this are told to programs only."""


def _few(chosen: dict[str, list[int]]) -> Sequence[tuple[str, list[int]]]:
    return [(name, parts) for name, parts in chosen.items() if len(parts) <= FEW]
