"""Totals since the owner started: the brain counts, metrics export."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from tierkv.protocol import Audit
from tierkv.quant.quality import ErrorRatios

RATIO_EDGES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 1.0)
"""Upper edges of attention recall."""

SECONDS_EDGES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper edges of the time that a recall takes."""


ERROR_EDGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.12, 0.15, 0.2, 0.3, 0.5, 1.0)
"""Upper edges of a page's error ratio; .035 and .12 are what 3 and 2 bits a value lose of a Gaussian."""

MASS_EDGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
"""Upper edges of shares of attention on cold pages."""

OUTCOMES = ("used", "late", "wasted", "cancelled", "filled")
"""What became of pages that attention was expected on: used or wasted are those that took another's place, filled those
that came into free room."""

SIDES = ("keys", "values")


@dataclass
class Buckets:
    """A histogram: `counts[i]` values lie at or below `edges[i]` and above the edge before it; the last ones beyond."""

    edges: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.edges) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    @property
    def mean(self) -> float:
        """0 of no value."""
        return self.total / max(1, sum(self.counts))


@dataclass
class Counters:
    moved_pages: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # src, dst, reason
    moved_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failed_moves: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    dropped_pages: Counter[tuple[str, str]] = field(default_factory=Counter)  # region, reason
    lost_pages: int = 0
    recalled_pages: int = 0
    prefetched: Counter[str] = field(default_factory=Counter)  # pages by outcome
    ping_pongs: int = 0  # pages demoted soon after they were promoted
    resumes: Counter[tuple[str, str]] = field(
        default_factory=Counter
    )  # pauses: ready or late, how it was known
    without_digest: int = 0  # pages that left HBM and found no room for a digest
    needed_cold: int = 0  # pages that audits found not attended although they had much mass
    attention_recall: Buckets = field(default_factory=lambda: Buckets(RATIO_EDGES))
    recall_seconds: Buckets = field(default_factory=lambda: Buckets(SECONDS_EDGES))
    missed_mass: Buckets = field(default_factory=lambda: Buckets(MASS_EDGES))
    expected_mass: Buckets = field(default_factory=lambda: Buckets(MASS_EDGES))
    blocked_seconds: float = 0.0  # that steps waited, by their workers' clocks
    last_audit: Audit | None = None
    quantization_errors: dict[str, Buckets] = field(
        default_factory=lambda: {side: Buckets(ERROR_EDGES) for side in SIDES}
    )
    backpressure: int = 0
    checksum_failures: int = 0
    pins_refused: int = 0

    def measured(self, errors: ErrorRatios) -> None:
        """A page that was just encoded was compared with its exact bytes."""
        for side, ratio in zip(SIDES, errors, strict=True):
            self.quantization_errors[side].add(ratio)

    def audited(self, audit: Audit) -> None:
        """A worker compared what it attended with what it would have attended over all pages."""
        self.needed_cold += audit.needed_cold
        self.last_audit = audit
        self.attention_recall.add(audit.attended)
        self.missed_mass.add(audit.missed)
