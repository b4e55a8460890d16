"""`tierkv sessions` for people: a table, the fullest session first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from tierkv.daemon.limits import show_bytes
from tierkv.figures import SessionFigures

COLUMNS = (
    "session", "worker", "model", "tokens", "steps", "HBM", "exact/low/host", "recall", "missed", "used", "late",
    "wasted", "ping-pong", "blocked ms/step",
)  # fmt: skip


def table(sessions: Sequence[SessionFigures]) -> Table:
    made = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        made.add_column(column, justify="left" if column in ("worker", "model") else "right")
    for one in sorted(sessions, key=lambda one: -one.hbm_bytes):
        pages = one.pages
        low = pages["middle"] + pages["quantized"]
        made.add_row(
            str(one.session), one.client, one.model, f"{one.tokens:,}", f"{one.step:,}", show_bytes(one.hbm_bytes),
            f"{pages['hbm']}/{low}/{pages['host']}", _share(one.attention_recall), _share(one.missed_mass),
            *(str(one.prefetched[outcome]) for outcome in ("used", "late", "wasted")),
            str(one.ping_pongs), f"{one.blocked_ms_a_step:.2f}",
        )  # fmt: skip
    return made


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
