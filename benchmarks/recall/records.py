"""The figures: what `out/recall.json` holds a list of."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """An arm on an input. Without a budget: an estimator of all layers, and no placement. `None`, and
    what a file leaves out, is not measured.

    Attributes:
        budget: share of the context's bytes in bfloat16.
        attention_recall: share of attention, mean over heads, layers and queries, on attendable pages and new tokens.
        oracle_recall: the same of the best pages by true mass in all of the budget, without digests.
        probe_recall: questions answered over the placement of their last token.
        captured_mass: true mass of the best tenth of cold pages by estimate, over that of the best tenth by mass: one
            choice for all heads and layers, by mean shares.
        captured_direct: the same where each layer and KV head chooses for itself (layers with records only).
        mass_ratio: estimated over true mass of all cold pages.
        digest_bytes_ratio: of a page's bytes.
        wasted_ratio: of pages brought in, those that no query of their question gave `USED_LIFT`.
        by_aggregate: `captured_mass` where opinions are put together otherwise.
        with_offsets: `captured_mass` where each head's estimates are moved by an offset fitted on resident pages.
        direct_by_aggregate: `captured_direct` where the query heads' opinions are put together otherwise
            (`measure.DIRECT_AGGREGATES`).
        direct_late: `captured_direct` by estimates of the query before (`late`), but for KV heads whose query moved far
            (`corrected`), which are the share `redone`.
        step_ms: served: median decode step that is no audit; `blocked_ms_per_token` is of decode steps, too.
        chunk_blocked_ms: served: that a question's chunk waited.
        brought, filled: served: pages that took others' places (`wasted_ratio` is of those), or came into free room.
            `captured_mass` is then the share of attention on pages in HBM, those read in place not counted.
    """

    input: str
    budget: float | None
    arm: str
    attention_recall: float | None = None
    oracle_recall: float | None = None
    probe_recall: float | None = None
    captured_mass: float | None = None
    captured_direct: float | None = None
    mass_ratio: float | None = None
    digest_bytes_ratio: float | None = None
    wasted_ratio: float | None = None
    blocked_ms_per_token: float | None = None
    by_aggregate: dict[str, float] | None = None
    with_offsets: float | None = None
    direct_by_aggregate: dict[str, float] | None = None
    direct_late: dict[str, float] | None = None
    questions: int = 0
    step_ms: float | None = None
    chunk_blocked_ms: float | None = None
    brought: int | None = None
    filled: int | None = None
