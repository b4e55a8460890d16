"""Exact pages that leave HBM at once when room is wanted: superseded ones, and those of sessions paused for long."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tierkv.daemon.moves import Moves
from tierkv.daemon.pages import Goal, Guard, Ladder
from tierkv.daemon.scoring import Scores, Slots
from tierkv.daemon.state import State
from tierkv.table import NOWHERE, Kind


def send_away(state: State, moves: Moves, scores: Scores, missing: int) -> int:
    """Up to `missing` bytes of frames, of pages whose copy in host memory exists. Returns how many."""
    pages, sent = state.pages, 0
    for slots in _givers(state):
        ready = scores.idle(slots)
        ready = ready[(pages.kind[ready] == Kind.EXACT) & (pages.ladder[ready] == Ladder.TIERED)]
        ready = ready[(pages.guard[ready] == Guard.NONE) & (pages.host[ready] != NOWHERE)]
        for slot in scores.coldest_first(ready):
            if not state.model_of(slot).ready:  # it comes back low-bit, so its codec is fitted from it first
                continue
            if sent >= missing or moves.full() or not moves.demote(slot, Goal.HOST, "pause"):
                return sent
            sent += state.model_of(slot).exact.frame
    return sent


def _givers(state: State) -> Iterator[Slots]:
    """Superseded pages; then a paused session's that does not resume soon, the farthest first."""
    stale = np.flatnonzero(state.pages.live & state.pages.stale)
    if len(stale):
        yield stale
    far = [
        (a.back_at, number) for number, a in state.absent.items() if a.early_at > state.now or not a.expected
    ]
    for _, number in sorted(far, reverse=True):
        slots = state.sessions[number].pages.view
        yield slots[state.pages.back_at[slots] > 0]
