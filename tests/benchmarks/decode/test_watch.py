"""Spans of calls, and the trace of them."""

from __future__ import annotations

import time

import pytest

from tierkv.benchmarks.decode.watch import Span, Watch, trace


def test_a_call_that_waits_is_blocked_and_one_that_works_is_not() -> None:
    watch = Watch([])

    def work(seconds: float) -> str:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        return "done"

    watch.timed("wait", time.sleep)(0.05)
    assert watch.timed("work", work)(0.05) == "done"
    waited, worked = watch.spans
    assert waited.name == "wait" and waited.blocked >= 0.045
    assert worked.name == "work" and worked.cpu >= 0.05


def test_a_call_that_fails_leaves_its_span() -> None:
    watch = Watch([])
    with pytest.raises(ValueError, match="invalid literal"):
        watch.timed("parse", int)("x")
    assert [span.name for span in watch.spans] == ["parse"]


def test_a_trace_has_an_event_a_span_on_a_thread_a_context() -> None:
    events = trace(
        {"512 tokens": [Span("begin", 2.0, 0.003, 0.001), Span("step", 2.0, 0.1, 0.05)], "1k": []}
    )["traceEvents"]
    assert events == [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "512 tokens"}},
        {
            "name": "begin", "ph": "X", "ts": 2e6, "dur": 3000.0, "pid": 0, "tid": 0,
            "args": {"cpu_us": 1000.0, "blocked_us": 2000.0},
        },
        {"name": "step", "ph": "X", "ts": 2e6, "dur": 1e5, "pid": 0, "tid": 0, "args": {}},
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "1k"}},
    ]  # fmt: skip
