"""`tierkv bench quant` and `tierkv bench facts`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tierkv.benchmarks.needs import require
from tierkv.outputs import check_writable
from tierkv.terminal import plain_errors

Forms = Annotated[
    list[str] | None,
    typer.Option(
        "--codec", help="Only this codec or peer (kivi-g32, hqq, quanto); repeatable. KIVI-G32 always runs."
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder of tau-airline; by default ../shared/data/tau_airline, if it is there."),
]
Out = Annotated[Path, typer.Option(help="File of figures.")]


def quant(
    quick: Annotated[bool, typer.Option("--quick", help="3 inputs of 1,000 tokens: about a minute.")] = False,
    codec: Forms = None,
    count: Annotated[
        int | None, typer.Option("--inputs", min=1, max=16, help="How many inputs; by default 12.")
    ] = None,
    with_facts: Annotated[
        bool, typer.Option("--facts", help="Also ask the demo's questions: tierkv bench facts.")
    ] = False,
    data: Data = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep what an interrupted run measured; no codec has changed since."),
    ] = False,
    out: Out = Path("out/quant.json"),
    plot: Annotated[Path, typer.Option(help="File of the picture.")] = Path("out/quant.png"),
) -> None:
    """Codecs of pages on K/V of SmolLM2-135M: bits, what they lose, and speed, beside KIVI, hqq and quanto."""
    with plain_errors():
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads take no core
        require()
        check_writable(out, plot)
        from tierkv.benchmarks.quant.inputs import find_data

        folder = find_data(data)
        from tierkv.benchmarks.quant import frontier, table  # torch and transformers: seconds
        from tierkv.benchmarks.quant import run as bench
        from tierkv.benchmarks.quant.parts import Parts
        from tierkv.benchmarks.quant.plan import plan
        from tierkv.study.memdecay.cli import progress, show, write
        from tierkv.study.model import load_smollm2

        planned = plan(codec or (), count, folder, quick, with_facts)
        with progress() as told:
            kept = partial(Parts, out.with_suffix(".parts"), resume=resume)
            records = bench.run(planned, kept, *load_smollm2(), told)
        write(out, records)
        frontier.draw(records, plot)
        show(False, records, lambda: table.render(records))
        print(f"written to {out} and {plot}")


def facts(
    quick: Annotated[bool, typer.Option("--quick", help="Fit codecs on 3 texts of 544 tokens.")] = False,
    codec: Forms = None,
    data: Data = None,
    out: Out = Path("out/facts.json"),
) -> None:
    """The demo's questions, asked over caches whose old pages are all low-bit."""
    with plain_errors():
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        require()
        check_writable(out)
        from tierkv.benchmarks.quant.inputs import find_data

        folder = find_data(data)
        from tierkv.benchmarks.quant import facts_report
        from tierkv.benchmarks.quant.plan import plan
        from tierkv.study.memdecay.cli import progress, show, stamped, write
        from tierkv.study.model import load_smollm2

        planned = plan(codec or (), None, folder, quick)
        with progress() as told:
            report = facts_report.run(planned, *load_smollm2(), told)
        write(out, stamped(report))
        show(False, report, lambda: facts_report.render(report))
        print(f"written to {out}")
