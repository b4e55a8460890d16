"""Numbers out of the brain, for metrics, `stats` and the status page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.counters import OUTCOMES, Counters
from tierkv.daemon.moves import Moves
from tierkv.daemon.pages import TIER
from tierkv.daemon.sessions import Session
from tierkv.daemon.state import State
from tierkv.figures import SessionFigures
from tierkv.regions import Region
from tierkv.table import NOWHERE, Kind

TIERS = ("hbm", "middle", "quantized", "host", "dropped")
"""Tier of a page: what attention reads. `Kind` and the host replica decide."""


@dataclass(frozen=True)
class Snapshot:
    """One moment of the owner. Bytes of frames in use count whole frames; tier bytes count replicas.

    Attributes:
        pages: pages by (tier, region); open and blank pages count as `hbm`.
        tier_bytes: replica bytes by tier: exact, middle and low-bit in HBM, any in host.
        wasted_share: of pages that took others' places and were attended or left (`waste.Waste`).
        digests: the form of each model's digests, by the model's id; several where sessions outlived an owner.
        page_scores: scores of sealed attendable or host pages by region, as of the last rescoring.
    """

    hbm_capacity: int
    hbm_used: int
    hbm_peak: int
    hbm_retiring: int
    host_capacity: int
    host_used: int
    sessions: int
    workers: int
    quarantined: int
    blanks: int
    moves_in_flight: int
    adopting: bool
    draining: bool
    tokens: int
    paused: int
    pages: dict[tuple[str, str], int]
    tier_bytes: dict[str, int]
    counters: Counters
    page_scores: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    wasted_share: float = 0.0
    digests: dict[str, list[str]] = field(default_factory=dict)

    def flat(self) -> dict[str, float]:
        """The same as plain numbers (the `Stats` reply)."""
        by_tier = Counter[str]()
        for (tier, _), count in self.pages.items():
            by_tier[tier] += count
        counters = self.counters
        values: dict[str, float] = {
            "hbm_capacity_bytes": self.hbm_capacity,
            "hbm_used_bytes": self.hbm_used,
            "hbm_peak_bytes": self.hbm_peak,
            "hbm_retiring_bytes": self.hbm_retiring,
            "host_capacity_bytes": self.host_capacity,
            "host_used_bytes": self.host_used,
            "sessions": self.sessions,
            "workers": self.workers,
            "quarantined_workers": self.quarantined,
            "blank_pages": self.blanks,
            "moves_in_flight": self.moves_in_flight,
            "adopting": float(self.adopting),
            "draining": float(self.draining),
            "tokens": self.tokens,
            "paused_sessions": self.paused,
            "resumes_ready": sum(n for (outcome, _), n in counters.resumes.items() if outcome == "ready"),
            "resumes_late": sum(n for (outcome, _), n in counters.resumes.items() if outcome == "late"),
            "recalled_pages": counters.recalled_pages,
            "prefetched_used": counters.prefetched["used"],
            "prefetched_late": counters.prefetched["late"],
            "prefetched_wasted": counters.prefetched["wasted"],
            "prefetched_cancelled": counters.prefetched["cancelled"],
            "prefetched_filled": counters.prefetched["filled"],
            "ping_pong_pages": counters.ping_pongs,
            "needed_but_cold_pages": counters.needed_cold,
            "missed_mass": counters.missed_mass.mean,
            "expected_cold_mass": counters.expected_mass.mean,
            "blocked_seconds": counters.blocked_seconds,
            "audits": sum(counters.attention_recall.counts),
            "attention_recall": counters.attention_recall.mean,
            "measured_pages": sum(counters.quantization_errors["keys"].counts),
            "dropped_pages": counters.dropped_pages.total(),
            "lost_pages": counters.lost_pages,
            "moved_pages": counters.moved_pages.total(),
            "failed_moves": counters.failed_moves.total(),
            "backpressure": counters.backpressure,
        }
        for side, ratios in counters.quantization_errors.items():
            values[f"quantization_error_{side}"] = ratios.mean
        for tier in TIERS:
            values[f"pages_{tier}"] = by_tier[tier]
            values[f"bytes_{tier}"] = self.tier_bytes.get(tier, 0)
        return values


def tiers_of(state: State, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index into `TIERS` of each page."""
    pages = state.pages
    tier = np.full(len(slots), TIERS.index("dropped"))
    tier[pages.host[slots] != NOWHERE] = TIERS.index("host")
    tier[pages.kind[slots] == Kind.QUANTIZED] = TIERS.index("quantized")
    tier[pages.kind[slots] == Kind.MIDDLE] = TIERS.index("middle")
    tier[pages.kind[slots] == Kind.EXACT] = TIERS.index("hbm")
    return tier


def take_snapshot(state: State, moves: Moves, adopting: bool) -> Snapshot:
    pages = state.pages
    slots = pages.slots()
    written = slots[pages.count[slots] > 0]
    tier = tiers_of(state, written)
    region = pages.region[written].astype(np.int64)
    table = np.bincount(tier * len(Region) + region, minlength=len(TIERS) * len(Region))
    counts = {
        (name, r.label): int(table[t * len(Region) + r]) for t, name in enumerate(TIERS) for r in Region
    }
    scored = written[pages.sealed[written] & np.isfinite(pages.score[written])]
    return Snapshot(
        hbm_capacity=state.hbm.size,
        hbm_used=state.hbm.used_bytes,
        hbm_peak=state.hbm.peak_bytes,
        hbm_retiring=sum(r.size_class.item for r in state.retirements.values() if r.pool == "hbm"),
        host_capacity=state.host.size,
        host_used=state.host.used_bytes,
        sessions=len(state.sessions),
        workers=len(state.clients),
        quarantined=sum(c.quarantined for c in state.clients.values()),
        blanks=sum(len(s.blanks) for s in state.sessions.values()),
        moves_in_flight=len(moves.flying),
        adopting=adopting,
        draining=state.draining,
        tokens=sum(s.length for s in state.sessions.values()),
        paused=len(state.absent),
        pages=counts,
        tier_bytes=_tier_bytes(state, slots),
        counters=state.counters,
        page_scores={r.label: pages.score[scored[pages.region[scored] == r]] for r in Region},
        wasted_share=state.waste.share,
        digests=_digest_forms(state),
    )


def _digest_forms(state: State) -> dict[str, list[str]]:
    forms: dict[str, list[str]] = {}
    for model in state.models.values() if state.config.digest_share else ():
        held = forms.setdefault(model.model_id, [])
        if model.digest_form.name not in held:
            held.append(model.digest_form.name)
    return forms


def _tier_bytes(state: State, slots: NDArray[np.int64]) -> dict[str, int]:
    pages = state.pages
    total = dict.fromkeys(TIERS, 0)
    for index, model in state.models_by_index.items():
        own = slots[pages.model[slots] == index]
        for form in model.forms:
            held = int(np.count_nonzero(pages.replica(form)[own] != NOWHERE))
            in_host = int(np.count_nonzero(pages.host_kind[own] == form))
            total[TIER[form]] += held * model.form(form).item
            total["host"] += in_host * model.form(form).item
    return total


def figures(state: State, session: Session) -> SessionFigures:
    """What `tierkv sessions` says of one."""
    tier = np.bincount(tiers_of(state, session.pages.view), minlength=len(TIERS))
    ledger = session.ledger
    audits = ledger.audits
    return SessionFigures(
        session=session.id, client=session.client, model=session.model.model_id, tokens=session.length,
        step=session.step, hbm_bytes=state.hbm_bytes_of(session),
        pages={name: int(tier[t]) for t, name in enumerate(TIERS)},
        attention_recall=ledger.attended / audits if audits else None,
        missed_mass=ledger.missed / audits if audits else None,
        expected_mass=ledger.expected, audits=audits, needed_cold_pages=ledger.needed_cold,
        prefetched={outcome: ledger.prefetched[outcome] for outcome in OUTCOMES}, ping_pongs=ledger.ping_pongs,
        blocked_seconds=ledger.blocked_seconds,
    )  # fmt: skip


def session_stats(state: State, session_id: int) -> dict[str, float]:
    """Pages by tier, bytes and clock of one session. Raises `UnknownSession`."""
    session = state.any_session(session_id)
    slots = session.pages.view
    tier = np.bincount(tiers_of(state, slots), minlength=len(TIERS))
    pages, model = state.pages, session.model
    held = {
        f"bytes_{TIER[form]}": int(np.count_nonzero(pages.replica(form)[slots] != NOWHERE))
        * model.form(form).item
        for form in model.forms
    }
    in_host = slots[pages.host[slots] != NOWHERE]
    host = sum(state.host_class(slot).item for slot in in_host.tolist())
    return {
        "tokens": session.length,
        "step": session.step,
        "version": session.version,
        "hbm_bytes": state.hbm_bytes_of(session),
        "blank_pages": len(session.blanks),
        "paused": int(session.id in state.absent),
        "resumes_ready": session.resumes["ready"],
        "resumes_late": session.resumes["late"],
        **held,
        "bytes_host": host,
        **{f"pages_{name}": int(tier[t]) for t, name in enumerate(TIERS)},
    }
