"""Resident memory of this process, as Linux counts it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5)


def peak_beyond(work: Callable[[], object]) -> int | None:
    """Most bytes that were resident during `work` beyond those after it; `None` where the kernel does not tell.

    Memory that was freed before is handed back first, so that it is not used again unseen.
    """
    with contextlib.suppress(AttributeError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)
    try:
        CLEAR.write_text(RESET_PEAK)
        work()
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        return max(0, _status("VmHWM") - _status("VmRSS"))
    except (OSError, KeyError):
        return None


def _status(name: str) -> int:
    """Bytes. Raises `KeyError` where there is no such line."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(name)
