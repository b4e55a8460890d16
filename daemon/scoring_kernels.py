"""Scores and guards of sessions' pages, written to the pages in one pass over all sessions.

`slots` and `starts` are addresses (addresses.py), a session each: of the slots of its pages, in token order, and of
their first tokens. `rows` is how many pages it has.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.addresses import int64_at
from tierkv.daemon.pages import Guard
from tierkv.numba_setup import kernel

Floats = NDArray[np.float32]
Longs = NDArray[np.int64]
Guards = NDArray[np.int8]

NONE, RECENT, EXACT = int(Guard.NONE), int(Guard.RECENT), int(Guard.EXACT)


@kernel()
def clear(slots: Longs, rows: Longs, alone: Longs, score: Floats, guard: Guards) -> None:
    """Pages of sessions that share some have neither score nor guard, before `settle` raises them."""
    for session in range(len(slots)):
        if alone[session]:
            continue
        for slot in int64_at(slots[session], rows[session]):
            score[slot] = -np.inf
            guard[slot] = NONE


@kernel()
def settle(
    slots: Longs,
    starts: Longs,
    rows: Longs,
    lengths: Longs,
    watches: Longs,
    alone: Longs,
    scores: Floats,
    pin: Guards,
    score: Floats,
    guard: Guards,
    recent_tokens: int,
    sink_tokens: int,
) -> None:
    """Write each page's `score` and `guard`: what its session says, or the highest of what its sessions do.

    Args:
        lengths: tokens of each session.
        watches: `NONE` where only pins count; `RECENT` where the recent window and the sinks do, too; `EXACT` where no
            page may change at all.
        alone: sessions that share no page (not 0).
        scores: of all pages, session after session.
    """
    done = 0
    for session in range(len(slots)):
        count, watch = rows[session], watches[session]
        pages, firsts = int64_at(slots[session], count), int64_at(starts[session], count)
        recent = lengths[session] - recent_tokens
        for row in range(count):
            slot = pages[row]
            least = pin[slot]
            if watch == EXACT:
                least = EXACT
            elif watch == RECENT:
                stop = firsts[row + 1] if row + 1 < count else lengths[session]
                if firsts[row] < sink_tokens:
                    least = EXACT
                elif stop > recent:
                    least = max(least, RECENT)
            if alone[session]:
                score[slot], guard[slot] = scores[done + row], least
            else:
                score[slot], guard[slot] = max(score[slot], scores[done + row]), max(guard[slot], least)
        done += count
