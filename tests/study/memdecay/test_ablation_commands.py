"""`tierkv study ablate`, `variants` and `labels` from a folder of traces, without the model."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tierkv.errors import ConfigError
from tierkv.study.memdecay.cli import write
from tierkv.study.memdecay.command import app
from tierkv.study.memdecay.record import of_episode
from tierkv.study.memdecay.scenarios import TIERS, build, load_scenarios
from tierkv.study.memdecay.traces import Trace
from tierkv.study.model import load_tokenizer


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one scenario in both tiers: every query looks at all tokens alike."""
    folder = tmp_path_factory.mktemp("traces")
    words, scenario = load_tokenizer(), load_scenarios("dev")[0]
    for tier in TIERS:
        name, tokens, regions, blocks, stages = of_episode(build(scenario, 0, tier, words))
        begins = [0, *stages[:-1]]
        queries = [q for a, b in zip(begins, stages, strict=True) for q in range(max(a, b - 48), b)]
        mass = np.concatenate([np.full(q + 1, 1 / (q + 1)) for q in queries])
        Trace(
            name, "even", np.array(tokens, np.int32), np.array(regions, np.int8), np.array(blocks, np.int32),
            np.array(stages, np.int32), np.array(queries, np.int32), mass.astype(np.float16),
        ).save(folder / f"{name}.safetensors")  # fmt: skip
    return folder


@pytest.mark.parametrize("command", ["ablate", "variants", "labels"])
def test_a_study_of_survival_writes_what_it_shows(command: str, traces: Path, tmp_path: Path) -> None:
    common = [command, "--traces", str(traces), "--split", "dev", "--out", str(tmp_path)]
    ended = CliRunner().invoke(app, [*common, "--json"])
    assert ended.exit_code == 0, ended.output
    written = json.loads((tmp_path / f"{command}-dev.json").read_bytes())
    assert written.pop("command") and written.pop("date")
    if command == "variants":
        written.pop("model")  # of the stamp; elsewhere it is the report's own
    assert json.loads(ended.stdout) == written
    rows = written["survival"]["rows"] if command == "variants" else written["rows"]
    assert {cell["facts"] for row in rows for cell in row["cells"]} == {4}
    shown = CliRunner().invoke(app, common)
    assert "survival is not recall" in " ".join(shown.stdout.split())


def test_of_scenarios_without_traces_nothing_is_measured(traces: Path, tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["labels", "--traces", str(traces), "--out", str(tmp_path)])
    assert ended.exit_code == 2
    assert "no attention trace of the report scenarios" in ended.stderr


def test_where_nothing_can_be_written_nothing_is_measured(traces: Path, tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_text("mine")
    common = ["labels", "--traces", str(traces), "--split", "dev"]
    for folder in (file, file / "deeper"):
        ended = CliRunner().invoke(app, [*common, "--out", str(folder)])
        assert ended.exit_code == 2 and f"nothing can be written to {folder}" in ended.stderr
    assert file.read_text() == "mine"


def test_figures_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "figures.json"
    write(file, [1])

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as begun:
            begun.write(content[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match=r"figures\.json cannot be written: No space left"):
        write(file, [2])
    assert json.loads(file.read_text()) == [1]
