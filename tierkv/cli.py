"""`tierkv`: questions to a running daemon, and to its configuration. Entry point; the commands are in `commands`."""

from __future__ import annotations

from tierkv.extras import require_daemon


def main() -> None:
    require_daemon("tierkv")
    from tierkv.commands import app

    app(prog_name="tierkv")
