"""Measurements with figures of no meaning but those that are named."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.benchmarks.decode.records import Measured
from tierkv.benchmarks.decode.watch import Span


def measured(
    steps: Sequence[float], base: Sequence[float] = (), attended: int = 1, spans: list[Span] | None = None
) -> Measured:
    return Measured(list(steps), list(base), 3 << 20, 0, attended, 1 << 20, 0.5, None, spans, "")
