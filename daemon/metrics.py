"""What Prometheus sees of one owner: names of the design, prefix `tierkv_`, base units, a registry of its own.

Every label value that can occur is exported as zero from the start, so that a rate is right from its first event.
Sessions are never labels. Totals restart with the owner; `tierkv_epoch` says so.

Two kinds of sources: hooks (`ServerMetrics`, `OnMove`) that the loop and the mover call, and the brain's latest
`Snapshot`, which the loop publishes at each tick and a scrape only reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TypeVar, get_args

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeHistogramMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tierkv import errors
from tierkv.daemon.acts import Act
from tierkv.daemon.counters import OUTCOMES, Buckets, Counters
from tierkv.daemon.snapshot import TIERS, Snapshot
from tierkv.protocol import Operation
from tierkv.regions import REGION_NAMES

OPERATIONS: tuple[str, ...] = tuple(str(kind.__struct_config__.tag) for kind in get_args(Operation))
CODES: tuple[str, ...] = tuple(
    sorted(vars(errors)[name].code for name in errors.__all__ if name != "from_wire")
)

ATTENDED_TIERS = ("hbm", "middle", "quantized", "host")
PACKED = ("middle", "quantized")
"""Tiers within which a page may also change places, to empty a frame."""

MOVE_REASONS = ("pressure", "budget", "threshold", "pin", "hot", "room", "recall", "pause", "resume", "hint")
RESUMES, KNOWN = ("ready", "late"), ("hinted", "learned", "unknown", "predicted")
DROP_REASONS = ("budget", "host-full", "checksum")
FAILURES = ("io", "codec", "non-finite", "checksum")
MOVES: tuple[tuple[str, str], ...] = tuple(sorted({act.value for act in Act}))

REQUEST_BUCKETS = (
    *(scale * step for scale in (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0) for step in (1, 2.5, 5)),
    10.0,
)
"""Seconds; a request over ipc takes about 100 us."""

SCORE_BUCKETS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5)
"""MemDecay's scores lie in about 0 to 1.5."""

EMPTY = Snapshot(
    hbm_capacity=0, hbm_used=0, hbm_peak=0, hbm_retiring=0, host_capacity=0, host_used=0, sessions=0, workers=0,
    quarantined=0, blanks=0, moves_in_flight=0, adopting=False, draining=False, tokens=0, paused=0, pages={},
    tier_bytes={}, counters=Counters(),
)  # fmt: skip
"""What is known before the loop's first tick."""

Key = TypeVar("Key", bound=tuple[str, ...])


class Metrics:
    """The registry, the hooks, and the text.

    Args:
        epoch: of this owner.
        snapshot: the latest one, `None` before the first; called at each scrape, must not wait.
        codec: name of the owner's low-bit form.
    """

    def __init__(self, epoch: int, snapshot: Callable[[], Snapshot | None], codec: str = "k3v2") -> None:
        self.registry = CollectorRegistry()
        own = self.registry
        self._requests = Histogram(
            "tierkv_request_seconds", "From reading a request to its answer.", ["op"],
            buckets=REQUEST_BUCKETS, registry=own,
        )  # fmt: skip
        self._refused = Counter(
            "tierkv_refused_requests", "Requests answered with this error.", ["code"], registry=own
        )
        self._moves = Histogram(
            "tierkv_move_seconds", "Copying or encoding one replica.", ["src", "dst"],
            buckets=REQUEST_BUCKETS, registry=own,
        )  # fmt: skip
        self._malformed = Counter("tierkv_malformed_frames", "Frames that could not be read.", registry=own)
        self._errors = Counter("tierkv_handler_errors", "Exceptions that the loop survived.", registry=own)
        self._leases = Counter("tierkv_expired_leases", "Workers that fell silent while alive.", registry=own)
        self._ticks = Counter("tierkv_loop_ticks", "Turns of the loop's clock.", registry=own)
        self._workers = Gauge("tierkv_workers", "Attached workers.", registry=own)
        Gauge("tierkv_epoch", "Incarnations of the owner so far.", registry=own).set(epoch)
        for op in OPERATIONS:
            self._requests.labels(op)
        for code in CODES:
            self._refused.labels(code)
        for pair in MOVES:
            self._moves.labels(*pair)
        own.register(_FromSnapshot(snapshot, codec))

    def text(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)

    # Hooks of the loop (`ServerMetrics`) ---------------------------------------------------------------------

    def request(self, op: str, seconds: float) -> None:
        self._requests.labels(op).observe(seconds)

    def refused(self, op: str, code: str) -> None:
        self._refused.labels(code).inc()

    def malformed(self) -> None:
        self._malformed.inc()

    def handler_error(self) -> None:
        self._errors.inc()

    def workers(self, count: int) -> None:
        self._workers.set(count)

    def lease_expired(self) -> None:
        self._leases.inc()

    def tick(self) -> None:
        self._ticks.inc()

    # Hook of the mover (`OnMove`) ----------------------------------------------------------------------------

    def moved(self, src: str, dst: str, seconds: float, size: int) -> None:
        """`size` is not used: the brain counts bytes when it publishes a move."""
        self._moves.labels(src, dst).observe(seconds)


class _FromSnapshot(Collector):
    """Gauges and totals of the latest snapshot."""

    def __init__(self, latest: Callable[[], Snapshot | None], codec: str) -> None:
        self._latest = latest
        self._codec = codec

    def collect(self) -> Iterator[Metric]:
        now = self._latest() or EMPTY
        counters = now.counters
        yield _gauge(
            "tier_bytes", "Replica bytes.", ["tier"], {(t,): now.tier_bytes.get(t, 0) for t in ATTENDED_TIERS}
        )
        yield _gauge(
            "tier_capacity_bytes", "Pool sizes; low-bit pages live in the hbm pool.", ["tier"],
            {("hbm",): now.hbm_capacity, ("host",): now.host_capacity},
        )  # fmt: skip
        yield _gauge(
            "pool_used_bytes", "Bytes of frames in use, whole frames counted.", ["pool"],
            {("hbm",): now.hbm_used, ("host",): now.host_used},
        )  # fmt: skip
        pages = {
            (tier, region): now.pages.get((tier, region), 0) for tier in TIERS for region in REGION_NAMES
        }
        yield _gauge("pages", "Pages by what attention reads.", ["tier", "region"], pages)
        for name, value, what in (
            ("sessions", now.sessions, "Open sessions."),
            ("quarantined_workers", now.quarantined, "Workers that are silent but alive."),
            ("paused_sessions", now.paused, "Sessions that said they pause, and have not resumed."),
            ("retiring_bytes", now.hbm_retiring, "HBM that waits for workers to adopt a plan."),
            ("moves_in_flight", now.moves_in_flight, "Moves that the mover has not answered."),
            ("tokens", now.tokens, "Committed tokens of open sessions."),
        ):
            yield _gauge(name, what, [], {(): value})
        yield _total(
            "moved_pages", "Pages that changed their tier.", ["src", "dst", "reason"], counters.moved_pages,
            ((s, d, r) for s in ATTENDED_TIERS for d in ATTENDED_TIERS if s != d or s in PACKED for r in MOVE_REASONS),
        )  # fmt: skip
        yield _total("moved_bytes", "Bytes written by moves.", ["src", "dst"], counters.moved_bytes, MOVES)
        yield _total(
            "failed_moves", "Moves that kept their source.", ["src", "dst", "reason"], counters.failed_moves,
            ((*pair, reason) for pair in MOVES for reason in FAILURES),
        )  # fmt: skip
        yield _total(
            "dropped_pages", "Pages that are gone for good.", ["region", "reason"], counters.dropped_pages,
            ((region, reason) for region in REGION_NAMES for reason in DROP_REASONS),
        )  # fmt: skip
        for name, total, what in (
            ("backpressure", counters.backpressure, "Callers told to wait."),
            ("lost_pages", counters.lost_pages, "Pages whose last replica was damaged."),
            ("recalled_pages", counters.recalled_pages, "Pages that came back from host."),
            ("refused_pins", counters.pins_refused, "Pins beyond the quota."),
            ("needed_but_cold_pages", counters.needed_cold, "Pages that audits found needed and not in HBM."),
            (
                "pages_without_digest",
                counters.without_digest,
                "Pages that left HBM without room for a digest.",
            ),
            ("ping_pong_pages", counters.ping_pongs, "Pages demoted within 32 steps of their promotion."),
            (
                "blocked_seconds",
                counters.blocked_seconds,
                "Time that steps waited, by their workers' clocks.",
            ),
            ("host_checksum_failures", counters.checksum_failures, "Host replicas found damaged."),
        ):
            yield _total(name, what, [], {(): total}, ())
        yield _total(
            "prefetch_pages", "Pages brought back because attention was expected on them.", ["outcome"],
            {(outcome,): count for outcome, count in list(counters.prefetched.items())}, ((o,) for o in OUTCOMES),
        )  # fmt: skip
        yield _total(
            "resumes", "Pauses that ended: whether what the session had was there, and how its time was known.",
            ["outcome", "known"], counters.resumes, ((o, k) for o in RESUMES for k in KNOWN),
        )  # fmt: skip
        yield _histogram(
            "attention_recall_ratio", "Audits: share of attention over all pages that was attended.", [],
            {(): counters.attention_recall},
        )  # fmt: skip
        yield _histogram(
            "needed_but_cold_mass_ratio", "Audits: share of attention on pages that were not in HBM.", [],
            {(): counters.missed_mass},
        )  # fmt: skip
        yield _histogram(
            "expected_cold_mass_ratio", "Observations: share of attention that estimates give to cold pages.", [],
            {(): counters.expected_mass},
        )  # fmt: skip
        yield _gauge(
            "prefetch_wasted_ratio", "Wasted among pages that took others' places and were attended or left.", [],
            {(): now.wasted_share},
        )  # fmt: skip
        yield _histogram(
            "recall_seconds",
            "From a step's request for pages to its answer.",
            [],
            {(): counters.recall_seconds},
        )
        yield _histogram(
            "quantization_error_ratio", "Pages measured when encoded: squared error over squared norm.",
            ["codec", "side"],
            {(self._codec, side): ratios for side, ratios in counters.quantization_errors.items()},
        )  # fmt: skip
        audit = counters.last_audit
        for gauge, share, meaning in (
            (
                "attention_recall_last_ratio",
                audit.attended if audit else None,
                "The last audit's attention recall.",
            ),
            (
                "oracle_recall_last_ratio",
                audit.oracle if audit else None,
                "What the best pages of as many bytes would have.",
            ),
        ):
            yield _gauge(gauge, meaning, [], {} if share is None else {(): share})
        yield _score_histogram(now)


def _histogram(
    name: str, what: str, labels: list[str], values: Mapping[Key, Buckets]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"tierkv_{name}", what, labels=labels)
    for key, buckets in values.items():
        below = accumulate(buckets.counts)
        edges = [*(str(edge) for edge in buckets.edges), "+Inf"]
        family.add_metric(key, list(zip(edges, map(float, below), strict=True)), sum_value=buckets.total)
    return family


def _gauge(name: str, what: str, labels: list[str], values: Mapping[Key, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"tierkv_{name}", what, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _total(
    name: str, what: str, labels: list[str], counts: Mapping[Key, float], known: Iterable[tuple[str, ...]]
) -> CounterMetricFamily:
    """`counts`, and zeros for `known` label values that did not occur yet."""
    family = CounterMetricFamily(f"tierkv_{name}", what, labels=labels)
    counted = list(counts.items())  # copied in one go: the loop counts on while we read
    values: dict[tuple[str, ...], float] = dict.fromkeys(known, 0)
    values.update(counted)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _score_histogram(now: Snapshot) -> GaugeHistogramMetricFamily:
    """How the scores of sealed pages lie at this moment (not over time)."""
    family = GaugeHistogramMetricFamily("tierkv_page_score", "Scores of sealed pages now.", labels=["region"])
    edges = np.array(SCORE_BUCKETS, np.float32)  # as the scores are
    for region in REGION_NAMES:
        scores = np.sort(now.page_scores.get(region, np.zeros(0, np.float32)))
        below = np.searchsorted(scores, edges, side="right")
        buckets = [(str(edge), float(count)) for edge, count in zip(SCORE_BUCKETS, below, strict=True)]
        family.add_metric([region], [*buckets, ("+Inf", float(len(scores)))], gsum_value=float(scores.sum()))
    return family
