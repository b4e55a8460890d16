"""The demo's figures are counted from answers, steps and pages, by arithmetic that can be done by hand."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tierkv.protocol import Audit
from tierkv.study.arms import ARMS, EpisodeResult, TierUse, ms_per_token
from tierkv.study.episodes import PROBED, Probe
from tierkv.study.probe import Answer, Replay
from tierkv.study.report import (
    ArmReport,
    AttentionRecall,
    DemoReport,
    TierReport,
    arm_reports,
    attention_recall,
    render,
    tier_reports,
)


def result(
    arm: str, right: int, steps: tuple[float, ...] = (0.05,), tiers: TierUse | None = None
) -> EpisodeResult:
    """The first `right` of the four probes are answered."""
    answers = [Answer(Probe(region, "", "x"), "", i < right, [0.1]) for i, region in enumerate(PROBED)]
    return EpisodeResult("some", arm, Replay(1.0, list(steps)), answers, tiers)


def use(pages: int) -> TierUse:
    return TierUse(
        {"hbm": pages, "quantized": 2 * pages, "host": 0}, {"hbm": 10 * pages, "quantized": pages, "host": 7}
    )


def test_recall_is_counted_for_each_arm_and_region():
    reports = arm_reports([result("full", 4), result("full", 2), result("tiered", 1)])
    assert list(reports) == ["full", "tiered"]
    assert reports["full"].recall == 6 / 8
    assert reports["full"].by_region == {"system": 1.0, "user": 1.0, "tool_out": 0.5, "retrieval": 0.5}
    assert reports["tiered"].recall == 1 / 4


def test_time_a_token_is_the_median_step_of_bursts_and_answers():
    # Steps of 10, 20, 30 ms in the burst and four answers of one 100 ms step each.
    assert ms_per_token([result("full", 0, (0.01, 0.02, 0.03))]) == 100.0
    assert ms_per_token([result("full", 0, (0.01, 0.02, 0.03) * 3)]) == 30.0


def test_tiers_are_the_mean_over_episodes_of_the_tiered_arm_only():
    results = [
        result("tiered", 4, tiers=use(3)),
        result("tiered", 4, tiers=use(5)),
        result("drop", 0, tiers=use(99)),
    ]
    assert tier_reports(results) == {
        "hbm": TierReport(4, 40),
        "quantized": TierReport(8, 4),
        "host": TierReport(0, 7),
    }


def test_attention_recall_is_the_mean_of_each_tiered_arms_audits_and_the_oracle_is_the_tiered_arms():
    def audited(arm, *shares):
        audits = tuple(Audit(attended, oracle, 0.3, 0.3, 1) for attended, oracle in shares)
        return result(arm, 4)._replace(audits=audits)

    found = attention_recall(
        [
            audited("tiered", (0.9, 0.7), (0.7, 0.6)),
            audited("tiered", (0.8, 0.8)),
            audited("tiered_recall_off", (0.5, 0.1)),
        ]
    )
    assert found == AttentionRecall(
        tiered=pytest.approx(0.8),
        tiered_recall_off=0.5,
        oracle=pytest.approx(0.7),
        oracle_recall_off=0.1,
        audits=3,
    )
    assert attention_recall([result("full", 4)]) == AttentionRecall(0.0, 0.0, 0.0, 0.0, 0)


def test_the_screen_shows_every_arm_tier_and_figure_and_is_a_hundred_columns_wide():
    regions = {region.label: 0.25 for region in PROBED}
    arms = {arm: ArmReport(0.5, regions, 50.0 + i) for i, arm in enumerate(ARMS)}
    tiers = {"hbm": TierReport(6.5, 2**20)}
    recall = AttentionRecall(0.87, 0.61, 0.66, 0.63, 48)
    screen = io.StringIO()
    report = DemoReport(0.12, 1000, 1623, 6, arms, tiers, recall, 999, 998, 3, 12.0)
    Console(file=screen, width=100).print(render(report))
    text = screen.getvalue()
    assert max(len(line) for line in text.splitlines()) <= 100
    shown = [
        "full cache", "drop pages (MemDecay)", "quantize everything", "tierkv, recall off", "54",
        *(region.label for region in PROBED), "0.50", "100%", "12%",
        "6.5", "1.00 MiB", "1,623", "12 s", "0.87", "0.61", "0.66", "0.63", "48 audits",
    ]  # fmt: skip
    for expected in shown:
        assert expected in text
