"""What recall did for one session: the figures of `tierkv sessions`. Totals of all sessions are in `counters.py`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tierkv.protocol import Audit

PING_PONG_STEPS = 32
"""A page that is demoted within so many decode steps of its promotion went to and fro for nothing."""


@dataclass
class Ledger:
    prefetched: Counter[str] = field(default_factory=Counter)  # pages by outcome (`counters.OUTCOMES`)
    ping_pongs: int = 0
    needed_cold: int = 0  # pages that audits found needed and not attended
    missed: float = 0.0  # mass that audits found on cold pages, added up
    attended: float = 0.0  # attention recall, added up
    audits: int = 0
    expected: float = 0.0  # mass that the latest estimates gave to cold pages
    blocked_seconds: float = 0.0  # that steps waited for pages, by the worker's clock

    def audited(self, audit: Audit) -> None:
        self.needed_cold += audit.needed_cold
        self.missed += audit.missed
        self.attended += audit.attended
        self.audits += 1
