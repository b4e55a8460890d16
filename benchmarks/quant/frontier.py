"""The picture: bits a value against KL, and the line that nothing measured is below and left of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tierkv.benchmarks.quant.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, PEER, LINE, INK, FAINT = "#0b7285", "#868e96", "#e8590c", "#212529", "#495057"
MOST_BITS = 9.0
"""Forms with more bits are named below the picture and not drawn."""

CHARACTER, LINE_HEIGHT = 6.2, 12.0
"""Points that a character of a label takes, and a label's height."""

LEFT = 0.105
"""Where the axes begin, as a part of the width: labels of KL such as 0.005, and what they are, fit before it."""

TICKS = (2, 2.25, 2.5, 2.75, 3, 3.5, 4, 5, 6, 8)
DPI = 160


def pareto(records: Sequence[Record]) -> list[Record]:
    """Those that no other one matches or beats in both bits and KL, by bits."""
    best: list[Record] = []
    for one in sorted(records, key=lambda record: (record.bits_per_value, record.kl)):
        if not best or one.kl < best[-1].kl:
            best.append(one)
    return best


class Label(NamedTuple):
    """From `start` to `stop` on a line at `height`; points."""

    start: float
    stop: float
    height: float


def spread(labels: Sequence[Label]) -> list[float]:
    """Heights at which no label covers another: the lowest stay, the others move up as far as they must."""
    heights = [label.height for label in labels]
    settled: list[int] = []
    for index in sorted(range(len(labels)), key=lambda i: labels[i].height):
        mine = labels[index]
        for other in sorted(settled, key=heights.__getitem__):
            meet = mine.start < labels[other].stop and labels[other].start < mine.stop
            if meet and abs(heights[index] - heights[other]) < LINE_HEIGHT:
                heights[index] = heights[other] + LINE_HEIGHT
        settled.append(index)
    return heights


def draw(records: Sequence[Record], file: Path) -> None:
    """A PNG. Raises `IndexError` without any record."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run = records[0].run
    drawn = [one for one in records if one.bits_per_value <= MOST_BITS and one.kl > 0]
    figure = Figure(figsize=(9.2, 6.2))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=LEFT, right=0.975, top=0.83, bottom=0.145)
    figure.text(LEFT, 0.94, "What low-bit K/V costs a model", fontsize=15, weight="bold", color=INK)
    figure.text(
        LEFT, 0.883,
        f"{run.model}, {len(run.inputs)} inputs of {max(run.context):,} cached tokens, all but the first {run.sinks} "
        f"and last {run.recent} packed; the next {run.forced} tokens\ncompared with those over the exact cache. Bars: "
        "95% interval over inputs. Lower and further left is better.",
        fontsize=9, color=FAINT, va="center", linespacing=1.4,
    )  # fmt: skip
    if drawn:
        _points(figure.add_subplot(), drawn)
    if left_out := [one for one in records if one not in drawn]:
        names = ", ".join(f"{one.codec} ({one.bits_per_value:.1f} bits, KL {one.kl:.1g})" for one in left_out)
        figure.text(LEFT, 0.02, f"Not drawn: {names}", fontsize=8, color=FAINT)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=DPI)


def _points(axes: Axes, drawn: Sequence[Record]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    bits = [one.bits_per_value for one in drawn]
    low = min(max(one.kl_low, one.kl / 10) for one in drawn)
    axes.set_yscale("log")
    axes.set_ylim(low / 1.5, 2.5 * max(one.kl_high for one in drawn))
    axes.set_xscale("log")
    axes.set_xlim(min(bits) / 1.15, max(bits) * 1.15)
    axes.set_xticks([tick for tick in TICKS if min(bits) / 1.15 < tick < max(bits) * 1.15])
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    best = pareto(drawn)
    _line(axes, best)
    for peer, colour, marker, label in ((False, OURS, "o", "tierkv"), (True, PEER, "D", "peers")):
        shown = [one for one in drawn if one.peer == peer]
        if not shown:
            continue
        axes.errorbar(
            [one.bits_per_value for one in shown],
            [one.kl for one in shown],
            [
                [one.kl - max(one.kl_low, one.kl / 10) for one in shown],
                [one.kl_high - one.kl for one in shown],
            ],
            fmt=marker, color=colour, markersize=8, markerfacecolor="white" if peer else colour, markeredgewidth=1.6,
            elinewidth=1.2, capsize=3, linestyle="none", label=label, zorder=3,
        )  # fmt: skip
    _labels(axes, best, left=True)
    _labels(axes, [one for one in drawn if one not in best], left=False)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bits a value, all metadata counted", color=FAINT)
    axes.set_ylabel("KL(exact || packed), nats a token", color=FAINT)
    axes.tick_params(colors=FAINT, which="both")
    axes.grid(color="#dee2e6", linewidth=0.6, which="major")
    axes.grid(color="#f1f3f5", linewidth=0.5, which="minor", axis="y")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#adb5bd")
    axes.legend(frameon=False, loc="best", fontsize=9, labelcolor=FAINT)


def _line(axes: Axes, best: Sequence[Record]) -> None:
    """The frontier as steps, from the picture's top to its right edge."""
    x = [best[0].bits_per_value, *(one.bits_per_value for one in best), axes.get_xlim()[1]]
    y = [axes.get_ylim()[1], *(one.kl for one in best), best[-1].kl]
    axes.step(x, y, where="post", color=LINE, linewidth=1.2, alpha=0.7, zorder=1, label="best measured")


def _labels(axes: Axes, shown: Sequence[Record], left: bool) -> None:
    """Left of and below their points, where nothing is on the frontier's good side; or right of them."""
    from matplotlib.patheffects import withStroke

    points = [axes.transData.transform((one.bits_per_value, one.kl)) * 72 / axes.figure.dpi for one in shown]
    side = -1 if left else 1
    labels = []
    for one, (x, y) in zip(shown, points, strict=True):
        near, far = x + 8 * side, x + (8 + CHARACTER * len(one.codec)) * side
        labels.append(Label(min(near, far), max(near, far), y * side))
    for one, (_, y), height in zip(shown, points, spread(labels), strict=True):
        colour = PEER if one.peer else OURS
        shift = height * side - y - (3 if left else 0)
        axes.annotate(
            one.codec, (one.bits_per_value, one.kl), (8 * side, shift), textcoords="offset points",
            ha="right" if left else "left", va="top" if left else "center", fontsize=9.5, color=colour, zorder=4,
            weight="normal" if one.peer else "bold", path_effects=[withStroke(linewidth=2.5, foreground="white")],
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.4},
        )  # fmt: skip
