#!/usr/bin/env python3
"""`tierkv.benchmarks.device` from a bare checkout: kernels, shared memory, moves, bandwidth and a model on a GPU.

Needs torch and triton; what else is missing is taken from `wheels/` (`make gpu-wheels`), so no network and no
environment. Exits with 1 where a check failed and with 2 where it cannot run.
"""

import importlib.util
import os
import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "wheels"
NAMES = {"zmq": "pyzmq", "cuda.bindings": "cuda-bindings"}
"""What pip calls a module, where that is not its name."""

NEEDED = ("torch", "triton", "numpy", "numba", "msgspec", "xxhash", "zmq", "cuda.bindings")
"""Modules that the package and its checks import."""


def missing() -> list[str]:
    return [name for name in NEEDED if not importable(name)]


def importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that is not there either
        return False


def fits(wheel: str, version: tuple[int, int]) -> bool:
    """Whether this Python runs a wheel of that name: its own tag, an older one of the stable ABI, or any Python's."""
    python, abi, _ = wheel.removesuffix(".whl").rsplit("-", 3)[1:]
    match = re.fullmatch(r"cp3([0-9]+)", python)
    if match is None:
        return python.startswith("py3") or python.endswith(".py3")
    return int(match[1]) <= version[1] if abi == "abi3" else int(match[1]) == version[1]


def supply() -> None:
    """Unpack the wheels of this Python, behind everything that is installed."""
    version = sys.version_info[:2]
    room = ROOT / "build" / f"wheels-cp{version[0]}{version[1]}"
    for wheel in sorted(WHEELS.glob("*.whl")):
        mark = room / f".{wheel.name}"
        if fits(wheel.name, version) and not mark.exists():
            room.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(room)
            mark.touch()
    sys.path.append(str(room))
    importlib.invalidate_caches()


def refuse(reason: str) -> int:
    print(f"gpu-check cannot run: {reason}", file=sys.stderr)
    return 2


def prepare() -> str:
    """Make `tierkv` importable; why that cannot be, or nothing."""
    if missing():
        supply()
    if lacking := missing():
        wanted = " ".join(NAMES.get(name, name) for name in lacking)
        return (
            f"this Python lacks {', '.join(lacking)}: pip install {wanted}; what is not torch, triton, numpy or numba "
            "also comes with `make gpu-wheels`, where a network is"
        )
    sys.path.insert(0, str(ROOT))
    import tierkv

    tierkv.__path__.append(str(ROOT))  # quant/ imports as tierkv.quant (pyproject.toml, package-dir)
    return ""


def main() -> int:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if problem := prepare():
        return refuse(problem)
    import torch

    if not torch.cuda.is_available():
        return refuse("torch finds no CUDA device (the tests run the same parts on a fake one)")
    from tierkv.benchmarks.device import parts
    from tierkv.benchmarks.device.machine import cuda_machine

    command = (sys.executable, str(Path(__file__).resolve()))
    return parts.main(lambda: cuda_machine(command))


if __name__ == "__main__":
    sys.exit(main())
