from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.harness import Owner, Process, Worker


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """On tmpfs, and short: a socket's path has 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="tierkv-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def run(state_dir: Path) -> Iterator[tuple[Callable[..., Owner], Callable[[], Worker]]]:
    """Starts owners and workers on the state directory; kills what is left."""
    started: list[Process] = []

    def owner(hbm: int, host: int, *more: str) -> Owner:
        started.append(Owner(state_dir, hbm, host, *more))
        return started[-1]  # type: ignore[return-value]

    def worker() -> Worker:
        started.append(Worker(state_dir))
        return started[-1]  # type: ignore[return-value]

    yield owner, worker
    for process in started:
        process.kill()
