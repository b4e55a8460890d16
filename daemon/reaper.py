"""The last one out: waits until its parent is gone, then ends what is left of a Ray session and removes its folder.

Run as a file (`python reaper.py FOLDER`), not imported by it, so that it costs little: only the standard library. Its
standard input is a pipe that the daemon holds open; however the daemon ends, the kernel closes it. Most of Ray's
processes follow the daemon by themselves within seconds, but its agents may stay (seen with Ray 2.60), so what still
has a file of the session open after `GRACE_SECONDS` is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

GRACE_SECONDS = 6.0
POLL_SECONDS = 0.1


def processes_of(folder: Path) -> list[int]:
    """Processes of this user that have something in `folder` open. Raises `ValueError` for no session folder."""
    if len(folder.parts) < 3 or not folder.is_absolute():
        raise ValueError(f"{folder} is no session folder")
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                files = [os.readlink(entry) for entry in (process / "fd").iterdir()]
            except OSError:  # gone, or another user's
                continue
            if any(file.startswith(f"{folder}/") for file in files):
                found.append(int(process.name))
    return found


def reap(folder: Path, grace: float = GRACE_SECONDS, spare: int = 0) -> list[int]:
    """End the session's processes (but for `spare`) and remove `folder`; returns those that had to be killed."""
    deadline = time.monotonic() + grace
    while (left := [pid for pid in processes_of(folder) if pid != spare]) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    return left


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager's stop is for the daemon; we follow it
    daemon = os.getppid()  # in a clean stop it is still there, with Ray's logs open, and waits for us
    sys.stdin.buffer.read()
    reap(Path(sys.argv[1]), spare=daemon)


if __name__ == "__main__":
    main()
