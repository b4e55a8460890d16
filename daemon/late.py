"""Copies that pages lack because there was no room, or too much to do, when they were due: made at a tick."""

from __future__ import annotations

import numpy as np

from tierkv.daemon.moves import Moves
from tierkv.daemon.pages import Goal, Ladder
from tierkv.daemon.state import State
from tierkv.table import NOWHERE, Kind


def back_up(state: State, moves: Moves) -> None:
    """Pages that sealed while the mover was busy or host was full get their backup now."""
    pages = state.pages
    if state.config.backup != "on_seal" or not state.config.host_bytes:
        return
    bare = pages.live & pages.sealed & ~pages.doomed & (pages.host == NOWHERE) & (pages.kind == Kind.EXACT)
    bare &= (pages.ladder == Ladder.TIERED) & (pages.moving == 0) & (pages.retry_at <= state.now)
    for slot in np.flatnonzero(bare).tolist():
        if moves.full() or not moves.launch.backup(slot):
            break


def summarize(state: State, moves: Moves) -> None:
    """Cold pages that found no room for a digest get it now."""
    pages = state.pages
    if not state.config.digest_share:
        return
    bare = pages.live & ~pages.doomed & (pages.kind == Kind.NONE) & (pages.host != NOWHERE)
    bare &= (pages.digest == NOWHERE) & (pages.moving == 0) & (pages.goal == Goal.NONE)
    spent: set[int] = set()  # sessions whose own budget holds no more digests
    for slot in np.flatnonzero(bare & (pages.retry_at <= state.now)).tolist():
        owner = int(pages.owner[slot])
        if owner in spent:
            continue
        if moves.full():
            break
        if not moves.launch.digest(slot):
            if state.may_hold_digest(state.sessions.get(owner)):
                break
            spent.add(owner)
