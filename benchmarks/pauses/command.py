"""`tierkv bench pauses`."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer

from tierkv.outputs import check_writable
from tierkv.terminal import plain_errors


def pauses(
    quick: Annotated[bool, typer.Option("--quick", help="12 sessions, HBM for 3, 40 s: seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    arm: Annotated[list[str] | None, typer.Option(help="Only this arm; repeatable.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Arms that run at a time.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of schedules and attention.")] = 0,
    out: Annotated[Path, typer.Option(help="File of figures.")] = Path("out/pauses.json"),
    plot: Annotated[Path, typer.Option(help="File of the picture.")] = Path("out/pauses.png"),
) -> None:
    """Paused sessions over the daemon's brain in made-up time: how many find their working set when they resume."""
    with plain_errors():
        check_writable(out, plot)
        from tierkv.benchmarks.pauses import picture, table
        from tierkv.benchmarks.pauses.run import EXACT_ROOM, Scale, choose, run
        from tierkv.study.memdecay.cli import show, write

        arms = choose(arm or ())
        scale = (
            Scale(sessions=12, fits=3, warm_up=15.0, seconds=40.0, seed=seed) if quick else Scale(seed=seed)
        )
        planned = [(one, False) for one in arms] + [
            (one, True) for one in arms if one in EXACT_ROOM and not quick
        ]
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            begun = [pool.submit(run, scale, one, exact) for one, exact in planned]
            found = [each.result() for each in begun]
        write(out, found)
        picture.draw(found, plot)
        show(as_json, found, lambda: table.render(found))
        if not as_json:
            print(f"written to {out} and {plot}")
