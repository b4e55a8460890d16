"""`scripts/gpu_check.py` at tiny sizes, on a fake GPU whose kernels are interpreted; run by `test_device.py`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import triton_device  # noqa: F401  # mends old interpreters
from tests.fake_cuda import FakeDevice, FakeDriver, fake_gpu
from tierkv import device_pool
from tierkv.benchmarks.device import parts
from tierkv.benchmarks.device.kernels import Case
from tierkv.benchmarks.device.machine import Machine, Sizes
from tierkv.daemon import service
from tierkv.geometry import Geometry

SIZES = Sizes(
    kernel_cases=(Case("float32", 16, "k3v2", 2), Case("float32", 16, "klt2", 1)),
    geometry=Geometry(1, 1, 16, "float32"), share=2, lengths=(64,), copied=1 << 16,
    page=Geometry(1, 2, 16, "float32"), pages=4, shared=2 << 20, model_layers=2, contexts=(48,), decode_steps=2,
    host=64 << 20, contract=("--collect-only", "-k", "triton"),
)  # fmt: skip


def seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def machine() -> Machine:
    command = (sys.executable, str(Path(__file__).resolve()))
    return Machine("a fake GPU", FakeDevice.name, fake_gpu, seconds, lambda: None, SIZES, command)


def main() -> int:
    device_pool.CudaDriver = FakeDriver  # type: ignore[assignment,misc]
    device_pool.CudaDevice = lambda index: FakeDevice()  # type: ignore[assignment,misc]
    service.open_gpu = lambda name: fake_gpu()  # type: ignore[assignment]
    return parts.main(machine)


if __name__ == "__main__":
    sys.exit(main())
