"""`tierkv bench`: figures beside those of peers, from the same run."""

from __future__ import annotations

import typer

from tierkv.benchmarks.attention.command import attention
from tierkv.benchmarks.decode.command import decode
from tierkv.benchmarks.pauses.command import pauses
from tierkv.benchmarks.quant.command import facts, quant
from tierkv.benchmarks.recall.command import recall

app = typer.Typer(no_args_is_help=True, help="Benchmarks, each figure beside its peer's.")

app.command()(quant)
app.command()(facts)
app.command()(decode)
app.command()(attention)
app.command()(recall)
app.command()(pauses)
