"""A daemon process whose GPU is a fake one; it says at its end what it has left on it."""

from __future__ import annotations

import gc
import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from tests import triton_device  # noqa: F401  # mends old interpreters
from tests.fake_cuda import FakeDriver, fake_gpu
from tierkv.daemon import service


def main() -> None:
    driver = FakeDriver()
    gpu = fake_gpu(driver)
    service.open_gpu = lambda name: gpu  # type: ignore[assignment]
    service.main()
    gc.collect()
    print(*driver.left(), flush=True)


if __name__ == "__main__":
    main()
