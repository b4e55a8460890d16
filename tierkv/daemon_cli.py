"""Entry point of `tierkv-daemon`. The command itself is `tierkv.daemon.command`."""

from __future__ import annotations

from tierkv.extras import require_daemon


def main() -> None:
    require_daemon("tierkv-daemon")
    from tierkv.daemon.command import app

    app(prog_name="tierkv-daemon")
