"""`tierkv replay`: a file of traces over the running daemon, its figures for programs, and the table for people."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tierkv.client import Client
from tierkv.daemon.limits import show_bytes
from tierkv.daemon.statedir import read_holder, read_http
from tierkv.study.model import MODEL_ID
from tierkv.study.replay import TIERS, Setup, TraceReport, load_model, replay_trace
from tierkv.study.traces import Trace

MIB = 1 << 20
COLUMNS = ("exact", "low-bit", "host", "gone")
"""`TIERS`, in people's words: pages at the end of a trace."""


class Memory(msgspec.Struct):
    """Private bytes after the first and the last trace, and the most after any."""

    first: int
    last: int
    peak: int


class Totals(msgspec.Struct):
    """`kl` and `top1` are means over the traces compared, `kl_worst` is the worst trace's; `budget_used` is the largest
    part of its budget that a session took; `bytes_left` is what sessions left behind."""

    traces: int
    errors: int
    cut: int
    tokens: int
    seconds: float
    budget_used: float
    pages: dict[str, int]
    kl: float | None
    kl_worst: float | None
    top1: float | None
    bytes_left: int
    worker_memory: Memory
    daemon_memory: Memory


class ReplayReport(msgspec.Struct):
    model: str
    budget: float
    recall: str | None
    traces: list[TraceReport]
    totals: Totals

    def as_dict(self) -> object:
        """For JSON."""
        return msgspec.to_builtins(self)

    def print(self) -> None:
        Console().print(render(self))


def run(
    client: Client,
    chosen: Sequence[tuple[int, Trace]],
    *,
    budget: float,
    folder: Path | None,
    recall: str | None,
    compare: bool,
) -> ReplayReport:
    """Replay traces (each with its number), one after the other; each is told on stderr when it is through.

    Args:
        budget: HBM of a session, as a fraction of its exact KV bytes.
        folder: of the model; None for SmolLM2.
        recall: mode of the `TieredCache`; None for its default.
        compare: with a full cache.

    Raises:
        ConfigError: the model cannot be used.
    """
    model, tokenizer = load_model(folder)
    setup = Setup(model, tokenizer, client, budget, recall, compare, owner_pid(client.state_dir))
    traces = []
    for number, trace in chosen:
        traces.append(replay_trace(setup, number, trace))
        print(progress(traces[-1], len(traces), len(chosen)), file=sys.stderr, flush=True)
    name = folder.name if folder is not None else MODEL_ID
    return ReplayReport(name, budget, recall, traces, totals(traces))


def owner_pid(state_dir: Path) -> int | None:
    """The process that owns the pools, where it says so."""
    found = read_http(state_dir) or read_holder(state_dir)
    return None if found is None else found.pid


def progress(trace: TraceReport, done: int, of: int) -> str:
    """One line."""
    if trace.error is not None:
        return f"{done}/{of} trace {trace.number}: {trace.error}"
    kl = f", KL {trace.quality.kl:.4f}" if trace.quality is not None else ""
    return f"{done}/{of} trace {trace.number}: {trace.tokens:,} tokens in {trace.seconds:.1f} s{kl}"


def totals(traces: Sequence[TraceReport]) -> Totals:
    """Over at least one trace."""
    done = [trace for trace in traces if trace.error is None]
    compared = [trace.quality for trace in done if trace.quality is not None]
    return Totals(
        traces=len(traces),
        errors=len(traces) - len(done),
        cut=sum(trace.messages_cut > 0 for trace in traces),
        tokens=sum(trace.tokens for trace in done),
        seconds=sum(trace.seconds for trace in done),
        budget_used=max((trace.hbm_peak_bytes / trace.budget_bytes for trace in done), default=0.0),
        pages={tier: sum(trace.pages.get(tier, 0) for trace in done) for tier in TIERS},
        kl=statistics.fmean(q.kl for q in compared) if compared else None,
        kl_worst=max((q.kl for q in compared), default=None),
        top1=statistics.fmean(q.top1 for q in compared) if compared else None,
        bytes_left=max(trace.bytes_left for trace in traces),
        worker_memory=_memory([trace.worker_memory for trace in traces]),
        daemon_memory=_memory([trace.daemon_memory for trace in traces]),
    )


def render(report: ReplayReport) -> Group:
    """A line a trace, a line of totals, and what was cut or failed."""
    how = f"budget {report.budget:.0%} of each trace's exact KV, recall {report.recall or 'by default'}"
    table = Table(title=f"{report.model}, {how}", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("trace", "turns", "tokens", "hbm MiB", "of", *COLUMNS, "s", "KL", "top-1"):
        table.add_column(name, justify="left" if name == "trace" else "right", no_wrap=True)
    for trace in report.traces:
        if trace.error is None:
            table.add_row(*_row(trace))
        else:
            table.add_row(str(trace.number), Text("failed", style="red"))
    all_of, notes = report.totals, []
    table.add_section()
    table.add_row(
        f"{all_of.traces - all_of.errors} of {all_of.traces}", "", f"{all_of.tokens:,}",
        f"{all_of.budget_used:.0%}", "", *(f"{all_of.pages[tier]:,}" for tier in TIERS),
        f"{all_of.seconds:.0f}", _number(all_of.kl, "{:.4f}"), _number(all_of.top1, "{:.1%}"),
    )  # fmt: skip
    for trace in report.traces:
        if trace.error is not None:
            notes.append(f"trace {trace.number} ({trace.name}) failed: {trace.error}")
        if trace.messages_cut:
            notes.append(
                f"trace {trace.number} is longer than the model's context: its last {trace.messages_cut} messages "
                f"({trace.tokens_cut:,} tokens) are left out"
            )
    notes.append(f"left behind by closed sessions: {show_bytes(all_of.bytes_left)}")
    for who, memory in (("worker", all_of.worker_memory), ("daemon", all_of.daemon_memory)):
        if memory.peak:
            notes.append(
                f"memory of the {who} without the pools: {show_bytes(memory.first)} after the first trace, "
                f"{show_bytes(memory.last)} after the last, at most {show_bytes(memory.peak)}"
            )
    return Group(table, *(Text(note) for note in notes))


def _row(trace: TraceReport) -> list[str]:
    found = trace.quality
    scores = ["-", "-"] if found is None else [f"{found.kl:.4f}", f"{found.top1:.1%}"]
    return [
        str(trace.number), str(trace.messages), f"{trace.tokens:,}",
        f"{trace.hbm_peak_bytes / MIB:.2f}", f"{trace.budget_bytes / MIB:.2f}",
        *(f"{trace.pages.get(tier, 0):,}" for tier in TIERS), f"{trace.seconds:.1f}",
        *scores,
    ]  # fmt: skip


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _memory(values: list[int]) -> Memory:
    return Memory(values[0], values[-1], max(values))
