"""Figures out of steps."""

from __future__ import annotations

import pytest

from tests.benchmarks.decode.measured import measured
from tierkv.benchmarks.decode.records import records, scaling
from tierkv.benchmarks.decode.watch import Span

MIB = 1 << 20


def test_the_kv_cost_is_what_a_step_takes_beyond_64_tokens_block_by_block() -> None:
    dynamic = measured(
        [20.0] * 8 + [40.0] * 8 + [60.0] * 8, [10.0] * 8 + [20.0] * 8 + [20.0] * 8
    )  # 10, 20, 40
    ours = measured([15.0] * 8 + [30.0] * 8 + [30.0] * 8, [10.0] * 8 + [20.0] * 8 + [20.0] * 8)  # 5, 10, 10
    found = {(512, 1): {"dynamic": dynamic, "tierkv-exact": ours}}
    peer, one = records(found, ["dynamic", "tierkv-exact"])
    assert (one.ms_per_token, one.ms_at_64, one.kv_ms, one.kv_ratio_to_dynamic) == (30.0, 20.0, 10.0, 0.5)
    assert (one.ratio_to_dynamic, one.pairs) == (0.75, 3)
    assert (peer.kv_ms, peer.kv_ratio_to_dynamic, peer.ratio_to_dynamic) == (20.0, 1.0, 1.0)
    assert peer.ratio_to == {"tierkv-exact": pytest.approx(4 / 3)} and one.ratio_to == {}


def test_records_are_of_the_arms_asked_for_by_batch_and_context() -> None:
    here = {"dynamic": measured([1.0]), "eager": measured([2.0]), "tierkv-k8": measured([1.0])}
    found = {(64, 4): here, (128, 1): here, (64, 1): here}
    made = records(found, ["eager", "dynamic"])
    assert [(one.batch, one.context, one.arm) for one in made] == [
        (batch, context, arm)
        for batch, context in ((1, 64), (1, 128), (4, 64))
        for arm in ("eager", "dynamic")
    ]
    assert made[0].kv_ms is None and made[0].ratio_to_dynamic == 2.0


def test_time_blocked_is_a_steps_share_of_calls_in_which_the_thread_did_not_run() -> None:
    spans = [
        Span("begin", 0.0, 0.004, 0.001), Span("end", 0.0, 0.001, 0.001), Span("step", 0.0, 0.1, 0.05),
        Span("begin", 0.2, 0.001, 0.0015), Span("step", 0.2, 0.1, 0.05),
    ]  # fmt: skip
    found = {
        (64, 1): {"dynamic": measured([100.0, 100.0]), "tierkv-k8": measured([100.0, 100.0], spans=spans)}
    }
    (one,) = records(found, ["tierkv-k8"])
    assert one.daemon_ms == pytest.approx(3.0) and one.blocked_ms == pytest.approx(1.5)
    assert one.blocked_share == pytest.approx(0.015)


def test_the_line_through_times_by_attended_bytes_is_found() -> None:
    found = {
        (64 * mib, 1): {"tierkv-exact": measured([50.0 + 0.25 * mib], attended=mib * MIB)}
        for mib in (1, 2, 4, 8)
    }
    line = scaling(found, "tierkv-exact")
    assert line is not None
    assert (line.ms_at_0, line.ms_per_mib, line.r2) == pytest.approx((50.0, 0.25, 1.0))
    assert scaling(dict(list(found.items())[:2]), "tierkv-exact") is None
