"""Which workers hold this node's memory, in a file that outlives the owner.

`workers.json` names every attached worker and every survivor of an earlier owner that has not come back yet. A
process is told from a later one with the same number by its start time and the machine's boot id. A worker that
closes its client while no owner is there leaves a `left.<client id>` file instead of a message.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec

from tierkv.handshake import LEFT_PREFIX

REGISTRY_FILE = "workers.json"


class Worker(msgspec.Struct, frozen=True):
    client_id: str
    pid: int
    start_time: int
    """Clock ticks after boot (field 22 of /proc/PID/stat)."""
    boot_id: str


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks after boot; None when it does not run (any more)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    state, *rest = text.rpartition(")")[2].split()  # the command's name may hold spaces and brackets
    return None if state in "ZX" else int(rest[18])


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def alive(worker: Worker) -> bool:
    return worker.boot_id == boot_id() and start_time(worker.pid) == worker.start_time


def survivors(state_dir: Path) -> list[Worker]:
    """Workers of earlier owners that still run and have not closed their client."""
    return [
        worker for worker in _read(state_dir) if alive(worker) and not has_left(state_dir, worker.client_id)
    ]


def has_left(state_dir: Path, client_id: str) -> bool:
    return (state_dir / f"{LEFT_PREFIX}{client_id}").exists()


class Registry:
    """The file, and its content in memory. Any thread may call."""

    def __init__(self, state_dir: Path) -> None:
        self._dir = state_dir
        self._lock = threading.Lock()
        self.survivors = tuple(survivors(state_dir))
        self._workers = {worker.client_id: worker for worker in self.survivors}
        for mark in state_dir.glob(f"{LEFT_PREFIX}*"):
            mark.unlink(missing_ok=True)
        self._write()

    def add(self, worker: Worker) -> None:
        """Must happen before the worker may touch the pool."""
        with self._lock:
            self._workers[worker.client_id] = worker
            self._write()

    def remove(self, client_id: str) -> None:
        with self._lock:
            if self._workers.pop(client_id, None) is not None:
                self._write()
            (self._dir / f"{LEFT_PREFIX}{client_id}").unlink(missing_ok=True)

    def _write(self) -> None:
        path = self._dir / REGISTRY_FILE
        draft = path.with_suffix(".tmp")
        descriptor = os.open(
            draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(list(self._workers.values())))
        os.replace(draft, path)


def _read(state_dir: Path) -> list[Worker]:
    try:
        return msgspec.json.decode((state_dir / REGISTRY_FILE).read_bytes(), type=list[Worker])
    except FileNotFoundError:
        return []
    except msgspec.DecodeError:  # atomic replacement means that somebody else wrote it: nobody can be trusted
        return []
