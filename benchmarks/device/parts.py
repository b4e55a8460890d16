"""The parts of `make gpu-check`: each in a process of its own, with a time limit, and one table of all of them.

Parts that judge run side by side; those that measure run alone, one after the other.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tierkv.benchmarks.device import bandwidth, kernels, model, moves, sharing, table
from tierkv.benchmarks.device.machine import Machine
from tierkv.benchmarks.device.table import Part, Row

ROOT = Path(__file__).resolve().parent.parent.parent


class Task(NamedTuple):
    run: Callable[[Machine], Iterator[Row]]
    limit: float  # seconds
    alone: bool


def attention_cases(machine: Machine) -> Iterator[Row]:
    """The attention that runs on a device, through the contract's own tests."""
    import pytest

    what = "attention 'triton' fulfils its contract"

    tests = sorted(str(file) for file in (ROOT / "tests" / "contract").glob("test_*attention*.py"))
    status = pytest.main(
        ["-q", "-x", "-p", "no:cacheprovider", *machine.sizes.contract, "--rootdir", str(ROOT), *tests]
    )
    yield Row(what, f"pytest: {status.name if isinstance(status, pytest.ExitCode) else status}", status == 0)


TASKS: dict[str, Task] = {
    "rotated kernels": Task(partial(kernels.run, codecs=("k3v2", "rotated2")), 110, alone=False),
    "klt kernels": Task(partial(kernels.run, codecs=("klt2",)), 110, alone=False),
    "shared memory": Task(sharing.run, 110, alone=False),
    "attention": Task(attention_cases, 110, alone=False),
    "moves": Task(moves.run, 60, alone=True),
    "bandwidth": Task(bandwidth.run, 90, alone=True),
    "model": Task(model.run, 80, alone=True),
}
"""The slowest that judges and all that measure: 340 seconds."""

CHILDREN: dict[str, Callable[..., int]] = {sharing.CHILD: sharing.child, model.CHILD: model.child}
"""Second processes of parts."""


def main(machine: Callable[[], Machine], arguments: list[str] | None = None) -> int:
    """1 if a part failed, else 0.

    Args:
        machine: on what to run; called in each process.
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--out", type=Path, help="a file for the table, beside the terminal")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="PART")
    parser.add_argument("--part", choices=list(TASKS), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        return CHILDREN[given.child[0]](*given.child[1:])
    if given.part:
        for row in TASKS[given.part].run(machine()):
            table.append(given.rows, row)
        return 0
    on = machine()
    parts = run_all(on, given.only)
    text = table.render(on.name, parts)
    print(text)
    if given.out:
        given.out.write_text(text)
    return 0 if all(part.good for part in parts) else 1


def run_all(machine: Machine, names: list[str]) -> list[Part]:
    """What each part found, in the order of `TASKS`."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(TASKS)) as threads:
        start = partial(run_part, machine.command, Path(folder))
        beside = {name: threads.submit(start, name) for name in names if not TASKS[name].alone}
        found = {name: future.result() for name, future in beside.items()}
        found |= {name: start(name) for name in names if TASKS[name].alone}
    return [found[name] for name in TASKS if name in found]


def run_part(command: tuple[str, ...], folder: Path, name: str) -> Part:
    """A part in a process of its own."""
    rows, said = folder / f"{name}.rows", folder / f"{name}.log"
    begun, problem = time.monotonic(), ""
    with said.open("w") as log:
        process = subprocess.Popen(
            [*command, "--part", name, "--rows", str(rows)], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(TASKS[name].limit)
            if status:
                last = (said.read_text().strip().splitlines() or ["it said nothing"])[-1]
                problem = f"exit status {status}: {last}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            problem = f"stopped after {TASKS[name].limit:g} s"
    if problem:
        print(f"--- {name}\n{said.read_text()}", file=sys.stderr)
    return Part(name, table.read(rows), time.monotonic() - begun, problem)
