"""One line of `tierkv sessions`: what a session holds, and what recall did for it."""

from __future__ import annotations

import msgspec


class SessionFigures(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Of one session since this owner has it.

    Attributes:
        pages: by tier.
        hbm_bytes: of its replicas, reserved pages and digests.
        attention_recall: mean over its audits of the share of attention that was attended; `None` without any.
        missed_mass: mean over its audits of the share of attention on pages that were not in HBM; `None` without any.
        expected_mass: share that the latest estimates gave to them.
        needed_cold_pages: that audits found needed and not attended.
        prefetched: pages brought back because attention was expected on them: `used`, `late` (for the step that
            waited), `wasted` (gone again without), `cancelled` (not wanted any more before they had begun to come),
            `filled` (into free room: no bet, neither used nor wasted).
        ping_pongs: pages demoted within 32 steps of their promotion.
        blocked_seconds: that its steps waited for the daemon, by the worker's clock, as of its last observation.
    """

    session: int
    client: str
    model: str
    tokens: int
    step: int
    hbm_bytes: int
    pages: dict[str, int]
    attention_recall: float | None
    missed_mass: float | None
    expected_mass: float
    audits: int
    needed_cold_pages: int
    prefetched: dict[str, int]
    ping_pongs: int
    blocked_seconds: float

    @property
    def blocked_ms_a_step(self) -> float:
        """0 before the first step."""
        return 1000 * self.blocked_seconds / self.step if self.step else 0.0
