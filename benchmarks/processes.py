"""Processes that a benchmark talks to: a daemon without Ray, and the echo server it is compared with."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SHORT_TMPFS = Path("/dev/shm")
"""Where sockets and pools go: tmpfs, and short enough for a socket's path (107 characters)."""

END_SECONDS = 20.0


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder on tmpfs for the time of a benchmark."""
    path = Path(tempfile.mkdtemp(prefix="tierkv-bench-", dir=SHORT_TMPFS if SHORT_TMPFS.is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[None]:
    """`python ARGUMENTS` as a child that prints one line when it is ready and ends at SIGTERM.

    Raises:
        RuntimeError: it ended before it was ready.
    """
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        if not child.stdout.readline():
            raise RuntimeError(f"{' '.join(arguments)} ended with {child.wait()} before it was ready")
        yield
    finally:
        child.terminate()
        try:
            child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.contextmanager
def service(hbm_bytes: int, host_bytes: int, codec: str = "k3v2", *options: str) -> Iterator[Path]:
    """A daemon of its own; its state directory. `options` are further ones of `tierkv.daemon.service`."""
    with folder() as state_dir:
        sizes = ("--hbm", str(hbm_bytes), "--host", str(host_bytes), "--codec", codec)
        with running("-m", "tierkv.daemon.service", "--state-dir", str(state_dir), *sizes, *options):
            yield state_dir


@contextlib.contextmanager
def echo() -> Iterator[str]:
    """An echo server of its own; its endpoint."""
    with folder() as path:
        endpoint = f"ipc://{path}/echo.sock"
        with running("-m", "tierkv.benchmarks.echo", endpoint):
            yield endpoint
