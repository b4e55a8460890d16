"""The picture: bytes of a record against what the pages that it names hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from tierkv.benchmarks.recall.records import Record

OURS, OTHERS, INK, FAINT = (
    "#0b7285",
    ("#868e96", "#e8590c", "#9c36b5", "#2f9e44", "#1971c2"),
    "#212529",
    "#495057",
)
TICKS = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""Percent of a page's bytes."""

DPI = 160


def points(records: Sequence[Record]) -> dict[str, list[tuple[float, float, str]]]:
    """By kind of estimator (its name up to the first dash): percent of a page, captured mass over inputs, and name."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.budget is None and record.captured_mass is not None and record.digest_bytes_ratio:
            found.setdefault(record.arm, []).append(record)
    kinds: dict[str, list[tuple[float, float, str]]] = {}
    for arm, own in found.items():
        captured = fmean(record.captured_mass or 0.0 for record in own)
        kinds.setdefault(arm.partition("-")[0], []).append(
            (100 * (own[0].digest_bytes_ratio or 0.0), captured, arm)
        )
    return {kind: sorted(each) for kind, each in kinds.items()}


def draw(records: Sequence[Record], file: Path) -> None:
    """A PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 5.6))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.085, right=0.975, top=0.86, bottom=0.13)
    figure.text(
        0.085,
        0.92,
        "What a cold page leaves behind, and what it finds",
        fontsize=15,
        weight="bold",
        color=INK,
    )
    axes = figure.add_subplot()
    others = iter(OTHERS)
    for kind, each in points(records).items():
        ours = kind == "transform"
        color = OURS if ours else next(others, OTHERS[0])
        line = "o-" if ours else "o"
        axes.plot([x for x, _, _ in each], [y for _, y, _ in each], line, color=color, label=kind)
        for x, y, name in each:
            axes.annotate(
                name.partition("-")[2], (x, y), (4, 5), textcoords="offset points", fontsize=8, color=FAINT
            )
    axes.set_xscale("log")
    axes.set_xticks(TICKS, [f"{tick:g}%" for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlabel("bytes of a record, of its page's in bfloat16", color=FAINT)
    axes.set_ylabel("mass of the best tenth by estimate, over the best by mass", color=FAINT)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=DPI)
