"""What is printed and written of a run, and the machine that it was taken on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

PACKAGES = ("torch", "transformers", "pyzmq")


def machine() -> dict[str, Any]:
    """See the package for keys; versions of packages that are absent are empty."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        "load_before": load(),
    }


def load() -> float:
    """Load average of the last minute."""
    return os.getloadavg()[0]


def lines(results: dict[str, Any]) -> Iterator[str]:
    """The table, a figure a line."""
    where = results["machine"]
    yield f"{where['cpu']}, {where['cores']} cores, load {where['load_before']:.1f} to {where['load_after']:.1f}"
    yield f"{'':<34}{'ours':>10}{'peer':>10}  {'ratio (quartiles)':<22}"
    for name, figures in results.get("request", {}).items():
        yield _line(f"request {name}, us", figures)
    for model, moves in results.get("moves", {}).items():
        for name, figures in moves.items():
            yield _line(f"move {model} {name}, GB/s", figures)
    for record in results.get("decode", []):
        for arm in ("exact", "budget"):
            yield _line(f"decode {record['context']} {arm}, ms/token", record[arm])
    for name, figures in results.get("policy", {}).items():
        yield _line(f"policy {name}, ms", figures)


def write(results: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")


def _line(what: str, figures: dict[str, float]) -> str:
    quartiles = f"{figures['ratio']:.2f} ({figures['ratio_low']:.2f} to {figures['ratio_high']:.2f})"
    return f"{what:<34}{figures['ours']:>10.2f}{figures['peer']:>10.2f}  {quartiles:<22}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    try:
        described = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        described = []
    names = [line.split(":", 1)[1].strip() for line in described if line.startswith("model name")]
    return names[0] if names else platform.machine()
