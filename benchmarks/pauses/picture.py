"""The picture: resumes that find their working set, by what callers tell, and by tool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tierkv.benchmarks.pauses.records import Record
from tierkv.benchmarks.quant.frontier import DPI, FAINT, INK, LINE, OURS, PEER

TARGET = 0.9
LABELS = {
    "off": "no hints",
    "predicted": "no hints,\npredicted",
    "tool": "tool's name,\nlearned",
    "wrong": "durations,\nwrong ($\\sigma$ .5)",
    "exact": "durations",
}


def draw(records: Sequence[Record], file: Path) -> None:
    """A PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    own = [record for record in records if record.room == "low-bit"]
    figure = Figure(figsize=(10.5, 5.2))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.07, right=0.98, top=0.82, bottom=0.15, wspace=0.16)
    title = "64 sessions, HBM for 16: who finds its working set when its tool is done?"
    figure.text(0.07, 0.92, title, fontsize=15, weight="bold", color=INK)
    arms, tools = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1.2, 1)})
    places = range(len(own))
    colors = [PEER if one.arm in ("off", "predicted") else OURS for one in own]
    for place, one, color in zip(places, own, colors, strict=True):
        arms.bar(place, one.ready, 0.62, color=color)
        top = (place, max(one.ready, one.bound or 0.0))
        arms.annotate(f"{one.ready:.0%}", top, (0, 4), textcoords="offset points", ha="center", color=INK)
        if one.bound is not None:
            arms.plot([place - 0.31, place + 0.31], [one.bound] * 2, color=INK, linewidth=1.5)
    arms.axhline(TARGET, color=LINE, linewidth=1, linestyle="--")
    arms.set_xticks(list(places), [LABELS[one.arm] for one in own], fontsize=8)
    arms.set_title(
        "resumes that are ready (black: the best that moves in no time could do)", fontsize=9, color=FAINT
    )
    for one, color in zip(own, (PEER, "#adb5bd", "#66a5ad", LINE, OURS), strict=False):
        names = list(one.by_tool)
        tools.plot(names, [one.by_tool[name] for name in names], "o-", color=color, label=one.arm)
    tools.axhline(TARGET, color=LINE, linewidth=1, linestyle="--")
    tools.set_title("the same by tool (medians of 4, 15, 45 and 120 s)", fontsize=9, color=FAINT)
    tools.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 0.12))
    for axes in (arms, tools):
        axes.set_ylim(0, 1.08)
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=DPI)
