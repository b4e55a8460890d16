"""The tables of a run, 100 columns wide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from tierkv.benchmarks.decode import DYNAMIC, EXACT, FIFTH, FIXED, OBSERVED, QUARTER, UNOBSERVED
from tierkv.benchmarks.decode.records import Record, Run

MIB = 2**20
KINDS = ("exact", "low_bit", "cold")


def render(records: Sequence[Record], run: Run) -> Group:
    """A table a batch, then what further arms show, then notes."""
    return Group(*_parts(records, run))


def _parts(records: Sequence[Record], run: Run) -> Iterator[Table | str]:
    for batch in sorted({one.batch for one in records}):
        yield _steps([one for one in records if one.batch == batch], run, batch)
    observed = [one for one in run.more if one.arm in OBSERVED]
    if any(UNOBSERVED in one.ratio_to for one in observed):
        yield _observed(observed)
    quarter = [one for one in records if one.arm == QUARTER and one.batch == 1]
    budgets = [*quarter, *(one for one in run.more if one.arm in (FIFTH, FIXED))]
    if budgets:
        yield _budgets(sorted(budgets, key=lambda one: one.arm))
    if run.prefill is not None:
        yield _prefill(run.prefill)
    if run.scaling is not None:
        yield (
            f"tierkv-exact, batch 1: {run.scaling.ms_at_0:.1f} ms and {run.scaling.ms_per_mib:.3f} ms a MiB attended "
            f"(R2 {run.scaling.r2:.3f})"
        )
    yield from (f"{arm} is left out: {escape(why)}" for arm, why in run.skipped.items())
    yield from dict.fromkeys(f"{one.arm}: {escape(one.note)}" for one in records if one.note)
    yield from _packing(records)


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    return table


def _steps(records: Sequence[Record], run: Run, batch: int) -> Table:
    table = _table(
        f"{run.model}, batch {batch}, {run.pages} pages: a step, and its part beyond that at 64 tokens",
        "context", "arm", "ms", f"x {DYNAMIC} (quartiles)", "KV ms", "x KV", "x hqq2", "KV MiB", "host", "peak MiB",
    )  # fmt: skip
    last = 0
    for one in records:
        if last and one.context != last:
            table.add_section()
        table.add_row(
            f"{one.context:,}" if one.context != last else "",
            f"[bold]{one.arm}[/]" if one.arm.startswith("tierkv") else one.arm,
            f"{one.ms_per_token:.1f}",
            _ratio(one),
            _number(one.kv_ms, 1),
            _number(one.kv_ratio_to_dynamic, 2),
            _number(one.ratio_to.get("hqq2"), 2),
            f"{one.kv_bytes / MIB:.1f}",
            f"{one.host_bytes / MIB:.1f}" if one.host_bytes else "",
            _number(None if one.peak_bytes is None else one.peak_bytes / MIB, 1),
        )
        last = one.context
    return table


def _observed(records: Sequence[Record]) -> Table:
    table = _table(
        "What observing costs, beside the same steps unobserved; and the session's calls, in ms a step",
        "context", "arm", "ms", "x unobserved", "in calls", "blocked", "of decode time",
    )  # fmt: skip
    for one in records:
        table.add_row(
            f"{one.context:,}", one.arm, f"{one.ms_per_token:.1f}", _number(one.ratio_to.get(UNOBSERVED), 3),
            _number(one.daemon_ms, 3), _number(one.blocked_ms, 3),
            "" if one.blocked_share is None else f"{one.blocked_share:.2%}",
        )  # fmt: skip
    return table


def _budgets(records: Sequence[Record]) -> Table:
    table = _table(
        "Under a budget: a fifth, a quarter, 512 tokens throughout",
        "context", "arm", "ms", f"x {DYNAMIC}", "x exact", "x hqq2", "HBM MiB", "read",
        "exact, low-bit, cold",
    )  # fmt: skip
    for one in records:
        pages = one.pages or {}
        table.add_row(
            f"{one.context:,}", one.arm, f"{one.ms_per_token:.1f}", f"{one.ratio_to_dynamic:.2f}",
            _number(one.ratio_to.get(EXACT), 2), _number(one.ratio_to.get("hqq2"), 2),
            f"{one.kv_bytes / MIB:.1f}", f"{one.attended_bytes / MIB:.1f}",
            ", ".join(str(pages.get(kind, 0)) for kind in KINDS),
        )  # fmt: skip
    return table


def _packing(records: Sequence[Record]) -> Iterator[str]:
    """A line an arm that packs anew, of batch 1."""
    packing = [one for one in records if one.packing_ms is not None and one.batch == 1]
    for arm in dict.fromkeys(one.arm for one in packing):
        added = (f"{one.packing_ms:.1f} at {one.context:,}" for one in packing if one.arm == arm)
        yield f"{arm}: packing anew adds, spread over the tokens in between, {', '.join(added)} ms a token"


def _prefill(prefill: dict[str, Any]) -> Table:
    table = _table(
        f"A prompt of {prefill['tokens']:,} tokens read through pages, in seconds",
        "arm", "s", f"{DYNAMIC}, s", f"x {DYNAMIC} (quartiles)", "times",
    )  # fmt: skip
    for arm, figures in prefill.items():
        if arm != "tokens":
            table.add_row(
                arm, f"{figures['ours']:.1f}", f"{figures['peer']:.1f}",
                _quartiles(figures["ratio"], figures["ratio_low"], figures["ratio_high"]), str(figures["pairs"]),
            )  # fmt: skip
    return table


def _ratio(one: Record) -> str:
    return "" if one.arm == DYNAMIC else _quartiles(one.ratio_to_dynamic, one.ratio_low, one.ratio_high)


def _quartiles(ratio: float, low: float, high: float) -> str:
    return f"{ratio:.2f} ({low:.2f} to {high:.2f})"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
