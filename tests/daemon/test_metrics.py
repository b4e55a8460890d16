"""Metrics: the design's names, zeros from the start, numbers of the snapshot, and nothing about single sessions."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tierkv.daemon.counters import Counters
from tierkv.daemon.loop_contract import NoMetrics
from tierkv.daemon.metrics import EMPTY, Metrics
from tierkv.daemon.snapshot import Snapshot
from tierkv.protocol import Audit
from tierkv.quant.quality import ErrorRatios

DESIGNED = {
    "tierkv_tier_bytes": {"tier"},
    "tierkv_tier_capacity_bytes": {"tier"},
    "tierkv_pages": {"tier", "region"},
    "tierkv_moved_pages_total": {"src", "dst", "reason"},
    "tierkv_moved_bytes_total": {"src", "dst"},
    "tierkv_move_seconds_count": {"src", "dst"},
    "tierkv_failed_moves_total": {"src", "dst", "reason"},
    "tierkv_dropped_pages_total": {"region", "reason"},
    "tierkv_request_seconds_count": {"op"},
    "tierkv_sessions": set(),
    "tierkv_workers": set(),
    "tierkv_backpressure_total": set(),
    "tierkv_epoch": set(),
    "tierkv_loop_ticks_total": set(),
    "tierkv_page_score_bucket": {"region", "le"},
    "tierkv_host_checksum_failures_total": set(),
    "tierkv_attention_recall_ratio_bucket": {"le"},
    "tierkv_needed_but_cold_pages_total": set(),
    "tierkv_recall_seconds_bucket": {"le"},
    "tierkv_quantization_error_ratio_bucket": {"codec", "side", "le"},
    "tierkv_prefetch_pages_total": {"outcome"},
    "tierkv_resumes_total": {"outcome", "known"},
    "tierkv_paused_sessions": set(),
}

LEDGER = {
    "tierkv_attention_recall_ratio": "_count",
    "tierkv_prefetch_pages_total": "",
    "tierkv_prefetch_wasted_ratio": "",
    "tierkv_needed_but_cold_pages_total": "",
    "tierkv_needed_but_cold_mass_ratio": "_count",
    "tierkv_expected_cold_mass_ratio": "_count",
    "tierkv_blocked_seconds_total": "",
    "tierkv_recall_seconds": "_count",
    "tierkv_ping_pong_pages_total": "",
}
"""Figures of recall, and what a histogram's are told by."""

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(metrics: Metrics) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_every_name_of_the_design_is_there_from_the_start_with_its_labels() -> None:
    found = samples(Metrics(3, lambda: None))
    for name, labels in DESIGNED.items():
        keys = [{label for label, _ in key} for sample, key in found if sample == name]
        assert keys, f"{name} is missing"
        assert all(key == labels for key in keys), name


@pytest.mark.parametrize(("name", "suffix"), LEDGER.items())
def test_every_figure_of_recall_is_exported_from_the_start_and_explained_in_the_guide(
    name: str, suffix: str
) -> None:
    found = samples(Metrics(3, lambda: None))
    assert {value for (sample, _), value in found.items() if sample == name + suffix} == {0.0}
    assert f"| `{name}" in (Path(__file__).parents[2] / "docs" / "guide.md").read_text()


def test_figures_of_recall_are_the_snapshots() -> None:
    counters = Counters(ping_pongs=3, blocked_seconds=1.5)
    counters.expected_mass.add(0.2)
    counters.audited(Audit(0.7, 0.9, 0.3, 0.2, 2))
    counters.prefetched["cancelled"] = 4
    now = replace(EMPTY, counters=counters, wasted_share=0.125)
    found = samples(Metrics(1, lambda: now))
    assert value(found, "tierkv_ping_pong_pages_total") == 3
    assert value(found, "tierkv_blocked_seconds_total") == 1.5
    assert value(found, "tierkv_expected_cold_mass_ratio_sum") == pytest.approx(0.2)
    assert value(found, "tierkv_needed_but_cold_mass_ratio_sum") == pytest.approx(0.3)
    assert value(found, "tierkv_prefetch_pages_total", outcome="cancelled") == 4
    assert value(found, "tierkv_prefetch_wasted_ratio") == 0.125


def test_audits_fill_the_histogram_of_attention_recall() -> None:
    counters = Counters()
    for share in (0.4, 0.85, 0.97, 1.0):
        counters.audited(Audit(share, 1.0, 1.0 - share, 0.0, 2))
    found = samples(Metrics(1, lambda: replace(EMPTY, counters=counters)))
    edges = {"0.5": 1, "0.8": 1, "0.85": 2, "0.95": 2, "0.98": 3, "1.0": 4, "+Inf": 4}
    assert {le: value(found, "tierkv_attention_recall_ratio_bucket", le=le) for le in edges} == edges
    assert value(found, "tierkv_attention_recall_ratio_sum") == pytest.approx(3.22)
    assert value(found, "tierkv_attention_recall_last_ratio") == 1.0
    assert value(found, "tierkv_needed_but_cold_pages_total") == 8


def test_measured_pages_fill_a_histogram_of_each_side_under_the_codecs_name() -> None:
    counters = Counters()
    for keys, values in ((0.004, 0.11), (0.006, 0.13), (1.5, 0.11)):
        counters.measured(ErrorRatios(keys, values))
    snapshot = replace(EMPTY, counters=counters)
    found = samples(Metrics(1, lambda: snapshot, "kivi2"))
    name, keys = "tierkv_quantization_error_ratio", {"codec": "kivi2", "side": "keys"}
    edges = {"0.002": 0, "0.005": 1, "0.01": 2, "1.0": 2, "+Inf": 3}
    assert {le: value(found, f"{name}_bucket", le=le, **keys) for le in edges} == edges
    assert value(found, f"{name}_sum", **keys) == pytest.approx(1.51)
    assert value(found, f"{name}_bucket", codec="kivi2", side="values", le="0.12") == 2
    flat = snapshot.flat()
    assert flat["measured_pages"] == 3
    assert flat["quantization_error_values"] == pytest.approx((0.11 + 0.13 + 0.11) / 3)


def test_everything_starts_at_zero_except_the_epoch() -> None:
    found = samples(Metrics(3, lambda: None))
    assert value(found, "tierkv_epoch") == 3
    nonzero = {name for (name, _), number in found.items() if number and not name.endswith("_created")}
    assert nonzero == {"tierkv_epoch"}


@pytest.mark.parametrize(
    "operation", ["open", "fork", "crop", "close", "reserve", "commit", "observe", "ping"]
)
def test_each_operation_of_the_protocol_has_its_histogram_before_the_first_request(operation: str) -> None:
    assert value(samples(Metrics(1, lambda: None)), "tierkv_request_seconds_count", op=operation) == 0


def test_requests_fall_into_buckets_from_ten_microseconds() -> None:
    metrics = Metrics(1, lambda: None)
    metrics.request("reserve", 7e-6)
    metrics.request("reserve", 120e-6)
    found = samples(metrics)
    bounds = sorted(
        float(dict(key)["le"])
        for name, key in found
        if name == "tierkv_request_seconds_bucket" and ("op", "reserve") in key
    )  # fmt: skip
    assert bounds[0] == 1e-5
    assert value(found, "tierkv_request_seconds_bucket", op="reserve", le="1e-05") == 1
    assert value(found, "tierkv_request_seconds_count", op="reserve") == 2
    assert value(found, "tierkv_request_seconds_sum", op="reserve") == pytest.approx(127e-6)


def test_each_hook_moves_its_own_number() -> None:
    metrics = Metrics(1, lambda: None)
    metrics.refused("open", "backpressure")
    metrics.malformed()
    metrics.handler_error()
    metrics.workers(4)
    metrics.lease_expired()
    metrics.tick()
    metrics.tick()
    metrics.moved("hbm", "host", 0.002, 4096)
    found = samples(metrics)
    assert value(found, "tierkv_refused_requests_total", code="backpressure") == 1
    assert value(found, "tierkv_malformed_frames_total") == 1
    assert value(found, "tierkv_handler_errors_total") == 1
    assert value(found, "tierkv_workers") == 4
    assert value(found, "tierkv_expired_leases_total") == 1
    assert value(found, "tierkv_loop_ticks_total") == 2
    assert value(found, "tierkv_move_seconds_count", src="hbm", dst="host") == 1


def test_every_hook_that_the_loop_calls_exists() -> None:
    hooks = {name for name in vars(NoMetrics) if not name.startswith("_")}
    assert hooks <= {name for name in dir(Metrics) if callable(getattr(Metrics, name))}


def test_a_snapshot_shows_as_gauges_and_totals() -> None:
    counters = Counters()
    counters.moved_pages["hbm", "quantized", "pressure"] = 5
    counters.moved_bytes["hbm", "host"] = 1 << 20
    counters.failed_moves["hbm", "quantized", "non-finite"] = 2
    counters.dropped_pages["tool_out", "host-full"] = 3
    counters.backpressure = 7
    counters.resumes["late", "learned"] = 4
    counters.checksum_failures = 1
    now: Snapshot = replace(
        EMPTY, hbm_capacity=1 << 30, host_capacity=4 << 30, sessions=2, paused=1,
        tier_bytes={"hbm": 100, "quantized": 20, "host": 300},
        pages={("hbm", "system"): 6, ("host", "tool_out"): 9}, counters=counters,
        page_scores={"plan": np.array([0.95, 0.2, 0.1, 3.0], np.float32)},
    )  # fmt: skip
    found = samples(Metrics(1, lambda: now))
    assert value(found, "tierkv_tier_bytes", tier="quantized") == 20
    assert value(found, "tierkv_tier_capacity_bytes", tier="host") == 4 << 30
    assert value(found, "tierkv_pages", tier="host", region="tool_out") == 9
    assert value(found, "tierkv_pages", tier="host", region="plan") == 0
    assert value(found, "tierkv_sessions") == 2
    assert value(found, "tierkv_moved_pages_total", src="hbm", dst="quantized", reason="pressure") == 5
    assert value(found, "tierkv_moved_bytes_total", src="hbm", dst="host") == 1 << 20
    assert value(found, "tierkv_failed_moves_total", src="hbm", dst="quantized", reason="non-finite") == 2
    assert value(found, "tierkv_dropped_pages_total", region="tool_out", reason="host-full") == 3
    assert value(found, "tierkv_backpressure_total") == 7
    assert value(found, "tierkv_resumes_total", outcome="late", known="learned") == 4
    assert value(found, "tierkv_resumes_total", outcome="ready", known="hinted") == 0
    assert value(found, "tierkv_paused_sessions") == 1
    assert value(found, "tierkv_host_checksum_failures_total") == 1
    scores = {
        le: value(found, "tierkv_page_score_bucket", region="plan", le=le)
        for le in ("0.1", "0.2", "1.0", "+Inf")
    }
    assert scores == {"0.1": 1, "0.2": 2, "1.0": 3, "+Inf": 4}


def test_a_reason_nobody_foresaw_is_exported_too() -> None:
    counters = Counters()
    counters.dropped_pages["plan", "meteor"] = 1
    found = samples(Metrics(1, lambda: replace(EMPTY, counters=counters)))
    assert value(found, "tierkv_dropped_pages_total", region="plan", reason="meteor") == 1


def test_names_have_the_prefix_and_labels_are_few_and_never_sessions() -> None:
    text = Metrics(1, lambda: None).text().decode()
    for line in text.splitlines():
        if not line.startswith("#"):
            assert line.startswith("tierkv_")
            assert "session=" not in line
    labels = set(re.findall(r'(\w+)="', text))
    assert labels == {
        "tier",
        "pool",
        "region",
        "src",
        "dst",
        "reason",
        "op",
        "code",
        "le",
        "outcome",
        "known",
        "codec",
        "side",
    }


def test_two_registries_do_not_meet() -> None:
    first, second = Metrics(1, lambda: None), Metrics(2, lambda: None)
    first.tick()
    assert value(samples(second), "tierkv_loop_ticks_total") == 0
