"""Real processes: one service, and workers driven over pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv import Client

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Process:
    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=ROOT, env=ENVIRONMENT,
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        return line

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Owner(Process):
    module = "tierkv.daemon.service"

    def __init__(self, state_dir: Path, hbm: int, host: int, *more: str) -> None:
        super().__init__(
            "-m",
            self.module,
            "--state-dir",
            str(state_dir),
            "--hbm",
            str(hbm),
            "--host",
            str(host),
            *more,
        )
        _, _, _, epoch = self.line().split()
        self.epoch = int(epoch)


class Worker(Process):
    def __init__(self, state_dir: Path) -> None:
        super().__init__("-m", "tests.faults.worker", str(state_dir))
        self.epoch = json.loads(self.line())["ok"]

    def ask(self, do: str, **how: Any) -> Any:
        self.tell(do, **how)
        return self.answer()

    def tell(self, do: str, **how: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **how}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        answer = json.loads(self.line())
        assert "ok" in answer, answer
        return answer["ok"]

    def resume(self) -> None:
        self.signal(signal.SIGCONT)


def until(condition: Callable[[], bool], seconds: float) -> float:
    """Seconds until the condition holds; fails when it does not within `seconds`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"it did not come true within {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - start


def holds_nothing(client: Client) -> bool:
    """The daemon has neither a session nor a byte in use. A page whose session has closed is held until the copies end
    that read or write it, so this comes true a moment after the last session has gone.
    """
    numbers = client.stats()
    return numbers["sessions"] == numbers["hbm_used_bytes"] == numbers["host_used_bytes"] == 0
