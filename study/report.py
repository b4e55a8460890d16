"""What the demo found: the contents of `demo.json`, and the tables that people read."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tierkv.study.arms import ARMS, TIERS, EpisodeResult, TierUse, ms_per_token
from tierkv.study.episodes import PROBED
from tierkv.study.probe import recall


class ArmReport(msgspec.Struct):
    """`recall` and `by_region` are fractions of probes; `ms_per_token` is the median decode step."""

    recall: float
    by_region: dict[str, float]
    ms_per_token: float


class TierReport(msgspec.Struct):
    """Mean over the episodes, at the end of the tiered arm's replay."""

    pages: float
    bytes: float


class DemoReport(msgspec.Struct):
    """`context_tokens` is the shortest episode's; `pool_bytes` is `budget_fraction` of its exact KV bytes, for all.

    `hbm_bytes_peak` and `recalled_pages` are the daemon's own, over drop and tiered arm together.
    """

    budget_fraction: float
    pool_bytes: int
    context_tokens: int
    episodes: int
    arms: dict[str, ArmReport]
    tiers: dict[str, TierReport]
    hbm_bytes_peak: int
    recalled_pages: int
    seconds: float


def arm_reports(results: Sequence[EpisodeResult]) -> dict[str, ArmReport]:
    reports = {}
    for arm in ARMS:
        own = [result for result in results if result.arm == arm]
        if own:
            found = recall(answer for result in own for answer in result.answers)
            reports[arm] = ArmReport(found.total, found.by_region, ms_per_token(own))
    return reports


def tier_reports(results: Sequence[EpisodeResult]) -> dict[str, TierReport]:
    uses: list[TierUse] = [r.tiers for r in results if r.arm == "tiered" and r.tiers is not None]
    return {
        tier: TierReport(
            statistics.mean(u.pages[tier] for u in uses), statistics.mean(u.bytes[tier] for u in uses)
        )
        for tier in TIERS
    }


def render(report: DemoReport) -> Group:
    """Recall by region and arm, then where the tiered arm's pages were."""
    share = f"{report.budget_fraction:.0%}"
    arms = Table(
        title=f"Recall of facts, {report.episodes} episodes of {report.context_tokens:,} tokens or more"
    )
    arms.add_column("arm")
    for region in PROBED:
        arms.add_column(region.label, justify="right")
    arms.add_column("all", justify="right", style="bold")
    arms.add_column("ms/token", justify="right")
    arms.add_column("HBM", justify="right")
    for name, arm in report.arms.items():
        cells = [f"{arm.by_region[region.label]:.2f}" for region in PROBED]
        arms.add_row(
            name, *cells, f"{arm.recall:.2f}", f"{arm.ms_per_token:.0f}", "100%" if name == "full" else share
        )

    tiers = Table(title="Where the tiered arm keeps an episode (mean over episodes, after the last token)")
    for column in ("tier", "pages read there", "replicas"):
        tiers.add_column(column, justify="left" if column == "tier" else "right")
    for name, tier in report.tiers.items():
        tiers.add_row(name, f"{tier.pages:.1f}", f"{tier.bytes / 2**20:.2f} MiB")

    lines = [
        f"HBM pool {report.pool_bytes:,} bytes, peak use {report.hbm_bytes_peak:,}; "
        f"pages recalled from host: {report.recalled_pages}",
        "host replicas include backups of pages that attention reads in HBM",
        f"{report.seconds:.0f} s in all",
    ]
    return Group(arms, tiers, *(Text(line, style="dim") for line in lines))
