"""`tierkv bench facts`: the facts alone, without losses and speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from tierkv.benchmarks.quant import RECENT, SINKS, facts, forms
from tierkv.benchmarks.quant.facts import Facts
from tierkv.benchmarks.quant.plan import Plan, Told, calibrated
from tierkv.benchmarks.report import load, machine
from tierkv.study.episodes import load_episodes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Report(msgspec.Struct):
    machine: dict[str, object]
    episodes: list[str]
    calibration: list[str]
    skipped: dict[str, str]
    forms: dict[str, Facts]
    sinks: int = SINKS
    recent: int = RECENT


def run(plan: Plan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, told: Told) -> Report:
    """Ask the demo's probes over the plan's forms and the exact cache."""
    host = machine()
    episodes = load_episodes()
    told(0, len(episodes), "reading the calibration texts")
    texts, seen = calibrated(plan, model, tokenizer)
    found, skipped = forms.build(plan.names, seen)
    known = facts.ask(model, tokenizer, found, episodes, told)
    host["load_after"] = load()
    return Report(
        host, [one.name for one in episodes], [text.title for text in texts],
        {one.name: one.why for one in skipped}, known,
    )  # fmt: skip


def render(report: Report) -> Group:
    table = Table(
        title=f"Facts of {len(report.episodes)} episodes, all but the first {report.sinks} and last {report.recent} "
        "tokens packed"
    )
    for name in ("form", "bits", "facts", "CPU seconds", "missed"):
        table.add_column(name, justify="left" if name in ("form", "missed") else "right")
    for name, known in report.forms.items():
        table.add_row(
            name,
            f"{known.bits_per_value:.2f}",
            f"{known.facts} of {known.facts_asked}",
            f"{known.cpu_seconds:.0f}",
            escape(", ".join(known.facts_missed)),
        )
    skipped = [f"[bold]{name} is left out:[/] {escape(why)}" for name, why in report.skipped.items()]
    return Group(table, *skipped, f"Fitted on: {escape('; '.join(report.calibration))}")
