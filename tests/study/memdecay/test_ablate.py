"""Survival counted by hand, and settings that change what stays, on contexts of a few pages."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from tierkv.daemon import policy
from tierkv.errors import ConfigError
from tierkv.regions import Region
from tierkv.study.memdecay import ablate
from tierkv.study.memdecay.arms import Arm
from tierkv.study.memdecay.scenarios import Block, Episode, Fact, Tier
from tierkv.study.memdecay.statistics import Signs
from tierkv.study.memdecay.survival import Case, Keeps, Pair, survival
from tierkv.study.memdecay.traces import Trace

S, U, R, P = Region.SYSTEM, Region.USER, Region.RETRIEVAL, Region.SCRATCHPAD


def pair_of(
    blocks: Sequence[tuple[Region, int]], facts: Sequence[tuple[Region, int, int]], scenario: str = "mill",
    tier: Tier = "long", variant: int = 0,
) -> Pair:  # fmt: skip
    """One stage of blocks of so many tokens; every query spreads its attention evenly."""
    stops = np.cumsum([count for _, count in blocks]).tolist()
    placed = tuple(
        Block("opening", region, stop - count, stop, "", ())
        for (region, count), stop in zip(blocks, stops, strict=True)
    )
    total = stops[-1]
    asked = tuple(
        Fact(region, "?", "61" if region == U else "fir", 0, start, stop) for region, start, stop in facts
    )
    episode = Episode(scenario, variant, tier, list(range(total)), placed, (total,), asked)
    queries = np.arange(max(0, total - 48), total, dtype=np.int32)
    mass = np.concatenate([np.full(q + 1, 1 / (q + 1)) for q in queries]).astype(np.float16)
    regions = np.array([b.region for b in placed for _ in range(b.start, b.stop)], np.int8)
    starts = np.array([b.start for b in placed], np.int32)
    trace = Trace(episode.name, "m", np.arange(total, dtype=np.int32), regions, starts, np.array([total], np.int32),
                  queries, mass)  # fmt: skip
    return episode, trace


def keeping(*spans: tuple[int, int]) -> Keeps:
    def keeps(episode: Episode, trace: Trace, budget: float) -> NDArray[np.bool_]:
        kept = np.zeros(len(trace), bool)
        for start, stop in spans:
            kept[start:stop] = True
        return kept

    return keeps


FACTS = ((S, 0, 2), (U, 10, 13), (R, 20, 22))
BLOCKS = ((S, 8), (U, 8), (R, 8), (P, 8))


def test_a_fact_survives_when_all_of_its_tokens_do() -> None:
    cases = [Case("p", "default", "", keeping((0, 12), (20, 22))), Case("p", "more", "", keeping((0, 13)))]
    report = survival([pair_of(BLOCKS, FACTS)], cases)
    first, second = (row.at("long", 0.25) for row in report.rows)
    assert first.by_region == {"system": 1, "user": 0, "retrieval": 1}
    assert second.by_region == {"system": 1, "user": 1, "retrieval": 0}
    assert (first.by_value, second.by_value) == ({"number": 0, "word": 1}, {"number": 1, "word": 0})
    assert report.straddling == {"long": 1.0}  # 8 tokens of each region: both pages of 16 hold two
    assert (first.survival, first.non_system, first.facts) == (pytest.approx(2 / 3), 0.5, 3)
    assert (report.model, report.scenarios, report.episodes) == ("m", 1, 1)


def test_scenarios_are_won_by_what_is_not_system() -> None:
    def keeps(episode: Episode, trace: Trace, budget: float) -> NDArray[np.bool_]:
        spans = {"won": [(10, 13), (20, 22)], "tied": [(0, 2), (20, 22)], "lost": [(0, 2)]}
        return keeping(*spans[episode.scenario])(episode, trace, budget)

    pairs = [pair_of(BLOCKS, FACTS, name, variant=v) for name in ("won", "tied", "lost") for v in (0, 1)]
    cases = [Case("p", "default", "", keeping((10, 13))), Case("p", "other", "", keeps)]
    cell = survival(pairs, cases).rows[1].at("long", 0.5)
    assert cell.signs == Signs(1, 1, 1)
    assert cell.facts == 18 and cell.non_system == pytest.approx(6 / 12)  # 2 variants of 2, 1 and no facts


def test_each_policy_has_its_own_default() -> None:
    cases = [
        Case("p", "default", "", keeping((10, 13))),
        Case("q", "default", "", keeping()),
        Case("q", "other", "", keeping((10, 13))),
    ]
    rows = survival([pair_of(BLOCKS, FACTS)], cases).rows
    assert [row.at("long", 0.25).signs for row in rows] == [Signs(0, 1, 0), Signs(0, 1, 0), Signs(1, 0, 0)]


def test_cases_of_one_name_are_averaged() -> None:
    seeds = [Case("p", "noise", "", keeping((10, 13))), Case("p", "noise", "", keeping())]
    (row,) = survival([pair_of(BLOCKS, FACTS)], seeds).rows
    assert (row.at("long", 0.25).non_system, row.at("long", 0.25).facts) == (0.25, 3)


def test_traces_of_two_models_or_of_other_tokens_are_refused() -> None:
    case = Case("p", "default", "", keeping())
    episode, trace = pair_of(BLOCKS, FACTS)
    with pytest.raises(ConfigError, match="2 traces of 2 models"):
        survival([(episode, trace), (episode, replace(trace, model="n"))], [case])
    with pytest.raises(ConfigError, match="0 traces"):
        survival([], [case])
    with pytest.raises(ConfigError, match="not of the tokens of mill-0-long"):
        survival([(episode, replace(trace, tokens=trace.tokens + 1))], [case])


# User (base .6, half-life 35) beside retrieval (.4, 66), then 8 tokens of scratchpad; half of 40 tokens is one page of
# 16 and no more. All age 8 steps after a burst of 8: user .51, retrieval .37, scratchpad about .22. After a burst of
# 40 user tokens are 24 to 39 steps old, about .32, retrieval's 8 to 23, about .34. Attention adds less than .015.
PAGES = pair_of([(U, 16), (R, 16), (P, 8)], [(U, 4, 6), (R, 20, 22)])


def found(report_file: Path | None = None) -> dict[str, dict[str, float]]:
    report = ablate.run([PAGES], report_file)
    return {row.label: row.at("long", 0.5).by_region for row in report.rows if row.policy == "memdecay"}


def test_rates_fitted_on_a_long_burst_choose_otherwise_after_one() -> None:
    rows = found()
    assert rows["default"] == rows["alpha 0.2"] == rows["k 8"] == {"user": 1, "retrieval": 0}
    assert rows["final burst 48"] == {"user": 0, "retrieval": 1}
    assert "half-lives fitted" not in rows


def test_fitted_half_lives_come_from_a_policy_file(tmp_path: Path) -> None:
    file = tmp_path / "fitted.toml"
    file.write_text(policy.dumps(policy.get("memdecay-lift", half_life={"user": 1.0})))
    rows = found(file)
    assert rows["default"] == {"user": 1, "retrieval": 0}
    assert rows["half-lives fitted"] == {"user": 0, "retrieval": 1}  # 8 half-lives: .002
    file.write_text(policy.dumps(policy.get("h2o")))
    with pytest.raises(ConfigError, match="'h2o', which has no half-lives"):
        found(file)


def test_pages_of_another_size_and_single_tokens_fill_a_budget_otherwise() -> None:
    episode, trace = pair_of([(U, 100)], [(U, 4, 6)])
    kept = {
        f"{case.what} {case.value}".strip(): int(case.keeps(episode, trace, 0.25).sum())
        for case in ablate.cases(Arm("memdecay", policy.get("memdecay"), "straddling", pinned=True))
    }
    # Pages leave until 25 tokens are left: of 16 one, of 8 three; the last, of 4 tokens, is the freshest.
    assert kept["default"] == 20 and kept["single tokens"] == 25
    assert kept["straddling 8"] == 20 and kept["straddling 32"] == 4


@pytest.mark.parametrize("name", ablate.DEFAULTS)
def test_every_case_has_a_name_of_its_own_and_the_default_comes_first(name: str) -> None:
    (arm,) = (arm for arm in ablate.compared() if arm.name == name)
    names = [case.name for case in ablate.cases(arm)]
    assert len(set(names)) == len(names)
    assert names[0] == (name, "default", "")
    default = {"memdecay": 0.5, "memdecay-lift": 24.0}[name]
    values = {value for _, what, value in names if what == "alpha"}
    assert values == {str(v) for v in ablate.SETTINGS[name]["alpha"]} - {str(default)}


def test_a_table_fits_a_terminal() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(ablate.render(ablate.run([PAGES, pair_of(BLOCKS, FACTS, "inn", "short")])))
    text = console.export_text()
    assert "…" not in text
    assert "final burst 48" in text and "survival is not recall" in " ".join(text.split())
