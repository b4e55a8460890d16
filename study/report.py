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


class AttentionRecall(msgspec.Struct):
    """Which share of a query's attention over all pages falls on those that it attends; means over audits.

    `oracle` is the share that the tiered arm's HBM would have got with the best choice of low-bit pages, by true
    attention: the same bytes. Pages read in place, from host memory, are no part of it, so `tiered` may be larger.
    `oracle_recall_off` is that of the other arm, whose queries differ: it read its prompt without cold pages.
    An audit is of the last query of a question or of a decode step of its answer; `audits` counts the tiered arm's.
    """

    tiered: float
    tiered_recall_off: float
    oracle: float
    oracle_recall_off: float
    audits: int


class DemoReport(msgspec.Struct):
    """`context_tokens` is the shortest episode's; `pool_bytes` is `budget_fraction` of its exact KV bytes, for all.

    `hbm_bytes_peak` and `recalled_pages` are the daemon's own, over drop and tiered arms together;
    `quantized_bytes_peak` is what the quantized arm held at most.
    """

    budget_fraction: float
    pool_bytes: int
    context_tokens: int
    episodes: int
    arms: dict[str, ArmReport]
    tiers: dict[str, TierReport]
    attention_recall: AttentionRecall
    hbm_bytes_peak: int
    quantized_bytes_peak: int
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
        tier: TierReport(_mean([use.pages[tier] for use in uses]), _mean([use.bytes[tier] for use in uses]))
        for tier in TIERS
    }


def attention_recall(results: Sequence[EpisodeResult]) -> AttentionRecall:
    """Zeros for an arm without audits."""
    tiered = [audit for result in results if result.arm == "tiered" for audit in result.audits]
    off = [audit for result in results if result.arm == "tiered_recall_off" for audit in result.audits]
    return AttentionRecall(
        _mean([audit.attended for audit in tiered]),
        _mean([audit.attended for audit in off]),
        _mean([audit.oracle for audit in tiered]),
        _mean([audit.oracle for audit in off]),
        len(tiered),
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values) if values else 0.0


SAID = {
    "full": "full cache",
    "drop": "drop pages (MemDecay)",
    "quantized": "quantize everything",
    "tiered_recall_off": "tierkv, recall off",
    "tiered": "tierkv",
}
"""Arm: its name in the table."""


def render(report: DemoReport) -> Group:
    """Recall by region and arm, then where the tiered arm's pages were and how much of attention they got."""
    share = f"{report.budget_fraction:.0%}"
    arms = Table(
        title=f"Facts recalled, {report.episodes} episodes of {report.context_tokens:,} tokens or more"
    )
    arms.add_column("arm")
    arms.add_column("HBM", justify="right")
    for region in PROBED:
        arms.add_column(region.label, justify="right")
    arms.add_column("all", justify="right", style="bold")
    arms.add_column("ms/token", justify="right")
    for name, arm in report.arms.items():
        cells = [f"{arm.by_region[region.label]:.2f}" for region in PROBED]
        memory = "100%" if name == "full" else share
        arms.add_row(SAID[name], memory, *cells, f"{arm.recall:.2f}", f"{arm.ms_per_token:.0f}")

    tiers = Table(title="Where tierkv keeps an episode")
    for column in ("tier", "pages read there", "replicas"):
        tiers.add_column(column, justify="left" if column == "tier" else "right")
    for name, tier in report.tiers.items():
        tiers.add_row(name, f"{tier.pages:.1f}", f"{tier.bytes / 2**20:.2f} MiB")

    recall = report.attention_recall
    told = [
        f"Attention that falls on attended pages: tierkv {recall.tiered:.2f}, recall off "
        f"{recall.tiered_recall_off:.2f} ({recall.audits} audits)",
        f"The best pages in the same bytes, by true attention: {recall.oracle:.2f} and "
        f"{recall.oracle_recall_off:.2f}",
    ]
    lines = [
        "tierkv also reads pages in place, from host memory; the best pages are those in HBM only",
        "tiers: mean over episodes, after the last token; host holds copies of pages in HBM as well",
        "quantize everything: its pages are decoded beforehand, so its ms/token is a full cache's",
        f"HBM pool {report.pool_bytes:,} bytes; peak {report.hbm_bytes_peak:,}, quantize everything "
        f"{report.quantized_bytes_peak:,}",
        f"{report.recalled_pages:,} pages came back from host; {report.seconds:.0f} s in all",
    ]
    return Group(arms, tiers, *(Text(line) for line in told), *(Text(line, style="dim") for line in lines))
