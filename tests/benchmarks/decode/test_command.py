"""`tierkv bench decode` and the decode part of `make bench`, on the model itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )


def tierkv(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("-c", "from tierkv.cli import main; main()", "bench", *arguments)


@pytest.mark.parametrize("command", ["decode", "attention"])
def test_an_arm_that_does_not_exist_is_refused_by_name(command: str, tmp_path: Path) -> None:
    done = tierkv(command, "--arm", "flash", "--out", str(tmp_path / "x.json"))
    assert done.returncode == 2
    assert "flash" in done.stderr and "eager" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.model
def test_a_quick_run_writes_figures_the_run_a_trace_and_a_picture(tmp_path: Path) -> None:
    out, plot = tmp_path / "new" / "decode.json", tmp_path / "decode.png"
    arms = [part for arm in ("tierkv-exact", "tierkv-k8", "eager") for part in ("--arm", arm)]
    done = tierkv(
        "decode", "--quick", "--contexts", "128", *arms, "--out", str(out), "--plot", str(plot)
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [(one["context"], one["batch"], one["arm"]) for one in found] == [
        (128, 1, arm) for arm in ("tierkv-exact", "dynamic", "eager")
    ]
    # a step at 128 tokens: 30 layers of 3 heads of 64, keys and values, in float32; 12 tokens have followed
    assert found[1]["kv_bytes"] == 30 * 2 * 3 * 64 * 4 * (128 + 12)
    about = json.loads((tmp_path / "new" / "decode-run.json").read_text())
    assert about["trace"] == "decode-trace.json" and [one["arm"] for one in about["more"]] == ["tierkv-k8"]
    events = json.loads((tmp_path / "new" / "decode-trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events].count("step") == 8
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.model
def test_make_bench_has_the_short_form(tmp_path: Path) -> None:
    done = run("-m", "tierkv.benchmarks", "decode", "--quick", "--out", str(tmp_path / "bench.json"))
    assert done.returncode == 0, done.stderr
    (one,) = json.loads((tmp_path / "bench.json").read_text())["decode"]
    assert one["context"] == 256 and set(one["prefill_seconds"]) == {"peer", "exact", "budget"}
    assert one["exact"]["ratio"] > 0 and one["budget"]["ratio"] > 0
    assert (
        one["budget_pages"]["exact"] >= 1 and one["budget_pages"]["cold"] + one["budget_pages"]["low_bit"] > 0
    )
    assert "decode 256 exact, ms/token" in done.stdout
