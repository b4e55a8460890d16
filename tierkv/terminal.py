"""How commands end when something is wrong: one sentence and an exit code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import typer

from tierkv.errors import ConfigError, TierKVError


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """One sentence on stderr and an exit code (2: what was asked for is wrong) instead of a traceback."""
    try:
        yield
    except TierKVError as error:
        print(f"tierkv: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
