"""What a step does in its session's calls: how long each took, and how much of that this thread did not run.

A call waits for the daemon (or a lock, or a core) exactly when its wall time exceeds its thread's CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from tierkv.session import Session

CALLS = ("reserve", "begin", "slots", "rows", "cold", "commit", "observe", "end")
STEP = "step"


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Seconds; `start` is on the clock of `time.perf_counter`."""

    name: str
    start: float
    seconds: float
    cpu: float

    @property
    def blocked(self) -> float:
        return max(0.0, self.seconds - self.cpu)


class Watch:
    """Listens to sessions of one arm from now on."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.spans: list[Span] = []
        for session in sessions:
            for name in CALLS:
                setattr(session, name, self.timed(name, getattr(session, name)))

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, each time with a span."""

        def listened(*args: Any, **kwargs: Any) -> Any:
            start, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                cpu = time.thread_time() - cpu
                self.spans.append(Span(name, start, time.perf_counter() - start, cpu))

        return listened


def trace(steps: Mapping[str, Sequence[Span]]) -> dict[str, object]:
    """Spans by context as Chrome's trace events (ui.perfetto.dev shows them); microseconds."""
    shown: list[dict[str, object]] = []
    for thread, (title, spans) in enumerate(steps.items()):
        named = {"name": "thread_name", "ph": "M", "pid": 0, "tid": thread, "args": {"name": title}}
        shown.append(named)
        for span in spans:
            args = {"cpu_us": round(1e6 * span.cpu, 1), "blocked_us": round(1e6 * span.blocked, 1)}
            where = {"ts": 1e6 * span.start, "dur": 1e6 * span.seconds, "pid": 0, "tid": thread}
            shown.append({"name": span.name, "ph": "X", **where, "args": {} if span.name == STEP else args})
    return {"traceEvents": shown}
