"""Recall against budget, a panel a tier: what each way of keeping an agent's memory still knows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.study.memdecay.statistics import Cell
from tierkv.study.memdecay.tables import ORDER, StudyTables

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "tiered": "#0b7285",
    "tiered-low-bit": "#3b93a3",
    "tiered-digests": "#66b2bf",
    "memdecay-lift-prompts": "#a33a00",
    "memdecay-lift": "#e8590c",
    "h2o-prompts": "#a78bfa",
    "memdecay": "#f4a259",
    "h2o": "#7048e8",
    "random": "#868e96",
    "streaming": "#adb5bd",
    "tova": "#d6336c",
    "snapkv": "#2b8a3e",
    "ema": "#bfa004",
}


def draw(tables: StudyTables, file: Path) -> None:
    """Non-system recall with its intervals; the full cache as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tiers = list(dict.fromkeys(cell.tier for cell in tables.cells))
    figure = Figure(figsize=(5.6 * len(tiers), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(tiers), sharey=True, squeeze=False)[0]
    for panel, tier in zip(panels, tiers, strict=True):
        _panel(panel, tier, [cell for cell in tables.cells if cell.tier == tier])
    panels[0].set_ylabel("facts recalled (without the pinned system region)")
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def _panel(panel: Axes, tier: str, cells: list[Cell]) -> None:
    budgets = sorted({cell.budget for cell in cells if cell.policy != "full"})
    place = {budget: i for i, budget in enumerate(budgets)}
    policies = [name for name in reversed(ORDER) if name != "full" and any(c.policy == name for c in cells)]
    for i, name in enumerate(policies):
        shown = sorted((c for c in cells if c.policy == name), key=lambda c: c.budget)
        shift = (i - (len(policies) - 1) / 2) * 0.05
        at = [place[c.budget] + shift for c in shown]
        value = [c.non_system for c in shown]
        error = [
            [max(0.0, c.non_system - c.non_system_low) for c in shown],
            [max(0.0, c.non_system_high - c.non_system) for c in shown],
        ]
        ours = name.startswith(("tiered", "memdecay-lift"))
        panel.errorbar(
            at, value, error, label=name, color=COLOURS[name], marker="o", markersize=6 if ours else 4.5,
            linestyle="-" if ours else ":", linewidth=1.8 if ours else 1, elinewidth=1, capsize=2,
        )  # fmt: skip
    full = next((c.non_system for c in cells if c.policy == "full"), None)
    if full is not None:
        panel.axhline(full, color="#212529", linewidth=1, label="full cache")
    panel.set_xticks(range(len(budgets)), [f"{budget:.0%}" for budget in budgets])
    panel.set_xlabel("budget (tokens; of the tiered arms: HBM bytes)")
    panel.set_title(f"{tier} tier", fontsize=11)
    panel.set_ylim(-0.03, 1.05)
    panel.grid(axis="y", color="#dee2e6", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
