"""What a command says of a place that it could not write to, before it works for hours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tierkv.commands import app
from tierkv.errors import ConfigError
from tierkv.outputs import check_writable


def test_a_file_that_can_be_written_passes_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("before")
    check_writable(tmp_path / "there.json", tmp_path / "new" / "deep" / "new.json")
    assert [entry.name for entry in tmp_path.iterdir()] == ["there.json"]
    assert (tmp_path / "there.json").read_text() == "before"


def test_what_is_no_file_or_cannot_be_one_is_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for place, said in (
        (tmp_path, "is a folder"),
        (tmp_path / "pipe", "is no plain file"),
        (tmp_path / "file" / "a.json", "cannot be written: Not a directory"),
        (Path("/proc/self/new/a.json"), "cannot be written"),  # not even root writes there
    ):
        with pytest.raises(ConfigError, match=said) as refused:
            check_writable(tmp_path / "good.json", place)
        assert str(place) in str(refused.value)


@pytest.mark.parametrize(
    "command",
    [("bench", "quant"), ("bench", "facts"), ("bench", "decode"), ("bench", "attention"), ("calibrate",)],
)
def test_commands_refuse_such_a_place_before_they_begin(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tierkv.study.model.load_smollm2", "tierkv.benchmarks.attention.run.run"):
        monkeypatch.setattr(module, lambda *_: pytest.fail("it began"))
    (tmp_path / "file").touch()
    options = (
        ["--out"]
        if command[0] == "calibrate" or command[1] in ("facts", "attention")
        else ["--out", "--plot"]
    )
    for option in options:
        done = CliRunner().invoke(app, [*command, option, str(tmp_path / "file" / "a.json")])
        assert (done.exit_code, "cannot be written" in done.stderr) == (2, True), done.output
