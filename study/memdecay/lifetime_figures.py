"""Figures of the calibration: what was measured with its fits, the decay curves that follow, and the ema sweep."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tierkv.daemon import policy
from tierkv.daemon.policy.decay import BASE
from tierkv.regions import Region
from tierkv.study.memdecay import ema_sweep
from tierkv.study.memdecay.lifetimes import BOTH, Fit, Points, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    Region.SYSTEM: "#343a40",
    Region.PLAN: "#0b7285",
    Region.USER: "#e8590c",
    Region.TOOL_IN: "#bfa004",
    Region.TOOL_OUT: "#2b8a3e",
    Region.RETRIEVAL: "#7048e8",
    Region.SCRATCHPAD: "#d6336c",
}
MOST_STEPS = 120
"""Of the decay curves: a little more than the oldest token that was observed."""

BIN_STEPS = 4
"""Ages that a point of the measured figure takes together."""


def draw_measured(report: Report, file: Path) -> None:
    """Mean mass by age with fitted lines, a panel a region, the tiers in two tones (the paper's Fig. 3)."""
    tiers = [tier for tier in dict.fromkeys(one.tier for one in report.fits) if tier != BOTH]
    with _figure(file, (12.0, 5.6)) as figure:
        panels = figure.subplots(2, 4, sharex=True, sharey=True).flat
        for panel, region in zip(panels, Region, strict=False):
            lives: list[str] = []
            for tier in tiers:
                measured = next((p for p in report.points if (p.row, p.tier) == (region.label, tier)), None)
                fitted = next((f for f in report.fits if (f.row, f.tier) == (region.label, tier)), None)
                if measured is not None and fitted is not None:
                    _measured(panel, measured, fitted, COLOURS[region], first=tier == tiers[0])
                    lives.append("none" if fitted.half_life is None else f"{fitted.half_life:,.0f}")
            panel.set_title(region.label, fontsize=10, loc="left", color=COLOURS[region])
            panel.set_title(", ".join(lives), fontsize=9, loc="right", color="#495057")
            panel.set_yscale("log")
            _quiet(panel)
        key = panels[len(Region)]
        key.axis("off")
        for i, tier in enumerate(tiers):
            key.plot(
                [], [], "o-", color="#495057", alpha=1 if i == 0 else 0.45, label=f"{tier} tier", markersize=4
            )
        key.fill_between([], [], color="#495057", alpha=0.15, label="95% interval of the rate")
        key.legend(
            loc="center left", frameon=False, fontsize=9, title=f"right of a title: half-lives, {', '.join(tiers)}",
            title_fontsize=9, alignment="left",
        )  # fmt: skip
        figure.supxlabel("age, decode steps since insertion", fontsize=10)
        figure.supylabel("mean attention mass of a token", fontsize=10)


def _measured(panel: Axes, measured: Points, fitted: Fit, colour: str, first: bool) -> None:
    alpha = 1.0 if first else 0.45
    ages, weights = np.array(measured.ages), np.array(measured.observations)
    bins = ages // BIN_STEPS
    share = [(weights * (bins == b) / weights[bins == b].sum()) for b in np.unique(bins)]
    x, y = [float(s @ ages) for s in share], [float(s @ np.array(measured.mass)) for s in share]
    panel.plot(x, y, "o", color=colour, alpha=alpha, markersize=3.2, markeredgewidth=0)
    span = np.linspace(ages.min(), ages.max(), 60)
    pivot = float((weights * ages).sum() / weights.sum())  # where a fit's rate does not move its line
    height = fitted.level[0] * math.exp(-fitted.rate * pivot)
    lines = [
        height * np.exp(-rate * (span - pivot)) for rate in (fitted.rate, fitted.rate_low, fitted.rate_high)
    ]
    panel.plot(span, lines[0], color=colour, alpha=alpha, linewidth=1.5)
    panel.fill_between(
        span, np.minimum(*lines[1:]), np.maximum(*lines[1:]), color=colour, alpha=0.15, linewidth=0
    )


def draw_curves(report: Report, file: Path) -> None:
    """b exp(-lambda dt) by region, with the half-lives of the policy file, beside the paper's 3B (its Fig. 2)."""
    ours = report.policies["memdecay-all.toml"]
    half_lives = _half_lives(ours)
    usual = policy.get("memdecay")
    paper = getattr(usual, "half_life")  # noqa: B009  # of this policy alone
    steps = np.linspace(0, MOST_STEPS, 200)
    with _figure(file, (9.6, 4.0)) as figure:
        panels: Sequence[Axes] = figure.subplots(1, 2, sharey=True)
        for panel, lives, title in (
            (panels[0], half_lives, f"fitted here ({report.model})"),
            (panels[1], paper, "the paper's (Qwen2.5-3B, long)"),
        ):
            for region in Region:
                curve = BASE[region] * np.exp(-math.log(2) / lives[region] * steps)
                panel.plot(steps, curve, color=COLOURS[region], linewidth=1.8, label=region.label)
            panel.set_title(title, fontsize=10, loc="left")
            panel.set_xlabel("age, decode steps")
            panel.set_xlim(0, MOST_STEPS)
            panel.set_ylim(0, 1.05)
            _quiet(panel)
        panels[0].set_ylabel("structural score  b exp(-λ dt)")
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9
        )


def _half_lives(toml: str) -> dict[Region, float]:
    import tomllib

    return {Region[name.upper()]: float(value) for name, value in tomllib.loads(toml)["half_life"].items()}


def draw_sweep(reports: Sequence[ema_sweep.Report], file: Path) -> None:
    """Heat maps of hit rates beyond the sinks, one for each report (how far ahead): the best pair ringed."""
    with _figure(file, (5.4 * len(reports), 4.2)) as figure:
        panels = figure.subplots(1, len(reports), squeeze=False)[0]
        for panel, report in zip(panels, reports, strict=True):
            rates = np.array(report.ema).mean(-1)
            shown = panel.imshow(rates, cmap="YlGnBu", aspect="auto", origin="lower")
            middle = (rates.min() + rates.max()) / 2
            for a, b in np.ndindex(rates.shape):
                tone = "white" if rates[a, b] > middle else "#343a40"
                panel.text(b, a, f"{rates[a, b]:.3f}"[1:], ha="center", va="center", fontsize=7.5, color=tone)
            best = report.alphas.index(report.best.alpha), report.betas.index(report.best.beta)
            usual = report.alphas.index(report.default.alpha), report.betas.index(report.default.beta)
            for (a, b), colour in ((best, "#e8590c"), (usual, "#868e96")):
                panel.plot(
                    b,
                    a,
                    "s",
                    markersize=26,
                    markerfacecolor="none",
                    markeredgecolor=colour,
                    markeredgewidth=2,
                )
            panel.set_xticks(range(len(report.betas)), [f"{beta:g}" for beta in report.betas], fontsize=8)
            panel.set_yticks(range(len(report.alphas)), [f"{alpha:g}" for alpha in report.alphas], fontsize=8)
            panel.set_xlabel("beta (forgetting, per step)")
            when = "the next step" if report.ahead == 1 else f"{report.ahead} steps later"
            panel.set_title(f"attention of {when} on the hot set", fontsize=10, loc="left")
            panel.tick_params(length=0)
            for spine in panel.spines.values():
                spine.set_visible(False)
            figure.colorbar(shown, ax=panel, shrink=0.85, format="%.3f").outline.set_visible(False)
        panels[0].set_ylabel("alpha (weight of the newest observation)")
        figure.text(0.01, -0.03, "orange: best pair; grey: defaults", fontsize=8, color="#495057")


@contextmanager
def _figure(file: Path, size: tuple[float, float]) -> Iterator[Figure]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110, bbox_inches="tight")


def _quiet(panel: Axes) -> None:
    panel.grid(axis="y", color="#dee2e6", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8)
