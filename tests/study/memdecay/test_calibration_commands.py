"""`tierkv study lifetimes` and `ema` from a folder of traces, without the model."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.study.memdecay import test_ema_sweep, test_lifetimes
from tierkv.daemon import policy
from tierkv.daemon.policy.decay import HALF_LIFE, RegionDecay
from tierkv.regions import Region
from tierkv.study.memdecay.command import app


def study(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    for name in ("library-0-short", "orchard-0-short"):
        test_lifetimes.traced(name).save(tmp_path / "traces" / f"{name}.safetensors")
    return tmp_path / "traces"


def test_lifetimes_leaves_figures_and_policy_files_that_load(traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = study("lifetimes", "--traces", str(traces), "--out", str(out), "--json")
    assert ended.exit_code == 0, ended.output
    fits = json.loads(ended.stdout)["fits"]
    assert next(f for f in fits if f["row"] == "user")["rate"] == pytest.approx(0.02, rel=0.02)
    written = json.loads((out / "lifetimes.json").read_bytes())
    assert written["fits"] == fits and re.fullmatch(r"\d{4}-\d\d-\d\d", written["date"])
    assert {file.name for file in out.glob("*.png")} == {"lifetimes.png", "lifetimes-curves.png"}
    loaded = policy.load(out / "lifetimes-memdecay-dev.toml")
    assert isinstance(loaded, RegionDecay)
    assert loaded.half_life[Region.USER] == pytest.approx(math.log(2) / 0.02, rel=0.02)
    assert loaded.half_life[Region.PLAN] == HALF_LIFE[Region.PLAN]  # no trace has a plan


def test_precision_compares_two_folders(traces: Path, tmp_path: Path) -> None:
    twin = tmp_path / "bfloat16"
    test_lifetimes.traced("library-0-short", faster=1.5, model="exact bfloat16").save(twin / "a.safetensors")
    out = tmp_path / "out"
    ended = study("lifetimes", "--traces", str(traces), "--precision", str(twin), "--out", str(out), "--json")
    assert ended.exit_code == 0, ended.output
    user = next(r for r in json.loads(ended.stdout)["rates"] if r["row"] == "user")
    assert user["difference"] == pytest.approx(0.5, abs=0.02)
    assert (out / "lifetimes-precision.json").exists()


def test_ema_sweeps_as_far_ahead_as_it_is_told(tmp_path: Path) -> None:
    test_ema_sweep.traced().save(tmp_path / "traces" / "chance.by-1.safetensors")
    out = tmp_path / "out"
    ended = study(
        "ema", "--traces", str(tmp_path / "traces"), "--ahead", "1", "--ahead", "3", "--alpha", "0.5",
        "--beta", "0.1", "--name", "some", "--out", str(out),
    )  # fmt: skip
    assert ended.exit_code == 0, ended.output
    assert "step 3 later" in ended.stdout
    assert [one["ahead"] for one in json.loads((out / "some.json").read_bytes())] == [1, 3]
    assert (out / "some.png").exists()


@pytest.mark.parametrize("command", ["lifetimes", "ema"])
def test_without_traces_a_command_says_how_to_record_them(command: str, tmp_path: Path) -> None:
    ended = study(command, "--traces", str(tmp_path / "none"), "--out", str(tmp_path / "out"))
    assert ended.exit_code == 2
    assert "tierkv study record" in ended.stderr and "Traceback" not in ended.stderr


def test_a_chat_that_is_none_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text('{"role": "user"}')
    ended = study("record", "--chat", str(tmp_path / "chat.json"), "--out", str(tmp_path / "traces"))
    assert ended.exit_code == 2 and "chat.json" in ended.stderr
