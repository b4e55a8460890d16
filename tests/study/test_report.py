"""The demo's figures are counted from answers, steps and pages, by arithmetic that can be done by hand."""

from __future__ import annotations

import io

from rich.console import Console

from tierkv.regions import Region
from tierkv.study.arms import EpisodeResult, TierUse, ms_per_token
from tierkv.study.episodes import PROBED, Probe
from tierkv.study.probe import Answer, Replay
from tierkv.study.report import ArmReport, DemoReport, TierReport, arm_reports, render, tier_reports


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


def test_the_table_names_every_arm_and_tier():
    regions = {region.label: 0.25 for region in PROBED}
    arms = {"full": ArmReport(1.0, regions, 50.0), "drop": ArmReport(0.25, regions, 60.0)}
    report = DemoReport(0.25, 1000, 1623, 6, arms, {"hbm": TierReport(6.5, 2**20)}, 999, 3, 12.0)
    screen = io.StringIO()
    console = Console(file=screen, width=120)
    console.print(render(report))
    text = screen.getvalue()
    for expected in (
        "full",
        "drop",
        Region.TOOL_OUT.label,
        "1.00",
        "25%",
        "6.5",
        "1.00 MiB",
        "1,623",
        "12 s",
    ):
        assert expected in text
