"""Child processes of demo and study: a real daemon in a state directory of its own, a worker whose stdout is read.

Leaving a `with` block ends its process and whatever that started, also after an error, Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.errors import TierKVError

if TYPE_CHECKING:
    from tierkv import Client

STOP_SECONDS = 30.0
"""What a process gets to end after SIGTERM; the daemon drains."""

CONNECT_SECONDS = 120.0
"""What a daemon gets until it serves: Ray starts, and a first start compiles kernels."""

LOG_LINES = 12
"""How much of a failed process's output an error quotes."""

SHARED_MEMORY = Path("/dev/shm")

WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""torch and numba each bring an OpenMP runtime, whose idle threads spin and take the cores from the other's: on two
busy cores an episode takes 11 s when threads sleep while they wait, and 61 s when they spin."""


class ProcessFailed(TierKVError):
    code = "process-failed"


@contextlib.contextmanager
def state_directory() -> Iterator[Path]:
    """A fresh folder, in memory where possible: sockets need a short path, and the host pool is a file there."""
    where = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="tierkv-demo-", dir=where))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """`command` in a process group of its own; stderr (and stdout, unless `stdout` says otherwise) go to `log`."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output if stdout is None else stdout,
            stderr=output,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **WAITING},
            start_new_session=True,  # Ctrl-C reaches us first, and we end it in order
        )
    try:
        with _sigterm_as_exit():
            yield process
    finally:
        stop(process)


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """SIGTERM leaves the block as an exception; only the main thread can ask for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def serving(hbm: int, host: int, settings: Mapping[str, object], reserve_ahead: int = 1) -> Iterator[Client]:
    """A daemon of so many bytes, and a client of it.

    Raises:
        TierKVError: it could not start or serve; what it said last is quoted where it ended.
    """
    import tierkv

    with state_directory() as folder:
        log = folder / "daemon.log"
        with running(daemon_command(folder, hbm, host, settings), log) as daemon:
            try:
                client = tierkv.connect(folder, CONNECT_SECONDS, reserve_ahead=reserve_ahead)
            except TierKVError:
                if daemon.poll() is not None:
                    raise failure("daemon", daemon, log) from None
                raise
            with client:
                yield client


def stop(process: subprocess.Popen[str]) -> None:
    """SIGTERM, time to end, then SIGKILL for its group."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def end_together(first: subprocess.Popen[str], second: subprocess.Popen[str]) -> None:
    """When `first` ends, `second` is told to: a worker need not wait for a daemon that could not start."""

    def watch() -> None:
        first.wait()
        if second.poll() is None:
            second.terminate()

    threading.Thread(target=watch, name="tierkv-demo-watch", daemon=True).start()


def failure(name: str, process: subprocess.Popen[str], log: Path) -> ProcessFailed:
    """Says how the process ended and what it said last."""
    said = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    return ProcessFailed(f"the {name} ended with code {process.poll()}; its last output:\n{said}")


SETTINGS = {
    "pin_quota": 0.6,
    "low_watermark": 0,
    "high_watermark": 0,
    "digest_share": 0.17,
    "digest_layers": 15,
    "recent_tokens": 32,
}
"""Of the demo's daemon, whose pool is 12 exact pages. Room is made when it is asked for, not ahead: watermarks would
keep frames empty. Digests of the last 15 of 30 layers take a sixth, which leaves more to low-bit pages than all layers
would. Pins reach half of the system's pages: with more, a slice of a prompt finds no room beside them."""


def daemon_command(
    state_dir: Path, hbm: int, host: int, settings: Mapping[str, object] = SETTINGS
) -> list[str]:
    """`tierkv-daemon` of this environment."""
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return [
        sys.executable, "-c", "from tierkv.daemon_cli import main; main()",
        "--hbm", str(hbm), "--host", str(host), "--state-dir", str(state_dir), *words,
    ]  # fmt: skip


def worker_command(state_dir: Path) -> list[str]:
    return [sys.executable, "-m", "tierkv.study.worker", "--state-dir", str(state_dir)]
