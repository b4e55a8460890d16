"""`tierkv bench`: figures beside those of peers, from the same run."""

from __future__ import annotations

import typer

from tierkv.benchmarks.quant.command import quant

app = typer.Typer(no_args_is_help=True, help="Benchmarks, each figure beside its peer's.")


@app.callback()
def _group() -> None:
    """Typer would make a lone command the group itself."""


app.command()(quant)
