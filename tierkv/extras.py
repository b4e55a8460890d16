"""What is optional at installation, and how to say that it is missing."""

from __future__ import annotations

import importlib.util
import sys

DAEMON = ("ray", "prometheus_client", "pydantic_settings", "typer", "rich")
"""Modules of the extra `daemon`."""


def require_daemon(program: str) -> None:
    """End the program with one clear sentence where the extra `daemon` is not installed."""
    missing = [name for name in DAEMON if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f'{program} needs {", ".join(missing)}: pip install ".[daemon]" in a checkout of tierkv',
            file=sys.stderr,
        )
        sys.exit(1)
