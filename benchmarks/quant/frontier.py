"""The picture: bits a value against KL, and the line that nothing measured is below and left of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.benchmarks.quant.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, PEER, LINE, INK = "#0b7285", "#868e96", "#e8590c", "#212529"
MOST_BITS = 9.0
"""Forms with more bits are named below the picture and not drawn."""


def pareto(records: Sequence[Record]) -> list[Record]:
    """Those that no other one matches or beats in both bits and KL, by bits."""
    best: list[Record] = []
    for one in sorted(records, key=lambda record: (record.bits_per_value, record.kl)):
        if not best or one.kl < best[-1].kl:
            best.append(one)
    return best


def draw(records: Sequence[Record], file: Path) -> None:
    """A PNG. Raises `IndexError` without any record."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run = records[0].run
    drawn = [one for one in records if one.bits_per_value <= MOST_BITS and one.kl > 0]
    figure = Figure(figsize=(9.2, 5.8))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.09, right=0.97, top=0.84, bottom=0.17)
    axes = figure.add_subplot()
    _points(axes, drawn)
    tokens = f"{max(run.context):,}"
    figure.text(0.09, 0.945, "Bits a value against what they lose", fontsize=15, weight="bold", color=INK)
    figure.text(
        0.09, 0.885,
        f"{run.model}, {len(run.inputs)} inputs of {tokens} cached tokens, the first {run.sinks} and last {run.recent} "
        f"exact; {run.forced} next tokens\nagainst the exact cache. Bars: 95% over inputs. Lower and further left is "
        "better.",
        fontsize=9, color="#495057", va="center",
    )  # fmt: skip
    left_out = [one for one in records if one not in drawn]
    if left_out:
        names = ", ".join(f"{one.codec} ({one.bits_per_value:.1f} bits, KL {one.kl:.1g})" for one in left_out)
        figure.text(0.09, 0.03, f"Not drawn: {names}", fontsize=8, color="#495057")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=160)


def _points(axes: Axes, drawn: Sequence[Record]) -> None:
    line = pareto(drawn)
    axes.set_yscale("log")
    axes.step(
        [one.bits_per_value for one in line], [one.kl for one in line], where="post", color=LINE, linewidth=1.6,
        alpha=0.75, zorder=1, label="best measured",
    )  # fmt: skip
    for peer, colour, marker, label in ((False, OURS, "o", "tierkv"), (True, PEER, "D", "peers")):
        shown = [one for one in drawn if one.peer == peer]
        if not shown:
            continue
        axes.errorbar(
            [one.bits_per_value for one in shown],
            [one.kl for one in shown],
            [[one.kl - one.kl_low for one in shown], [one.kl_high - one.kl for one in shown]],
            fmt=marker, color=colour, markersize=8, markerfacecolor="white" if peer else colour, markeredgewidth=1.6,
            elinewidth=1.2, capsize=3, linestyle="none", label=label, zorder=3,
        )  # fmt: skip
    for one in drawn:
        axes.annotate(
            one.codec, (one.bits_per_value, one.kl), (9, 0), textcoords="offset points", va="center", fontsize=9.5,
            color=PEER if one.peer else OURS, weight="normal" if one.peer else "bold",
        )  # fmt: skip
    bits = [one.bits_per_value for one in drawn]
    axes.set_xlim(min(bits) - 0.3, max(bits) + 0.8)
    axes.set_xlabel("bits a value, all metadata counted")
    axes.set_ylabel("KL(exact || packed), nats a token")
    axes.grid(color="#dee2e6", linewidth=0.6, which="major")
    axes.grid(color="#f1f3f5", linewidth=0.5, which="minor")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right", fontsize=9)
