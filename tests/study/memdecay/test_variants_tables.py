"""The rule by which an idea is kept, on cells written by hand."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.study.memdecay.test_ablate import pair_of
from tierkv.errors import ConfigError
from tierkv.regions import Region
from tierkv.study.memdecay import variants
from tierkv.study.memdecay.statistics import Signs
from tierkv.study.memdecay.survival import Cell, Row, Survival
from tierkv.study.memdecay.variants_tables import Report, judge, render

U, R, P = Region.USER, Region.RETRIEVAL, Region.SCRATCHPAD


def row(name: str, long: tuple[str, str], short: tuple[float, float], survival: float = 0.5) -> Row:
    """long: `wins-losses` at 25% and 50%; short: survival of what is not system there."""
    cells = []
    for budget, signs, non_system in zip((0.25, 0.5), long, short, strict=True):
        wins, losses = map(int, signs.split("-"))
        cells.append(Cell("long", budget, 48, survival, 0.4, {}, {}, Signs(wins, 0, losses)))
        cells.append(Cell("short", budget, 48, survival, non_system, {}, {}, Signs(0, 4, 0)))
    return Row("memdecay-lift", name, "", cells)


LIFT = row("lift", ("0-0", "0-0"), (0.1, 0.5))


def survival_of(*rows: Row) -> Survival:
    return Survival("m", 4, 24, {}, [LIFT, *rows])


@pytest.mark.parametrize(
    ("long", "short", "against"),
    [
        (("3-1", "2-1"), (0.1, 0.5), []),
        (("3-1", "1-1"), (0.1, 0.5), ["long 50% wins 1 and loses 1"]),
        (("0-2", "2-1"), (0.1, 0.6), ["long 25% wins 0 and loses 2"]),
        (("3-1", "2-1"), (0.0, 0.9), ["short 25% falls from 10.0% to 0.0%"]),
        (("0-0", "0-1"), (0.1, 0.4), [
            "long 25% wins 0 and loses 0", "long 50% wins 0 and loses 1", "short 50% falls from 50.0% to 40.0%",
        ]),
    ],
)  # fmt: skip
def test_an_idea_must_win_in_the_long_tier_and_not_fall_in_the_short(
    long: tuple[str, str], short: tuple[float, float], against: list[str]
) -> None:
    (verdict,) = judge(survival_of(row("idea", long, short)))
    assert (verdict.name, verdict.kept, verdict.against, verdict.price) == ("idea", not against, against, [])


def test_what_all_facts_pay_is_told_beside_the_verdict() -> None:
    found = survival_of(row("idea", ("2-1", "2-1"), (0.1, 0.5), survival=0.4))
    (verdict,) = judge(found)
    assert verdict.kept and len(verdict.price) == 4
    assert verdict.price[0] == "long 25% from 50.0% to 40.0%"
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(
        render(Report(found, [verdict], {"best layers of a": [3, 4], "heads of a": list(range(68))}))
    )
    text = " ".join(console.export_text().split())
    assert "idea passes; of all facts fewer survive, long 25% from 50.0% to 40.0%" in text
    assert "best layers of a: 3, 4" in text and "heads of a" not in text


def test_without_a_tier_there_is_no_verdict() -> None:
    pair = pair_of([(U, 16), (R, 16), (P, 16)], [(U, 4, 6)])
    with pytest.raises(ConfigError, match="tiers short and long; record episodes of both, not only of long"):
        variants.run([pair])


def test_every_idea_has_a_row_and_a_verdict() -> None:
    blocks, facts = [(U, 16), (R, 16), (P, 80)], [(U, 4, 6), (R, 20, 22)]
    report = variants.run([pair_of(blocks, facts), pair_of(blocks, facts, tier="short")])
    names = [row.label for row in report.survival.rows]
    assert names == ["lift as it is", *(idea.name for idea in variants.IDEAS)]
    assert [verdict.name for verdict in report.verdicts] == names[1:]
    assert not any(v.kept for v in report.verdicts if "control" in v.name)
