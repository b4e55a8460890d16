"""The picture: milliseconds a token by context, a line an arm, a panel a batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.benchmarks.decode import DYNAMIC, EXACT, QUARTER
from tierkv.benchmarks.decode.records import Record
from tierkv.benchmarks.quant.frontier import CHARACTER, DPI, FAINT, INK, LINE, OURS, PEER, Label, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL = 5.4, 4.6
"""Inches of a panel: width and height."""

COLOURS = {
    EXACT: OURS,
    QUARTER: LINE,
    DYNAMIC: INK,
    "hqq2": "#9c36b5",
    "quanto2": "#2b8a3e",
    "eager": "#1864ab",
}
"""Others are `PEER`."""

DECADE = 10.0
"""From so large a range of times on, only 1, 2 and 5 have their numbers."""


def draw(records: Sequence[Record], model: str, file: Path) -> None:
    """A PNG. Raises `IndexError` without any record."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batches = sorted({one.batch for one in records})
    longest = max(one.context for one in records)
    width, height = PANEL[0] * len(batches) + 0.4, PANEL[1] + 1.2
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    left = 0.75 / width
    figure.subplots_adjust(
        left=left, right=1 - 1.15 / width, top=1 - 1.3 / height, bottom=0.6 / height, wspace=0.42
    )
    figure.text(left, 1 - 0.42 / height, "What a token costs", fontsize=15, weight="bold", color=INK)
    figure.text(
        left, 1 - 0.78 / height,
        f"{model}, contexts to {longest:,} tokens:\na step of all rows, median. Lower is better.",
        fontsize=9, color=FAINT, va="center", linespacing=1.4,
    )  # fmt: skip
    for index, batch in enumerate(batches):
        axes = figure.add_subplot(1, len(batches), index + 1)
        _panel(axes, [one for one in records if one.batch == batch], batch)
        if not index:
            axes.set_ylabel("ms a step", color=FAINT)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=DPI)


def _panel(axes: Axes, shown: Sequence[Record], batch: int) -> None:
    contexts = sorted({one.context for one in shown})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(contexts[0] / 1.15, contexts[-1] * 1.15)
    times = [one.ms_per_token for one in shown]
    axes.set_ylim(min(times) / 1.15, max(times) * 1.25)
    ends: list[Record] = []
    for name in dict.fromkeys(one.arm for one in shown):
        line = sorted((one for one in shown if one.arm == name), key=lambda one: one.context)
        ours = name.startswith("tierkv")
        axes.plot(
            [one.context for one in line], [one.ms_per_token for one in line], color=COLOURS.get(name, PEER),
            marker="o" if ours else "D", markersize=6 if ours else 5, linewidth=2 if ours else 1.3,
            markerfacecolor=COLOURS.get(name, PEER) if ours else "white", zorder=4 if ours else 3,
        )  # fmt: skip
        ends.append(line[-1])
    _names(axes, ends)
    axes.set_xticks(contexts)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    told = "25" if max(times) > DECADE * min(times) else "23456789"
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in told else "")
    axes.set_title(f"batch {batch}", fontsize=10, color=FAINT, loc="left")
    axes.set_xlabel("tokens of context", color=FAINT)
    axes.tick_params(colors=FAINT, which="both")
    axes.grid(color="#dee2e6", linewidth=0.6, which="major")
    axes.grid(color="#f1f3f5", linewidth=0.5, which="minor", axis="y")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#adb5bd")


def _names(axes: Axes, ends: Sequence[Record]) -> None:
    """At the ends of the lines, none over another."""
    heights = [
        float(axes.transData.transform((one.context, one.ms_per_token))[1]) * 72 / axes.figure.dpi
        for one in ends
    ]
    labels = [Label(0, CHARACTER * len(one.arm), y) for one, y in zip(ends, heights, strict=True)]
    for one, y, height in zip(ends, heights, spread(labels), strict=True):
        ours = one.arm.startswith("tierkv")
        colour = COLOURS.get(one.arm, PEER)
        axes.annotate(
            one.arm, (one.context, one.ms_per_token), (12, height - y), textcoords="offset points", ha="left",
            va="center", fontsize=9, color=colour, weight="bold" if ours else "normal", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.5, "relpos": (0, 0.5)},
        )  # fmt: skip
