"""`make gpu-check` can tell right from wrong, stops what hangs, and says why it cannot run."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks.gpu_check_on_cpu import machine
from tests.fake_cuda import FakeStream
from tests.triton_device import DEVICE  # skips the module where kernels cannot run
from tierkv.benchmarks.device import kernels, moves, parts, table
from tierkv.benchmarks.device.kernels import Case
from tierkv.benchmarks.device.parts import TASKS
from tierkv.benchmarks.device.table import Part, Row
from tierkv.quant.rotated_triton import RotatedPages

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.py"
ON_CPU = Path(__file__).with_name("gpu_check_on_cpu.py")


@pytest.fixture
def _few_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CHECKED_PAGES", 4)


@pytest.mark.usefixtures("_few_pages")
@pytest.mark.parametrize("name", ["k3v2", "rotated2", "klt2"])
def test_kernels_pass(name: str) -> None:
    assert kernels.check(Case("float32", 16, name, 2), DEVICE).good


@pytest.mark.usefixtures("_few_pages")
def test_another_rotation_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def mirrored(self: RotatedPages, *args: object) -> None:
        self.back = -self.back
        original(self, *args)

    original = RotatedPages.decode
    monkeypatch.setattr(RotatedPages, "decode", mirrored)
    assert kernels.check(Case("float32", 16, "k3v2", 2), DEVICE).good is False


@pytest.mark.slow
def test_every_part_passes_on_a_fake_gpu_and_one_table_has_them_all(tmp_path: Path) -> None:
    out = tmp_path / "gpu.txt"
    done = subprocess.run(
        [sys.executable, str(ON_CPU), "--out", str(out)], capture_output=True, text=True, timeout=280, check=False,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert text in done.stdout
    assert [line.partition(":")[0] for line in text.splitlines() if ": ok, " in line] == list(TASKS)
    for what in (
        "a second process reads the pool", "this process reads what its kernel wrote",
        "the memory outlives its creator's mapping", "device copy", "attend, all exact", "attend, none exact",
        "its pool is mapped", "logits after 48 tokens",
    ):  # fmt: skip
        assert what in text, what
    assert "WRONG" not in text


def test_moves_pass_on_a_fake_gpu() -> None:
    rows = list(moves.run(machine()))
    assert [row.what.partition(":")[0] for row in rows if row.good] == [
        "demote", "promote", "k3v2 is fitted from two pages", "encode", "recall",
    ]  # fmt: skip


def test_copies_that_do_not_arrive_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeStream, "copy", lambda self, target, source: self.launch(lambda: None))
    demote, promote, *_ = moves.run(machine())
    assert demote.good is False and promote.good is False


PART = """
import json, sys, time
part, rows = sys.argv[2], sys.argv[4]
open(rows, "a").write(json.dumps([part, "begun", True]) + chr(10))
if part == "moves":
    time.sleep(60)
sys.exit("it broke" if part == "bandwidth" else 0)
"""
"""A part that hangs, one that fails, and others that end well."""


def test_a_part_that_hangs_or_fails_stops_no_other_and_what_it_found_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(TASKS, "moves", TASKS["moves"]._replace(limit=5))
    on = dataclasses.replace(machine(), command=(sys.executable, "-c", PART))
    names = ["shared memory", "moves", "bandwidth", "model"]
    found = {part.name: part for part in parts.run_all(on, names)}
    assert list(found) == names
    assert {name: part.problem for name, part in found.items()} == {
        "shared memory": "", "moves": "stopped after 5 s", "bandwidth": "exit status 1: it broke", "model": "",
    }  # fmt: skip
    assert all(part.rows == [Row(name, "begun", True)] for name, part in found.items())
    assert [part.good for part in found.values()] == [True, False, False, True]


SECOND = """
import time
from tierkv.benchmarks.device import model
model.end_with_parent()
print("begun", flush=True)
time.sleep(60)
"""

FIRST = f"""
import subprocess, sys
second = subprocess.Popen([sys.executable, "-c", {SECOND!r}], stdout=subprocess.PIPE)
second.stdout.readline()
print(second.pid, flush=True)
input()
"""
"""A part that waits for ever, with a second process that does."""


def test_the_second_process_of_a_part_that_is_killed_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FIRST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as first:
        assert first.stdout is not None
        second = os.pidfd_open(int(first.stdout.readline()))
        assert not select.select([second], [], [], 0.1)[0]
        first.kill()
        assert select.select([second], [], [], 10.0)[0]
    os.close(second)


def test_all_limits_together_are_under_six_minutes() -> None:
    beside = max(task.limit for task in TASKS.values() if not task.alone)
    assert beside + sum(task.limit for task in TASKS.values() if task.alone) < 350


def test_a_half_written_row_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    table.append(file, Row("first", "found", True))
    with file.open("a") as lines:
        lines.write('["second", "fou')
    assert table.read(file) == [Row("first", "found", True)]
    assert not Part("p", [Row("w", "f", False)], 1.0).good
    assert not Part("p", [Row("w", "f", True)], 1.0, "stopped").good


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so() -> None:
    pytest.importorskip("cuda.bindings")
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu-check cannot run: torch finds no CUDA device")


def test_where_packages_are_missing_it_names_them() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "this Python lacks torch, triton, numpy, numba" in done.stderr
    assert "pip install torch triton numpy numba msgspec xxhash pyzmq cuda-bindings" in done.stderr


def test_wheels_are_taken_by_the_pythons_they_are_made_for() -> None:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    own, stable = "a_b-1.0-cp312-cp312-manylinux_2_28_x86_64.whl", "c-2-cp312-abi3-manylinux2014_x86_64.whl"
    anyone = "d-3-py3-none-any.whl"
    found = {
        minor: [script.fits(name, (3, minor)) for name in (own, stable, anyone)] for minor in (11, 12, 13)
    }
    assert found == {11: [False, False, True], 12: [True, True, True], 13: [False, True, True]}
