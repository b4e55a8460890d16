"""The table of a run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from tierkv.benchmarks.quant.records import Record


def render(records: Sequence[Record]) -> Group:
    """Quality, then speed, then what the figures rest on. Raises `IndexError` without any record."""
    run = records[0].run
    skipped = [f"[bold]{name} is left out:[/] {escape(why)}" for name, why in run.skipped.items()]
    facts = []
    if run.facts_exact is not None:
        facts.append(f"Facts over the exact cache: {run.facts_exact} of {records[0].facts_asked}")
    return Group(
        _quality(records),
        _speed(records),
        *facts,
        *skipped,
        f"Inputs: {escape('; '.join(run.inputs))}",
        f"Fitted on: {escape('; '.join(run.calibration))}",
        *(f"{record.codec}: {escape(record.note)}" for record in records if record.note),
    )


def _quality(records: Sequence[Record]) -> Table:
    run = records[0].run
    least, most = min(run.context), max(run.context)
    tokens = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    table = plain_table(
        f"{run.model}, {len(run.inputs)} inputs of {tokens} cached tokens: what {run.forced} next tokens lose "
        f"(first {run.sinks} and last {run.recent} exact)"
    )
    columns = ["form", "bits", "KL, nats", "x KIVI-\nG32", "lower\non", "top-1", "dNLL", "attn.\nerror"]
    asked = run.facts_exact is not None
    for name in [*columns, "facts"] if asked else columns:
        table.add_column(name, justify="left" if name == "form" else "right")
    for one in sorted(records, key=lambda record: record.kl):
        table.add_row(
            one.codec if one.peer else f"[bold]{one.codec}[/]",
            f"{one.bits_per_value:.2f}",
            _interval(one.kl, one.kl_low, one.kl_high, 3),
            _interval(one.kl_ratio, one.kl_ratio_low, one.kl_ratio_high, 2),
            f"{one.kl_wins}/{len(run.inputs)}",
            _interval(one.top1, one.top1_low, one.top1_high, 3),
            _interval(one.dnll, one.dnll_low, one.dnll_high, 3),
            f"{one.attn_error:.3f}",
            *([f"{one.facts}/{one.facts_asked}"] if asked else []),
        )
    return table


def _speed(records: Sequence[Record]) -> Table:
    run = records[0].run
    table = plain_table(
        "GB/s of exact bytes on one thread (x memcpy), and attention in place over "
        f"{run.attention_tokens:,} tokens, ms a token (x exact pages): float32; one bfloat16 layer of an 8B model"
    )
    for name in ("form", "encode", "decode", "attention", "8B encode", "8B decode", "8B attention"):
        table.add_column(name, justify="left" if name == "form" else "right")
    for one in records:
        cells = []
        for part in (one, one.eight_b):
            if part is None:
                cells += [""] * 3
                continue
            cells += [
                f"{part.encode_gbps:.2f} ({part.encode_memcpy:.2f})",
                f"{part.decode_gbps:.2f} ({part.decode_memcpy:.2f})",
                "" if part.attention_ms is None else f"{part.attention_ms:.2f} ({part.attention_ratio:.2f})",
            ]
        table.add_row(one.codec if one.peer else f"[bold]{one.codec}[/]", *cells)
    return table


def plain_table(title: str) -> Table:
    """Narrow: both tables fit in 100 columns."""
    return Table(title=title, box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)


def _interval(value: float, low: float, high: float, digits: int) -> str:
    return f"{value:.{digits}f}\n[dim]{low:.{digits}f}..{high:.{digits}f}[/]"
