"""`make gpu-check` can tell right kernels from wrong ones, and says why it cannot run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.triton_device import DEVICE  # skips the module where kernels cannot run
from tierkv.benchmarks import device
from tierkv.quant.rotated_triton import RotatedPages

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.py"


@pytest.fixture(autouse=True)
def _few_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CHECKED_PAGES", 4)


@pytest.mark.parametrize("name", ["k3v2", "rotated2", "klt2"])
def test_kernels_pass(name: str) -> None:
    assert device.check("float32", 16, name, 2, DEVICE)


def test_another_rotation_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def mirrored(self: RotatedPages, *args: object) -> None:
        self.back = -self.back
        original(self, *args)

    original = RotatedPages.decode
    monkeypatch.setattr(RotatedPages, "decode", mirrored)
    assert not device.check("float32", 16, "k3v2", 2, DEVICE)
    assert capsys.readouterr().out.startswith("WRONG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu-check cannot run: torch finds no CUDA device")


def test_where_packages_are_missing_it_names_them() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "this Python lacks torch, triton, numpy, numba, msgspec, xxhash, zmq" in done.stderr
