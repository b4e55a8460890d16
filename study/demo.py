"""The demo: agents' facts, recalled from an eighth of the memory.  `python -m tierkv.study.demo`, or `make demo`.

Starts a real `tierkv-daemon` whose whole HBM pool is 12% of an episode's exact KV bytes, and a worker process that runs
SmolLM2-135M over six agent episodes in five arms (`arms.py`): everything exact; and within the pool's bytes dropping
pages, quantizing everything, tiers without recall, and tiers. Writes `out/demo.json`.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tierkv.errors import TierKVError
from tierkv.study import processes
from tierkv.study.arms import ARMS, pool_bytes
from tierkv.study.episodes import load_episodes
from tierkv.study.model import load_tokenizer
from tierkv.study.report import DemoReport, render
from tierkv.study.worker import Finished, Message, Ready
from tierkv.study.worker import Progress as Told

BUDGET_FRACTION = 0.12
HOST_BYTES = 128 << 20
"""Room for every page of two episodes; an episode has 41 MB."""

EVENTS_PER_RUN = 5  # of one episode in one arm: the replay and four answers


def run(console: Console) -> DemoReport:
    """Run it all.

    Raises:
        TierKVError: the weights are missing, or daemon or worker failed.
    """
    begin = time.monotonic()
    episodes = load_episodes()
    with console.status("loading SmolLM2-135M (the first time it is converted: half a minute) ..."):
        pool = pool_bytes(episodes, load_tokenizer(), BUDGET_FRACTION)
    with processes.state_directory() as folder:
        daemon_log, worker_log = folder / "daemon.log", folder / "worker.log"
        with (
            processes.running(processes.daemon_command(folder, pool, HOST_BYTES), daemon_log) as daemon,
            processes.running(processes.worker_command(folder), worker_log, subprocess.PIPE) as worker,
        ):
            processes.end_together(daemon, worker)
            ready, finished = follow(worker, console, len(episodes) * len(ARMS) * EVENTS_PER_RUN)
            if ready is None or finished is None:
                if daemon.poll() is not None:
                    raise processes.failure("daemon", daemon, daemon_log)
                worker.wait()
                raise processes.failure("worker", worker, worker_log)
    for miss in finished.misses:
        console.print(f"missed: {miss}", style="dim", highlight=False)
    return DemoReport(
        BUDGET_FRACTION,
        pool,
        ready.context_tokens,
        len(episodes),
        finished.arms,
        finished.tiers,
        finished.attention_recall,
        finished.hbm_bytes_peak,
        finished.quantized_bytes_peak,
        finished.recalled_pages,
        time.monotonic() - begin,
    )


def follow(
    worker: subprocess.Popen[str], console: Console, total: int
) -> tuple[Ready | None, Finished | None]:
    """Show the worker's progress until it ends. `None` for a message that never came."""
    assert worker.stdout is not None
    decoder = msgspec.json.Decoder(Message)
    ready: Ready | None = None
    finished: Finished | None = None
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    begin, told = time.monotonic(), 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting daemon and worker", total=total)
        for line in worker.stdout:
            match decoder.decode(line):
                case Ready() as ready:
                    bar.update(task, description="replaying episodes")
                case Told(arm=arm, episode=episode):
                    told += 1
                    bar.update(task, advance=1, description=f"{episode}, {arm}")
                    if told % EVENTS_PER_RUN == 0 and not console.is_terminal:
                        console.print(f"{time.monotonic() - begin:5.0f} s  {episode}, {arm}", highlight=False)
                case Finished() as finished:
                    bar.update(task, description="done")
    return ready, finished


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tierkv.study.demo", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo.json"), help="where the figures go")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end daemon and worker too
    console = Console()
    try:
        report = run(console)
    except TierKVError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    console.print(render(report))
    console.print(f"figures: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
