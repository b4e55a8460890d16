"""`tierkv bench decode`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tierkv.benchmarks.needs import require
from tierkv.outputs import check_writable
from tierkv.terminal import plain_errors


def decode(
    quick: Annotated[
        bool, typer.Option("--quick", help="8 steps at 128 and 256 tokens, batch 1: about a minute.")
    ] = False,
    contexts: Annotated[
        list[int] | None,
        typer.Option(min=16, help="Only this context; repeatable. By default 512, 1k, 2k, 4k and 8k tokens."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, max=64, help="Only this batch; repeatable. By default 1 and 4.")
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="Only this arm; repeatable. DynamicCache always runs.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Timed steps of an arm; by default 64.")] = None,
    pages: Annotated[str, typer.Option(help="Exact pages: bfloat16 or float32.")] = "bfloat16",
    codec: Annotated[str, typer.Option(help="Low-bit pages.")] = "k3v2",
    prefills: Annotated[
        int | None,
        typer.Option(min=0, help="How often a prompt of 4,096 tokens is read by each arm; by default 3."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep what an interrupted run measured; nothing has changed since."),
    ] = False,
    out: Annotated[Path, typer.Option(help="File of figures.")] = Path("out/decode.json"),
    plot: Annotated[Path, typer.Option(help="File of the picture.")] = Path("out/decode.png"),
) -> None:
    """Milliseconds a token by context and batch, and memory, beside transformers' caches in the same run."""
    with plain_errors():
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads take no core
        require()
        check_writable(out, plot)
        from tierkv.benchmarks.decode.plan import plan

        planned = plan(contexts or (), batch or (), arm or (), steps, quick, pages, codec, prefills)  # type: ignore[arg-type]
        from tierkv.benchmarks.decode import full, picture, table, watch  # torch and transformers: seconds
        from tierkv.study.memdecay.cli import progress, show, write
        from tierkv.study.model import load_smollm2

        with progress() as told:
            made = full.run(planned, full.kept(out, resume), load_smollm2()[0], told)
        beside, traced = (out.with_name(f"{out.stem}-{name}.json") for name in ("run", "trace"))
        if made.spans:
            write(traced, watch.trace(made.spans))
            made.run.trace = traced.name
        write(out, made.records)
        write(beside, made.run)
        picture.draw(made.records, made.run.model, plot)
        show(False, made.records, lambda: table.render(made.records, made.run))
        print(f"written to {out}, {beside} and {plot}")
