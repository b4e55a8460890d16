"""`python -m tierkv.benchmarks [request] [moves] [decode] [policy] [--quick] [--out FILE]`."""

from __future__ import annotations

import os

# Torch and the kernels have OpenMP threads of their own: the ones that wait must not take the cores of the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import signal
import sys
import time
from pathlib import Path

from tierkv.benchmarks import NAMES, measure
from tierkv.benchmarks.report import lines, write


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tierkv.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default all")
    parser.add_argument("--quick", action="store_true", help="a few samples each: checks that all works")
    parser.add_argument("--out", type=Path, default=Path("out/bench.json"))
    given = parser.parse_args()
    if unknown := set(given.names) - set(NAMES):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes started here end too
    start = time.monotonic()
    results = measure(given.names or NAMES, given.quick)
    print("\n".join(lines(results)))
    write(results, given.out)
    print(f"{time.monotonic() - start:.0f} s; written to {given.out}")


if __name__ == "__main__":
    main()
