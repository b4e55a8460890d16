"""What this machine can give: the cgroup's limit, available memory, room in the state directory's file system."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from tierkv.errors import ConfigError

HEADROOM_BYTES = 512 << 20
"""Left for what is not a pool: the owner itself and a local Ray (about 330 MB measured)."""

UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number beyond this."""


class Limit(NamedTuple):
    """`room` bytes that may still be taken; `name` says who sets the limit, for error messages."""

    name: str
    room: int


def memory_limits(root: Path = Path("/")) -> list[Limit]:
    """Every limit on this process's memory that the kernel states, `root` being where /proc and /sys are."""
    return [*_available(root), *_cgroup_v2(root), *_cgroup_v1(root)]


def file_system_room(folder: Path) -> Limit:
    """Free bytes where `folder` is or will be."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = os.statvfs(existing)
    return Limit(f"free space of the file system that holds {folder}", free.f_bavail * free.f_frsize)


def check_sizes(hbm: int, host: int, limits: list[Limit], files: Limit, reusable: int = 0) -> None:
    """Refuse pools that cannot be had.

    Args:
        hbm, host: bytes of the pools. Without a GPU both lie in this machine's memory.
        limits: from `memory_limits`.
        files: from `file_system_room`; the host pool is a file there.
        reusable: bytes of a host pool that a dead owner left behind, which the next one takes over.

    Raises:
        ConfigError: names the value, the limit, and what to change.
    """
    if host > files.room + reusable:
        raise ConfigError(
            f"host = {show_bytes(host)}, but the {files.name} is {show_bytes(files.room + reusable)}; "
            "lower --host, or choose a --state-dir on a larger tmpfs"
        )
    for limit in limits:
        room = max(0, limit.room + reusable - HEADROOM_BYTES)
        if hbm + host > room:
            what, flag = ("hbm", "--hbm") if hbm > room else ("hbm + host", "--hbm or --host")
            asked = hbm if hbm > room else hbm + host
            raise ConfigError(
                f"{what} = {show_bytes(asked)}, but the {limit.name} leaves {show_bytes(room)} for pools "
                f"(after {show_bytes(HEADROOM_BYTES)} for the daemon itself); lower {flag}"
            )


def show_bytes(size: int) -> str:
    """`1.5 GiB`, `300 MiB`, `17 bytes`."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{size} bytes"


def _available(root: Path) -> list[Limit]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return [Limit("available memory", int(line.split()[1]) << 10)]
    return []


def _cgroup_v2(root: Path) -> list[Limit]:
    return _cgroup(root, "0::", root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def _cgroup_v1(root: Path) -> list[Limit]:
    base = root / "sys/fs/cgroup/memory"
    return _cgroup(
        root, ":memory:", base, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    )


def _cgroup(root: Path, mark: str, base: Path, limit: str, usage: str, cache: str) -> list[Limit]:
    """The tightest limit of this process's group and its parents; page cache that can be taken back is free."""
    rooms = []
    for line in _lines(root / "proc/self/cgroup"):
        if mark not in line:
            continue
        group = base / line.partition(mark)[2].strip("/")
        while group == base or base in group.parents:
            bound = "".join(_lines(group / limit))
            if bound.isdigit() and int(bound) < UNLIMITED:
                used = int("".join(_lines(group / usage)) or 0)
                for stat in _lines(group / "memory.stat"):
                    if stat.startswith(f"{cache} "):
                        used -= int(stat.split()[1])
                rooms.append(max(0, int(bound) - used))
            group = group.parent
    return [Limit("cgroup's memory limit", min(rooms))] if rooms else []


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # absent in other cgroup versions and outside containers
        return []
