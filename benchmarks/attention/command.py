"""`tierkv bench attention`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tierkv.benchmarks.needs import require
from tierkv.outputs import check_writable
from tierkv.terminal import plain_errors


def attention(
    quick: Annotated[bool, typer.Option("--quick", help="3 passes at 512 tokens, batch 1: seconds.")] = False,
    contexts: Annotated[
        list[int] | None,
        typer.Option(min=16, help="Only this context; repeatable. By default 512, 1k, 2k, 4k and 8k tokens."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, max=64, help="Only this batch; repeatable. By default 1 and 4.")
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="Only this arm; repeatable. sdpa always runs.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Timed passes of an arm; by default 15.")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep what an interrupted run measured; nothing has changed since."),
    ] = False,
    out: Annotated[Path, typer.Option(help="File of figures.")] = Path("out/attention.json"),
) -> None:
    """One layer's attention over pages, exact and low-bit, beside sdpa and eager over dense K/V."""
    with plain_errors():
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads take no core
        require("transformers")
        check_writable(out)
        from tierkv.benchmarks.attention import run, table  # torch and transformers: seconds
        from tierkv.benchmarks.parts import Parts
        from tierkv.study.memdecay.cli import progress, show, write

        planned = run.plan(contexts or (), batch or (), arm or (), steps, quick)
        with progress() as told:
            made = run.run(planned, Parts(out.with_suffix(".parts"), resume, run.Record), told)
        write(out, made.records)
        show(False, made.records, lambda: table.render(made))
        print(f"written to {out}")
