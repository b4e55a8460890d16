"""Scores and guards of pages, refreshed for what changed, and the questions that are asked of them.

A page that several sessions name has the highest of their scores and the strictest of their guards, so sessions that
share pages (a family of forks) are scored together.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.pages import Goal, Guard, Ladder
from tierkv.daemon.sessions import Session
from tierkv.daemon.state import State

Slots = NDArray[np.int64]

RESCORE_SECONDS = 1.0
"""Scores of a paused session are recomputed this often."""


class Scores:
    def __init__(self, state: State) -> None:
        self._state = state

    def refresh(self) -> None:
        """Refresh scores and guards of sessions that changed, and of the sessions that share pages with them."""
        state = self._state
        done: set[int] = set()
        for session in state.sessions.values():
            old = state.now - session.scored_at > RESCORE_SECONDS
            if session.id in done or not (session.stale or old):
                continue
            family = [state.sessions[s] for s in sorted(session.family)]
            self._score_family(family)
            done |= session.family

    def _score_family(self, family: list[Session]) -> None:
        pages = self._state.pages
        for session in family:
            slots = session.pages.view
            pages.score[slots], pages.guard[slots] = -np.inf, Guard.NONE
        for session in family:
            slots = session.pages.view
            if not len(slots):
                session.stale = False
                continue
            counts = session.counts.view.astype(np.int32)
            scores = session.tokens.page_scores(session.starts.view, counts, session.clock(self._state.now))
            session.scores, session.stale, session.scored_at = scores, False, self._state.now
            pages.score[slots] = np.maximum(pages.score[slots], scores)
            pages.guard[slots] = np.maximum(pages.guard[slots], self._guards(session))

    def _guards(self, session: Session) -> NDArray[np.int8]:
        config, pages = self._state.config, self._state.pages
        slots, starts = session.pages.view, session.starts.view
        guards = pages.pin[slots].copy()
        if self._state.clients[session.client].quarantined:
            guards[:] = Guard.EXACT
        elif session.ladder is Ladder.TIERED:
            ends = starts + session.counts.view
            recent = ends > session.length - config.recent_tokens
            guards[recent] = np.maximum(guards[recent], Guard.RECENT)
            guards[starts < config.sink_tokens] = Guard.EXACT
        return guards

    def idle(self, among: Slots) -> Slots:
        """Sealed pages without a goal that may be chosen now."""
        pages = self._state.pages
        free = (
            pages.live[among] & pages.sealed[among] & ~pages.doomed[among] & (pages.goal[among] == Goal.NONE)
        )
        chosen: Slots = among[free & (pages.retry_at[among] <= self._state.now)]
        return chosen

    def wanted(self, slots: Slots) -> NDArray[np.bool_]:
        """Which pages were recalled for steps that are still to come."""
        pages, sessions = self._state.pages, self._state.sessions
        until = pages.wanted_until[slots]
        wanted: NDArray[np.bool_] = until > 0
        if wanted.any():
            owners, which = np.unique(pages.owner[slots], return_inverse=True)
            steps = [sessions[o].step if o in sessions else np.inf for o in owners.tolist()]
            wanted &= np.array(steps)[which] < until
        return wanted

    def coldest_first(self, slots: Slots) -> list[int]:
        """The slots, lowest score first; pages that were recalled for steps still to come are last."""
        order = np.lexsort((self._state.pages.score[slots], self.wanted(slots)))
        ordered: list[int] = slots[order].tolist()
        return ordered
