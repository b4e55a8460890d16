"""Where tierkv keeps what it makes once: converted models, and calibrations."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """`$TIERKV_CACHE`, by default `~/.cache/tierkv`."""
    root = os.environ.get("TIERKV_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "tierkv"


def calibrations() -> Path:
    """Where `tierkv calibrate` writes and a daemon looks."""
    return cache_root() / "calibrations"
