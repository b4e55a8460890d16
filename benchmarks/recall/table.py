"""The tables of a run: means over inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from rich.console import Group
from rich.table import Table

from tierkv.benchmarks.quant.table import plain_table
from tierkv.benchmarks.recall.records import Record


def render(records: Sequence[Record]) -> Group:
    budgets = dict.fromkeys(record.budget for record in records if record.budget is not None)
    families = list(dict.fromkeys(record.input.partition(":")[0] for record in records))
    parts = [_estimators(records, families), _aggregates(records)]
    served = [record for record in records if record.step_ms is not None]
    placed = [record for record in records if record.step_ms is None]
    return Group(
        *parts, *(_budget(placed, budget, families) for budget in budgets if budget < 1),
        *([_served(served)] if served else []), _full(records),
    )  # fmt: skip


def _estimators(records: Sequence[Record], families: Sequence[str]) -> Table:
    table = plain_table(
        "Mass of the best tenth of cold pages by estimate, of what the best by mass hold; all layers"
    )
    for name in ("estimator", "% of a page", "promotion", *families, "a KV head's own", "mass"):
        table.add_column(name, justify="left" if name == "estimator" else "right")
    for name, own in _by_arm(record for record in records if record.budget is None).items():
        captured = {
            family: _mean(r.captured_mass for r in own if r.input.startswith(family)) for family in families
        }
        table.add_row(
            name, _percent(own[0].digest_bytes_ratio), _mean(r.captured_mass for r in own), *captured.values(),
            _mean(r.captured_direct for r in own), _mean(r.mass_ratio for r in own),
        )  # fmt: skip
    return table


def _aggregates(records: Sequence[Record]) -> Table:
    table = plain_table(
        "The same otherwise: opinions put together, offsets a head; direct reads by whom, and a query late"
    )
    compared = [record for record in records if record.by_aggregate]
    names = list(dict.fromkeys(name for record in compared for name in record.by_aggregate or ()))
    choices = list(dict.fromkeys(name for record in compared for name in record.direct_by_aggregate or ()))
    for name in ("estimator", *names, "offsets", *choices, *("late", "corrected", "redone")):
        table.add_column(name, justify="left" if name == "estimator" else "right")
    for arm, own in _by_arm(compared).items():
        chosen = (_mean((r.direct_by_aggregate or {}).get(name) for r in own) for name in choices)
        late = (
            _mean((r.direct_late or {}).get(name) for r in own) for name in ("late", "corrected", "redone")
        )
        table.add_row(
            arm, *(_mean((r.by_aggregate or {}).get(name) for r in own) for name in names),
            _mean(r.with_offsets for r in own), *chosen, *late,
        )  # fmt: skip
    return table


def _budget(records: Sequence[Record], budget: float, families: Sequence[str]) -> Table:
    held = [record for record in records if record.budget == budget]
    table = plain_table(
        f"{100 * budget:.0f}% of the context's bytes: attention recall, and over the oracle's"
    )
    columns = ("arm", "% of a page", "recall", "of oracle's", *families, "answers", "captured", "wasted")
    for name in columns:
        table.add_column(name, justify="left" if name == "arm" else "right")
    for arm, own in sorted(
        _by_arm(held).items(), key=lambda item: fmean(r.attention_recall or 0 for r in item[1])
    ):
        table.add_row(
            arm, _percent(own[0].digest_bytes_ratio), _mean(r.attention_recall for r in own), _of_oracle(own),
            *(_of_oracle([r for r in own if r.input.startswith(family)]) for family in families),
            _mean(r.probe_recall for r in own), _mean(r.captured_mass for r in own), _mean(r.wasted_ratio for r in own),
        )  # fmt: skip
    return table


def _served(records: Sequence[Record]) -> Table:
    table = plain_table(
        "Served by a daemon: attention attended, in HBM and in place; waiting; pages that took places"
    )
    columns = (
        "input",
        "budget",
        "arm",
        "recall",
        "in HBM",
        "answers",
        "blocked ms",
        "of a step",
        "wasted",
        "of",
        "filled",
    )
    for name in columns:
        table.add_column(name, justify="left" if name in ("input", "arm") else "right")
    for r in records:
        blocked = (
            None if r.blocked_ms_per_token is None or not r.step_ms else r.blocked_ms_per_token / r.step_ms
        )
        table.add_row(
            r.input, _percent(r.budget), r.arm, _mean([r.attention_recall]), _mean([r.captured_mass]),
            _mean([r.probe_recall]), _mean([r.blocked_ms_per_token]), _percent(blocked), _mean([r.wasted_ratio]),
            str(r.brought), str(r.filled),
        )  # fmt: skip
    return table


def _full(records: Sequence[Record]) -> str:
    whole = [record for record in records if record.budget == 1.0]
    inputs = ", ".join(dict.fromkeys(record.input for record in records))
    answered = f"Answers over the exact context: {_mean(r.probe_recall for r in whole)}. " if whole else ""
    return f"{answered}Inputs: {inputs}"


def _by_arm(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.arm, []).append(record)
    return found


def _of_oracle(records: Sequence[Record]) -> str:
    return _mean(
        record.attention_recall / record.oracle_recall
        for record in records
        if record.attention_recall is not None and record.oracle_recall
    )


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.3f}" if known else ""


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.2f}"
