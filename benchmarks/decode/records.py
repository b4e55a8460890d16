"""What is written of a run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from tierkv.benchmarks.decode import DYNAMIC
from tierkv.benchmarks.decode.timing import BLOCK, block_of, blocks, ratio
from tierkv.benchmarks.decode.watch import STEP, Span
from tierkv.benchmarks.pairs import Figures


class Measured(msgspec.Struct):
    """One arm at one context and batch, as it is kept until all of a run is there."""

    steps: list[float]  # ms
    base_steps: list[float] | None  # at `BASE` tokens
    kv_bytes: int
    host_bytes: int
    attended_bytes: int
    peak_bytes: int | None
    fill_seconds: float
    pages: dict[str, int] | None = None
    spans: list[Span] | None = None  # of tierkv: all measured steps and their calls
    note: str = ""
    packs_every: int = 0  # tokens


class Record(msgspec.Struct):
    """See the package."""

    context: int
    batch: int
    arm: str
    ms_per_token: float
    ratio_to_dynamic: float
    kv_bytes: int
    ratio_low: float
    ratio_high: float
    pairs: int
    ratio_to: dict[str, float]
    ms_at_64: float | None
    kv_ms: float | None
    kv_ratio_to_dynamic: float | None
    host_bytes: int
    attended_bytes: int
    peak_bytes: int | None
    fill_seconds: float
    packing_ms: float | None
    pages: dict[str, int] | None
    daemon_ms: float | None
    blocked_ms: float | None
    note: str

    @property
    def blocked_share(self) -> float | None:
        """Of decode time."""
        return None if self.blocked_ms is None else self.blocked_ms / self.ms_per_token


class Scaling(msgspec.Struct):
    """The least-squares line of milliseconds by attended bytes."""

    ms_at_0: float
    ms_per_mib: float
    r2: float


class Run(msgspec.Struct):
    command: str
    date: str
    model: str
    machine: dict[str, object]
    pages: str
    codec: str
    steps: int
    skipped: dict[str, str]
    more: list[Record]
    prefill: dict[str, object] | None
    scaling: Scaling | None
    trace: str | None


Found = Mapping[tuple[int, int], Mapping[str, Measured]]
"""By context and batch, then by arm; always with `dynamic`."""


def records(found: Found, arms: Sequence[str]) -> list[Record]:
    """Of these arms, by batch, context and arm."""
    made = []
    for context, batch in sorted(found, key=lambda point: (point[1], point[0])):
        here = found[context, batch]
        made += [_record(context, batch, arm, here) for arm in arms if arm in here]
    return made


def _record(context: int, batch: int, arm: str, here: Mapping[str, Measured]) -> Record:
    one, figures = here[arm], _to(DYNAMIC, arm, here)
    kv, theirs = _kv(one), _kv(here[DYNAMIC])
    kv_ratios = [ours / peer for ours, peer in zip(kv, theirs, strict=False) if peer > 0]
    calls = [span for span in one.spans or () if span.name != STEP]
    each = 1e3 / len(one.steps)
    others = [other for other in here if other not in (arm, DYNAMIC)]
    return Record(
        context, batch, arm, _ms(one.steps), figures["ratio"], one.kv_bytes, figures["ratio_low"],
        figures["ratio_high"], int(figures["pairs"]), {other: _to(other, arm, here)["ratio"] for other in others},
        _ms(one.base_steps) if one.base_steps else None,
        statistics.median(kv) if kv else None, statistics.median(kv_ratios) if kv_ratios else None,
        one.host_bytes, one.attended_bytes, one.peak_bytes, one.fill_seconds,
        1e3 * one.fill_seconds / one.packs_every if one.packs_every else None, one.pages,
        None if one.spans is None else each * sum(span.seconds for span in calls),
        None if one.spans is None else each * sum(span.blocked for span in calls),
        one.note,
    )  # fmt: skip


def _to(other: str, arm: str, here: Mapping[str, Measured]) -> Figures:
    return ratio(here[arm].steps, here[other].steps, block_of(arm, other))


def _ms(steps: Sequence[float]) -> float:
    return statistics.median(blocks(steps, BLOCK))


def _kv(one: Measured) -> list[float]:
    """By block: what a step takes beyond one at `BASE` tokens."""
    common = min(len(one.steps), len(one.base_steps or ()))
    if not one.base_steps or not common:
        return []
    pairs = zip(*(blocks(steps[:common], BLOCK) for steps in (one.steps, one.base_steps)), strict=True)
    return [step - base for step, base in pairs]


def scaling(found: Found, arm: str, batch: int = 1) -> Scaling | None:
    """Over all contexts; `None` with fewer than three."""
    points = [here[arm] for (_, rows), here in sorted(found.items()) if rows == batch and arm in here]
    if len(points) < 3:
        return None
    mib = np.array([point.attended_bytes / 2**20 for point in points])
    ms = np.array([_ms(point.steps) for point in points])
    slope, start = np.polyfit(mib, ms, 1)
    rest = ms - (start + slope * mib)
    return Scaling(float(start), float(slope), float(1 - (rest**2).sum() / ((ms - ms.mean()) ** 2).sum()))
