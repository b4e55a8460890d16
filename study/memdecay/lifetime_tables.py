"""Tables of the calibration: half-lives beside the paper's, and how far they depend on how they are fitted."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tierkv.study.memdecay.lifetimes import BEYOND_SINKS, BOTH, ROWS, Fit, Report
from tierkv.study.memdecay.paper_rates import PAPER_TABLE

NAMES = {BEYOND_SINKS: "  no sinks"}


def render(report: Report) -> Group:
    """Half-lives in decode steps, with 95% intervals; "none" does not decay."""
    what = f"{report.model}, {report.episodes} episodes of {len(report.scenarios)} scenarios"
    tiers = [tier for tier in dict.fromkeys(one.tier for one in report.fits) if tier != BOTH]
    main = _table(f"Half-lives in decode steps, final burst of 48\n{what}", "region", "paper")
    for tier in tiers:
        main.add_column(tier, justify="right", no_wrap=True)
        main.add_column("R2", justify="right", no_wrap=True)
    for row in ROWS:
        paper = " ".join(f"{column[row][0]:>4}" for column in PAPER_TABLE.values() if row in column)
        ours: list[str] = []
        for tier in tiers:
            found = _find(report.fits, row, tier)
            ours += ["", ""] if found is None else [_bounds(found), f"{found.r2:.2f}"]
        if any(ours):
            main.add_row(NAMES.get(row, row), paper, *map(escape, ours))  # an interval is no markup

    scope = BOTH if any(one.tier == BOTH for one in report.fits) else tiers[0]
    ways = _table(
        f"The same, fitted otherwise ({scope})",
        "region",
        "48 steps",
        "one out",
        "8 : 48",
        "all",
        "all, A |K|",
    )
    for row in ROWS:
        usual = _find(report.fits, row, scope)
        if usual is not None:
            ways.add_row(
                NAMES.get(row, row), escape(_bounds(usual)),
                f"{_steps(usual.left_out_low)} to {_steps(usual.left_out_high)}",
                ratio(_find(report.eviction_burst, row, scope), usual),
                _of(_find(report.every_burst, row, scope)), _of(_find(report.every_burst_relative, row, scope)),
            )  # fmt: skip
    notes = (
        f"paper: {', '.join(PAPER_TABLE)}. none: the rate is not above 0. R2 is weighted. no sinks: "
        "system without the first 16 tokens, which the policy files take. one out: least and most with a scenario left "
        "out. 8 : 48: after a final burst of 8, after which the paper evicts, to those of 48, which it fits. all: the "
        "bursts of every stage; A |K|: mass relative to the uniform level, which a growing context does not thin.",
        f"Spearman with the paper's order of regions: {_said(report.order.get(scope, {}))}; of all bursts: "
        f"{_said(report.order_every_burst.get(scope, {}))}",
    )
    return Group(main, ways, *(Text(note, style="dim") for note in notes))


def ratio(short: Fit | None, usual: Fit) -> str:
    if short is None or short.half_life is None or usual.half_life is None:
        return ""
    return f"{short.half_life / usual.half_life:.2f}"


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(
        title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", padding=(0, 1, 0, 0)
    )
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, style="dim" if column == "paper" else "")
    return table


def _find(fits: Iterable[Fit], row: str, tier: str) -> Fit | None:
    return next((one for one in fits if (one.row, one.tier) == (row, tier)), None)


def _of(found: Fit | None) -> str:
    return "" if found is None else _steps(found.half_life)


def _steps(half_life: float | None) -> str:
    return "none" if half_life is None else f"{half_life:,.0f}"


def _bounds(found: Fit) -> str:
    return f"{_steps(found.half_life)} [{_steps(found.low)}, {_steps(found.high)}]"


def _said(order: dict[str, float]) -> str:
    return ", ".join(f"{value:.2f} ({column})" for column, value in order.items())
