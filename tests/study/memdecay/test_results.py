"""Answers survive interruptions; recall, intervals and signs by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tierkv.errors import ConfigError
from tierkv.study.memdecay.recall_figures import draw
from tierkv.study.memdecay.results import Probed, Results, key
from tierkv.study.memdecay.statistics import bootstrap, cells, compare
from tierkv.study.memdecay.tables import render, summarize
from tierkv.study.memdecay.traces import Trace, load_trace

REGIONS = ("system", "user", "tool_out", "retrieval")


def probed(policy: str, scenario: str, rights: str, variant: int = 0, settings: str = "s") -> list[Probed]:
    """`rights`: a digit for each region."""
    return [
        Probed("long", policy, 0.25, scenario, variant, region, right == "1", 25, 100, settings)
        for region, right in zip(REGIONS, rights, strict=True)
    ]


def test_answers_are_read_back_and_known(tmp_path: Path) -> None:
    results = Results(tmp_path / "new" / "a.jsonl")
    answers = probed("h2o", "ferry", "1010")
    assert key(answers[0]) not in results
    results.add(answers)
    again = Results(tmp_path / "new" / "a.jsonl")
    assert list(again) == answers
    assert key(answers[0]) in again
    assert key(probed("h2o", "ferry", "1010", settings="other")[0]) not in again


def test_a_line_that_was_cut_off_is_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    Results(file).add(probed("h2o", "ferry", "1010"))
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:40])
    results = Results(file)
    assert len(list(results)) == 4 and file.read_bytes() == whole
    results.add(probed("h2o", "bridge", "1111"))
    assert len(list(Results(file))) == 8


def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"tier": "long"}\n')
    with pytest.raises(ConfigError, match=r"line 1 .* move the file away"):
        Results(file)
    assert file.read_text() == '{"tier": "long"}\n'


def test_recall_is_counted_over_probes_and_without_the_system() -> None:
    answers = probed("h2o", "ferry", "1010") + probed("h2o", "bridge", "0001") + probed("h2o", "mill", "1111")
    (cell,) = cells(answers)
    assert (cell.probes, cell.recall, cell.non_system) == (12, 7 / 12, 5 / 9)
    assert cell.by_region == {"system": 2 / 3, "user": 1 / 3, "tool_out": 2 / 3, "retrieval": 2 / 3}
    assert cell.kept == 0.25
    # The extreme draws of three scenarios are thrice the best and thrice the worst (1 in 27 each).
    assert (cell.low, cell.high) == (0.25, 1.0)


def test_seeds_of_chance_are_averaged_and_counted_once() -> None:
    answers = probed("random", "ferry", "1100", settings="0") + probed(
        "random", "ferry", "0000", settings="1"
    )
    (cell,) = cells(answers)
    assert (cell.probes, cell.recall) == (4, 0.25)


def test_an_interval_covers_what_it_should() -> None:
    """Means of 40 draws of a fair coin: a 95% interval holds the truth in most of 100 trials."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(100):
        coins = rng.integers(0, 2, 40)
        low, high = bootstrap(
            coins.tolist(), lambda drawn, coins=coins: float(coins[drawn].mean()), draws=300
        )
        held += low <= 0.5 <= high
    assert 88 <= held <= 99


def test_scenarios_are_compared_in_pairs() -> None:
    ours = probed("a", "ferry", "0111") + probed("a", "bridge", "0010") + probed("a", "mill", "1000")
    theirs = probed("b", "ferry", "1110") + probed("b", "bridge", "1001") + probed("b", "mill", "0001")
    signs = compare(ours + theirs, "long", 0.25, "a", "b")
    assert signs == (type(signs))(wins=1, ties=1, losses=1)  # 3/3 > 2/3, 1/3 = 1/3, 0 < 1/3


def test_tables_and_figures_show_every_cell(tmp_path: Path) -> None:
    results = Results(tmp_path / "a.jsonl")
    for policy in ("h2o", "memdecay", "memdecay-lift", "tiered"):
        results.add(probed(policy, "ferry", "1010") + probed(policy, "bridge", "0110"))
    found = summarize(results, "report")
    assert {(c.first, c.second) for c in found.comparisons} == {
        ("memdecay-lift", "memdecay"), ("memdecay-lift", "h2o"),
    }  # fmt: skip
    console = Console(width=200, record=True)
    console.print(render(found))
    text = console.export_text()
    assert "tiered" in text and ".33/.38" in text  # the paper's figure for h2o at 25%
    draw(found, tmp_path / "out" / "recall.png")
    assert (tmp_path / "out" / "recall.png").read_bytes().startswith(b"\x89PNG")


def trace() -> Trace:
    queries = np.array([2, 4], np.int32)
    return Trace(
        "one", "tiny", np.arange(5, dtype=np.int32), np.zeros(5, np.int8), np.array([0], np.int32),
        np.array([5], np.int32), queries, np.linspace(0, 1, 8).astype(np.float16),
    )  # fmt: skip


def test_a_trace_is_read_back(tmp_path: Path) -> None:
    trace().save(tmp_path / "sub" / "t.safetensors")
    again = load_trace(tmp_path / "sub" / "t.safetensors")
    assert (again.name, again.model, len(again)) == ("one", "tiny", 5)
    rows = list(again.rows())
    assert [(query, len(mass)) for query, mass in rows] == [(2, 3), (4, 5)]
    assert rows[1][1] == pytest.approx(np.linspace(0, 1, 8)[3:], abs=1e-3)


@pytest.mark.parametrize("damage", [b"", b"no trace", b"\xff" * 64])
def test_what_is_no_trace_is_refused(tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "t.safetensors"
    file.write_bytes(damage)
    with pytest.raises(ConfigError, match="record it again"):
        load_trace(file)


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("regions", np.full(5, 7, np.int8), "regions are not from 0 to 6"),
        ("blocks", np.array([0, 5], np.int32), "blocks are not from 0 to 4"),
        ("stages", np.zeros(0, np.int32), "stages are not from 1 to 5"),
        ("queries", np.array([4, 2], np.int32), "queries do not ascend"),
        ("queries", np.array([2.0, 4.0], np.float32), "queries is float32"),
        ("mass", np.full(8, np.nan, np.float16), "not every mass is a number"),
        ("model", None, "its model is None"),
    ],
)
def test_a_file_that_holds_what_cannot_be_is_refused(
    tmp_path: Path, part: str, value: object, said: str
) -> None:
    file = tmp_path / "t.safetensors"
    replace(trace(), **{part: value}).save(file)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"t\.safetensors is no whole attention trace: {said}"):
        load_trace(file)


def test_a_trace_whose_parts_do_not_fit_is_refused() -> None:
    good = trace()
    with pytest.raises(ConfigError, match="do not fit together"):
        Trace(
            good.name,
            good.model,
            good.tokens,
            good.regions,
            good.blocks,
            good.stages,
            good.queries,
            good.mass[:-1],
        )
