"""`tierkv study`: the commands. Each writes its figures to `--out` and prints a table, or with `--json` the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tierkv.study.memdecay.ablation_commands import ablate, labels, overhead, variants
from tierkv.study.memdecay.calibration_commands import ema, lifetimes, record
from tierkv.study.memdecay.cli import Json, Out, Split, progress, require, show, stamped, write
from tierkv.terminal import plain_errors

app = typer.Typer(no_args_is_help=True, help="The MemDecay study (arXiv 2607.10582), on SmolLM2-135M.")


@app.command()
def recall(
    quick: Annotated[
        bool, typer.Option("--quick", help="A third of the episodes: six minutes on two cores.")
    ] = False,
    split: Annotated[
        Split, typer.Option(help="Scenarios: to report on, or to develop and tune on.")
    ] = Split.report,
    tiered: Annotated[bool, typer.Option(help="Also the arms that need a daemon, the tiered arms.")] = True,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="Which tiered arm: tiered, tiered-low-bit or tiered-digests; repeatable; by default all."
        ),
    ] = None,
    budget: Annotated[
        list[float] | None,
        typer.Option(
            help="Of the tiered arms: the long tier only, and at which of .5, .25, .1 and .05; repeatable."
        ),
    ] = None,
    out: Out = Path("out"),
    as_json: Json = False,
) -> None:
    """Evict by each policy, then ask for the facts. Goes on where an interrupted run was."""
    with plain_errors():
        require(out)
        from tierkv.study.memdecay import recall as study
        from tierkv.study.memdecay import recall_figures, tables
        from tierkv.study.model import load_smollm2

        plan = (study.QUICK if quick else study.Plan())._replace(split=split.value)
        plan = study.choose(plan, tiered, arm, budget)
        folder = out / ("study-quick" if quick else "study")
        results = study.open_results(folder, plan.split)
        with progress() as told:
            study.run(plan, results, *load_smollm2(), told)
        found = tables.summarize(results, plan.split)
        write(out / "study.json", [_brief(cell) for cell in found.cells])
        write(folder / f"recall-{plan.split}.json", stamped(found))
        recall_figures.draw(found, folder / f"recall-{plan.split}.png")
        show(as_json, [_brief(cell) for cell in found.cells], lambda: tables.render(found))


def _brief(cell: Any) -> dict[str, object]:
    names = ("tier", "policy", "budget", "probes", "recall", "non_system", "low", "high")
    return {name: getattr(cell, name) for name in names}


for command in (record, lifetimes, ema, ablate, variants, labels, overhead):
    app.command()(command)
