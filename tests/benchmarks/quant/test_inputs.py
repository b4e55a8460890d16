"""Texts: no two are alike, and none is both fitted on and reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.benchmarks.quant import FORCED, RECENT, SINKS
from tierkv.benchmarks.quant.inputs import CALIBRATION, CONTEXT, DATA, DESIGNED_ON, FILE, REPORT, Text, read

ROOT = Path(__file__).resolve().parents[3]


def test_nothing_is_fitted_on_what_is_reported() -> None:
    assert set(REPORT) == set(CALIBRATION)
    for family, names in REPORT.items():
        parts = {part for name in names for part in name.split(", ")}
        others = {part for name in CALIBRATION[family] for part in name.split(", ")}
        if family == "tau-airline":  # a task's trials share what the user says: tasks count
            parts, others = ({part for part in side if "task" in part} for side in (parts, others))
        assert not parts & others, family


def test_nothing_is_reported_that_codecs_were_designed_on() -> None:
    assert len(DESIGNED_ON["tau-airline"]) == 20  # runs 20 to 39 of the file: ten tasks, trials 2 and 3
    for family, names in DESIGNED_ON.items():
        assert not set(names) & set(REPORT[family]), family


@pytest.mark.model
@pytest.mark.parametrize("with_runs", [False, True])
def test_every_input_differs_within_what_is_packed(with_runs: bool) -> None:
    from tierkv.study.model import load_tokenizer

    data = ROOT / DATA if with_runs else None
    if data is not None and not (data / FILE).is_file():
        pytest.skip(f"tau-airline is not at {data}")
    tokenizer = load_tokenizer()
    texts = read(REPORT, tokenizer, data, CONTEXT)
    others = read(CALIBRATION, tokenizer, data, CONTEXT)
    assert len(texts) == (16 if with_runs else 12) and len(others) == (12 if with_runs else 9)
    assert all(2 * RECENT < text.context <= CONTEXT for text in others)
    assert all(text.context == CONTEXT and len(text.tokens) == CONTEXT + FORCED + 1 for text in texts)
    among = {(a.title, b.title): overlap(a, b) for i, a in enumerate(texts) for b in texts[:i]}
    assert all(share < 0.2 for share in among.values()), max(among, key=among.__getitem__)
    across = {(a.title, b.title): overlap(a, b) for a in texts for b in others}
    assert all(share < 0.02 for share in across.values()), max(across, key=across.__getitem__)


def overlap(one: Text, other: Text) -> float:
    """Share of the packed span's runs of 32 tokens that the other one has too, anywhere in its own."""

    def runs(text: Text) -> set[tuple[int, ...]]:
        span = text.tokens[SINKS : text.context - RECENT]
        return {tuple(span[at : at + 32]) for at in range(len(span) - 31)}

    mine, theirs = runs(one), runs(other)
    return len(mine & theirs) / min(len(mine), len(theirs))


@pytest.mark.model
def test_the_first_inputs_are_of_different_families() -> None:
    from tierkv.study.model import load_tokenizer

    texts = read(REPORT, load_tokenizer(), None, 928, 3)
    assert [text.family for text in texts] == ["prose", "code", "agent"]
    assert {text.context for text in texts} == {928}
