"""What the repository promises about itself."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def folder(package: str) -> Path:
    """Where a package lies, by the mapping of pyproject.toml."""
    rooms: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
    room = max((name for name in rooms if package == name or package.startswith(f"{name}.")), key=len)
    return ROOT / rooms[room] / package.removeprefix(room).strip(".").replace(".", "/")


def test_every_package_on_disk_is_listed_and_every_listed_one_is_there() -> None:
    listed: list[str] = PROJECT["tool"]["setuptools"]["packages"]
    rooms: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
    found = {init.parent for room in rooms.values() for init in (ROOT / room).rglob("__init__.py")}
    assert {folder(package) for package in listed} == found


def test_the_worker_needs_no_ray() -> None:
    code = "import sys, tierkv; assert 'ray' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd="/", check=True)
    names = {requirement.split(">")[0].split("=")[0] for requirement in PROJECT["project"]["dependencies"]}
    assert names == {"numpy", "torch", "numba", "msgspec", "pyzmq", "xxhash"}
