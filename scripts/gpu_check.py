#!/usr/bin/env python3
"""`tierkv.benchmarks.device` from a checkout, installed or not: device kernels' correctness and bandwidth.

Exits with 1 where a check failed and with 2 where it cannot run.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("torch", "triton", "numpy", "numba", "msgspec", "xxhash", "zmq")
"""Modules that the kernels and the references they are checked against import."""


def refuse(reason: str) -> int:
    print(f"gpu-check cannot run: {reason}", file=sys.stderr)
    return 2


def main() -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return refuse(
            f"this Python lacks {', '.join(missing)}; pip install them, or tierkv with its extra `cuda`"
        )
    import torch

    if not torch.cuda.is_available():
        return refuse("torch finds no CUDA device (the tests run the same kernels in triton's interpreter)")
    sys.path.insert(0, str(ROOT))
    import tierkv

    tierkv.__path__.append(str(ROOT))  # quant/ imports as tierkv.quant (pyproject.toml, package-dir)
    from tierkv.benchmarks import device

    return device.main()


if __name__ == "__main__":
    sys.exit(main())
