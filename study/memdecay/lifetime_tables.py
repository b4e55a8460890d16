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


def render(report: Report) -> Group:
    """Half-lives in decode steps, with 95% intervals; "none" does not decay."""
    what = f"{report.model}, {report.episodes} episodes of {len(report.scenarios)} scenarios"
    tiers = list(dict.fromkeys(one.tier for one in report.fits))
    main = _table(f"Half-lives in decode steps, final burst of 48 ({what})")
    main.add_column("region")
    for column in PAPER_TABLE:
        main.add_column(f"paper {column}", justify="right", style="dim")
    for tier in tiers:
        main.add_column(tier, justify="right")
        main.add_column("R2", justify="right")
    for row in ROWS:
        paper = [
            _bounds(*map(float, theirs[row])) if row in theirs else "" for theirs in PAPER_TABLE.values()
        ]
        ours: list[str] = []
        for tier in tiers:
            found = _find(report.fits, row, tier)
            ours += (
                ["", ""]
                if found is None
                else [_bounds(found.half_life, found.low, found.high), f"{found.r2:.2f}"]
            )
        if any(ours):
            main.add_row(row, *map(escape, (*paper, *ours)))  # an interval is no markup

    scope = BOTH if BOTH in tiers else tiers[0]
    ways = _table(f"The same, fitted otherwise ({scope})")
    columns = ("region", "48 steps", "a scenario left out", "8 steps", "8 : 48", "all bursts", "all, A |K|")
    for column in columns:
        ways.add_column(column, justify="left" if column == "region" else "right")
    for row in ROWS:
        usual, short = _find(report.fits, row, scope), _find(report.eviction_burst, row, scope)
        every = _find(report.every_burst, row, scope)
        relative = _find(report.every_burst_relative, row, scope)
        if usual is not None:
            left_out = f"{_steps(usual.left_out_low)} to {_steps(usual.left_out_high)}"
            ways.add_row(
                row,
                _steps(usual.half_life),
                left_out,
                _of(short),
                ratio(short, usual),
                _of(every),
                _of(relative),
            )
    lines = [
        "none: the rate is not above 0. R2 is weighted; of both tiers, of what varies inside a tier",
        f"{BEYOND_SINKS}: without the first 16 tokens; policy files take it for the system region",
        "8 steps: after so short a final burst the paper evicts, by rates fitted on 48",
        "all bursts: of every stage; A |K|: mass relative to the uniform level, which a growing context does not thin",
        f"order of regions, Spearman with the paper's columns: {_said(report.order.get(scope, {}))}; "
        f"all bursts: {_said(report.order_every_burst.get(scope, {}))}",
    ]
    return Group(main, ways, *(Text(line, style="dim") for line in lines))


def ratio(short: Fit | None, usual: Fit) -> str:
    if short is None or short.half_life is None or usual.half_life is None:
        return ""
    return f"{short.half_life / usual.half_life:.2f}"


def _table(title: str) -> Table:
    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")


def _find(fits: Iterable[Fit], row: str, tier: str) -> Fit | None:
    return next((one for one in fits if (one.row, one.tier) == (row, tier)), None)


def _of(found: Fit | None) -> str:
    return "" if found is None else _steps(found.half_life)


def _steps(half_life: float | None) -> str:
    return "none" if half_life is None else f"{half_life:,.0f}"


def _bounds(value: float | None, low: float | None, high: float | None) -> str:
    return f"{_steps(value)} [{_steps(low)}, {_steps(high)}]"


def _said(order: dict[str, float]) -> str:
    return ", ".join(f"{value:.2f} ({column})" for column, value in order.items())
