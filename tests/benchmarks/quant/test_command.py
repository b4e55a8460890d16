"""`tierkv bench quant`: what it refuses, and what a quick run writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tierkv import quant
from tierkv.benchmarks.quant import forms, records
from tierkv.benchmarks.quant.plan import plan
from tierkv.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "200"}
    command = [sys.executable, "-c", "from tierkv.cli import main; main()", "bench", "quant", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)


def test_a_form_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'k9v9'.*k3v2.*kivi-g32"):
        plan(["k9v9"], None, None, quick=True)


def test_the_baseline_of_ratios_always_runs() -> None:
    assert plan(["k3v2"], None, None, quick=False).names == ("k3v2", "kivi-g32")
    assert set(plan([], None, None, quick=False).names) == {*quant.NAMES, *forms.PEERS}


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    done = bench("--quick", "--data", str(tmp_path))
    assert done.returncode == 2
    assert "trajectories.json" in done.stderr and "--data" in done.stderr


@pytest.fixture(scope="module")
def quick_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[list[dict[str, object]], str, bytes]]:
    folder = tmp_path_factory.mktemp("quant")
    out, plot = folder / "new" / "quant.json", folder / "quant.png"
    done = bench("--quick", "--codec", "k3v2", "--out", str(out), "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    yield json.loads(out.read_text()), done.stdout, plot.read_bytes()


@pytest.mark.slow
@pytest.mark.model
def test_a_quick_run_writes_a_record_a_form_and_a_picture(
    quick_run: tuple[list[dict[str, object]], str, bytes],
) -> None:
    found, shown, picture = quick_run
    keys = ("codec", "bits_per_value", "kl", "top1", "dnll", "attn_error", "encode_gbps", "decode_gbps")
    assert all(set(keys) < set(one) for one in found)
    ours, peer = found
    assert (ours["codec"], ours["bits_per_value"], ours["peer"]) == ("k3v2", 2.65625, False)
    assert (peer["codec"], peer["bits_per_value"], peer["peer"]) == ("kivi-g32", 3.0, True)
    assert picture.startswith(b"\x89PNG")
    run = msgspec.convert(ours["run"], records.Run)
    assert len(run.inputs) == 3 and run.context == [928] * 3 and not set(run.inputs) & set(run.calibration)
    assert all(name in shown for name in (*run.inputs, *run.calibration))


@pytest.mark.slow
@pytest.mark.model
def test_figures_of_a_quick_run_agree_with_each_other(
    quick_run: tuple[list[dict[str, object]], str, bytes],
) -> None:
    ours, peer = msgspec.convert(quick_run[0], list[records.Record])
    for one in (ours, peer):
        assert one.kl == pytest.approx(sum(one.kl_by_input.values()) / 3)
        assert one.attn_error == pytest.approx(sum(one.attn_error_by_layer) / 30)
        assert one.kl_low <= one.kl <= one.kl_high and 0 < one.top1_low <= one.top1 <= one.top1_high <= 1
        assert one.encode_gbps > 0 and one.decode_gbps > 0
    assert ours.kl_ratio == pytest.approx(ours.kl / peer.kl)
    assert (peer.kl_ratio, peer.kl_ratio_low, peer.kl_ratio_high, peer.kl_wins) == (1, 1, 1, 0)
    assert ours.attention_ratio is not None and peer.attention_ratio is None
    # 3 bits a key against 2 with a fifth of the bits on metadata: the paper-faithful peer loses more on every text
    assert ours.kl_wins == 3
