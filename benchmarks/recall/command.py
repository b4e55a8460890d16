"""`tierkv bench recall`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tierkv.benchmarks.needs import require
from tierkv.outputs import check_writable
from tierkv.terminal import plain_errors


def recall(
    quick: Annotated[bool, typer.Option("--quick", help="One input: under a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    count: Annotated[
        int | None, typer.Option("--inputs", min=1, max=18, help="How many inputs; by default all.")
    ] = None,
    serve: Annotated[
        int, typer.Option(min=0, help="How many of these a daemon serves, too: some three minutes each.")
    ] = 3,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of tau-airline; by default ../shared/data/tau_airline, if it is there."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep what an interrupted run measured; nothing has changed since."),
    ] = False,
    recorded: Annotated[
        Path, typer.Option(help="Folder of recorded attention, kept for the next run.")
    ] = Path("out/recall-recorded"),
    out: Annotated[Path, typer.Option(help="File of figures.")] = Path("out/recall.json"),
    plot: Annotated[Path, typer.Option(help="File of the picture.")] = Path("out/recall.png"),
) -> None:
    """How well cold pages of SmolLM2-135M are told apart, and what budgets attend, beside an oracle's choice."""
    with plain_errors():
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads take no core
        require()
        check_writable(out, plot)
        from tierkv.benchmarks.quant.inputs import find_data

        folder = find_data(data)
        from tierkv.benchmarks.parts import Parts  # torch and transformers: seconds
        from tierkv.benchmarks.recall import picture, table
        from tierkv.benchmarks.recall.records import Record
        from tierkv.benchmarks.recall.run import Bench
        from tierkv.study.memdecay.cli import progress, show, write
        from tierkv.study.model import load_smollm2

        bench = Bench(*load_smollm2(), folder, recorded, quick, count, 0 if quick else serve)
        with progress() as told:
            found = bench.run(Parts(out.with_suffix(".parts"), resume, list[Record]), told)
        write(out, found)
        picture.draw(found, plot)
        show(as_json, found, lambda: table.render(found))
        if not as_json:
            print(f"written to {out} and {plot}")
