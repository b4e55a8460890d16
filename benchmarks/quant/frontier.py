"""The picture: bits a value against KL, and the line that nothing measured is below and left of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.benchmarks.quant.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, PEER, LINE, INK, FAINT = "#0b7285", "#868e96", "#e8590c", "#212529", "#495057"
MOST_BITS = 9.0
"""Forms with more bits are named below the picture and not drawn."""

LABEL_WIDTH, LABEL_HEIGHT = 110.0, 13.0
"""Points that a label takes: two that are closer are moved apart."""

DPI = 160


def pareto(records: Sequence[Record]) -> list[Record]:
    """Those that no other one matches or beats in both bits and KL, by bits."""
    best: list[Record] = []
    for one in sorted(records, key=lambda record: (record.bits_per_value, record.kl)):
        if not best or one.kl < best[-1].kl:
            best.append(one)
    return best


def spread(places: Sequence[tuple[float, float]]) -> list[float]:
    """Heights of labels that start at these places (points), moved up from those that they would cover."""
    heights = [y for _, y in places]
    settled: list[int] = []
    for index in sorted(range(len(places)), key=lambda i: places[i][1]):
        near = sorted(heights[i] for i in settled if abs(places[i][0] - places[index][0]) < LABEL_WIDTH)
        for height in near:
            if abs(heights[index] - height) < LABEL_HEIGHT:
                heights[index] = height + LABEL_HEIGHT
        settled.append(index)
    return heights


def draw(records: Sequence[Record], file: Path) -> None:
    """A PNG. Raises `IndexError` without any record."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run = records[0].run
    drawn = [one for one in records if one.bits_per_value <= MOST_BITS and one.kl > 0]
    figure = Figure(figsize=(9.2, 5.8))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.085, right=0.975, top=0.83, bottom=0.145)
    figure.text(0.085, 0.94, "What low-bit K/V costs a model", fontsize=15, weight="bold", color=INK)
    figure.text(
        0.085, 0.883,
        f"{run.model}, {len(run.inputs)} inputs of {max(run.context):,} cached tokens, all but the first {run.sinks} "
        f"and last {run.recent} packed; the next {run.forced} tokens\ncompared with those over the exact cache. Bars: 95% "
        "interval over inputs. Lower and further left is better.",
        fontsize=9, color=FAINT, va="center", linespacing=1.4,
    )  # fmt: skip
    if drawn:
        _points(figure.add_subplot(), drawn)
    if left_out := [one for one in records if one not in drawn]:
        names = ", ".join(f"{one.codec} ({one.bits_per_value:.1f} bits, KL {one.kl:.1g})" for one in left_out)
        figure.text(0.085, 0.02, f"Not drawn: {names}", fontsize=8, color=FAINT)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=DPI)


def _points(axes: Axes, drawn: Sequence[Record]) -> None:
    bits = [one.bits_per_value for one in drawn]
    low = min(max(one.kl_low, one.kl / 10) for one in drawn)
    axes.set_yscale("log")
    axes.set_ylim(low / 1.5, 1.8 * max(one.kl_high for one in drawn))
    axes.set_xlim(min(bits) - 0.25, max(bits) + 0.3 + 0.12 * (max(bits) - min(bits)))
    _line(axes, pareto(drawn))
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
    _labels(axes, drawn)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
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
    """The frontier as steps, from the picture's top to its right edge; what is better lies on its other side."""
    x = [best[0].bits_per_value, *(one.bits_per_value for one in best), axes.get_xlim()[1]]
    y = [axes.get_ylim()[1], *(one.kl for one in best), best[-1].kl]
    axes.step(x, y, where="post", color=LINE, linewidth=1.4, alpha=0.8, zorder=1, label="best measured")
    axes.fill_between(x, y, axes.get_ylim()[0], step="post", color=LINE, alpha=0.04, linewidth=0, zorder=0)


def _labels(axes: Axes, drawn: Sequence[Record]) -> None:
    points = [axes.transData.transform((one.bits_per_value, one.kl)) for one in drawn]
    scale = 72 / axes.figure.dpi  # points a pixel
    places = [(float(x) * scale, float(y) * scale) for x, y in points]
    for one, (_, y), height in zip(drawn, places, spread(places), strict=True):
        axes.annotate(
            one.codec, (one.bits_per_value, one.kl), (10, height - y), textcoords="offset points", va="center",
            fontsize=9.5, color=PEER if one.peer else OURS, weight="normal" if one.peer else "bold", zorder=4,
        )  # fmt: skip
