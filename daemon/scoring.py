"""Scores and guards of pages, refreshed for what changed, and the questions that are asked of them.

A page that several sessions name has the highest of their scores and the strictest of their guards, so sessions that
share pages (a family of forks) are scored together. All that is due is scored in a few kernel calls: the work is linear
in the tokens of the sessions that changed, and a session costs about a microsecond of Python besides.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.pages import Goal, Guard, Ladder
from tierkv.daemon.policy import get as get_policy
from tierkv.daemon.policy.exponential import score_sessions
from tierkv.daemon.policy.pages import page_scores
from tierkv.daemon.scoring_kernels import EXACT, NONE, RECENT, clear, settle
from tierkv.daemon.sessions import IDLE_SECONDS, Session
from tierkv.daemon.state import State

Slots = NDArray[np.int64]
Floats = NDArray[np.float32]

WATCH = {Ladder.EXACT: NONE, Ladder.DROP: NONE, Ladder.TIERED: RECENT}
"""What `settle` is told of a session, by its ladder: only pages of a tiered one have a recent window and sinks."""

PACK = struct.Struct("=9qd").pack
FACTS = np.dtype([("numbers", np.int64, 9), ("step", np.float64)])
"""Of a session: addresses of its pages' slots and first tokens, how many pages and tokens, watch, whether it shares no
page, `TokenState.addresses`; and its clock."""

RESCORE_SECONDS = 1.0
"""Scores of a paused session are recomputed this often."""

HORIZON = 5.0
"""Seconds: attention that is expected so much later is worth half as much now."""

STALE_SCORE = np.float32(0.0)
"""Most that a superseded page is worth."""

FIRST_CHUNK = 1024
"""Of slots in order of score, so many are sorted at first, and twice as many each time the caller wants more."""


class Scores:
    def __init__(self, state: State) -> None:
        self._state = state

    def refresh(self) -> None:
        """Refresh scores and guards of sessions that changed, and of the sessions that share pages with them."""
        due = self._due()
        if not due:
            return
        state, pages = self._state, self._state.pages
        facts = self._facts(due)
        slots, starts, rows, lengths, watches, alone, *tokens = np.array(facts["numbers"].T, order="C")
        tables = np.stack([starts, rows, lengths], axis=1)
        scores = self._scores(due, np.stack(tokens, axis=1), tables, facts["step"].astype(np.float32))
        for session in due:
            session.stale, session.scored_at = False, state.now
        clear(slots, rows, alone, pages.score, pages.guard)
        settle(
            slots, starts, rows, lengths, watches, alone, scores, pages.pin, pages.score, pages.guard,
            state.config.recent_tokens, state.config.sink_tokens,
        )  # fmt: skip
        pages.score[pages.stale] = np.minimum(pages.score[pages.stale], STALE_SCORE)
        retained = pages.live & (pages.retained_until > state.now)
        pages.guard[retained] = np.maximum(pages.guard[retained], Guard.ATTENDABLE)

    def _due(self) -> list[Session]:
        """Sessions whose scores are older than they may be, with their families, each once."""
        state = self._state
        before = state.now - RESCORE_SECONDS
        due: list[Session] = []
        done: set[int] = set()
        for session in state.sessions.values():
            if not (session.stale or session.scored_at < before):
                continue
            if len(session.family) == 1:
                due.append(session)
            elif session.id not in done:
                due += [state.sessions[s] for s in sorted(session.family)]
                done |= session.family
        return due

    def _facts(self, due: list[Session]) -> NDArray[np.void]:
        """`FACTS` of each session. Packed as bytes, since numpy takes three times as long to read Python's numbers."""
        now, clients, absent = self._state.now, self._state.clients, self._state.absent
        quarantined = {name for name, client in clients.items() if client.quarantined}
        packed = [
            PACK(
                s.pages.address, s.starts.address, s.pages.length, s.length,
                EXACT if s.client in quarantined else NONE if s.id in absent else WATCH[s.ladder],
                len(s.family) == 1, *s.tokens.addresses,
                s.step if now - s.active_at <= IDLE_SECONDS or self._is_near(s) else s.clock(now),
            )
            for s in due
        ]  # fmt: skip
        return np.frombuffer(b"".join(packed), FACTS)

    def _is_near(self, session: Session) -> bool:
        """The session may resume any moment: its clock stands where it stopped."""
        absence = self._state.absent.get(session.id)
        return absence is not None and absence.near

    def _scores(
        self, due: list[Session], tokens: NDArray[np.int64], tables: NDArray[np.int64], steps: Floats
    ) -> Floats:
        """`[all pages]`, session after session; the arrays as in `score_sessions`."""
        policy = self._state.policy
        if policy.exponential is not None:
            return score_sessions(policy.exponential, policy.aggregate, tokens, tables, steps)
        scores = [
            s.tokens.page_scores(s.starts.view, s.counts.view.astype(np.int32), step)
            for s, step in zip(due, steps.tolist(), strict=True)
        ]
        return np.concatenate(scores)

    def idle(self, among: Slots) -> Slots:
        """Sealed pages without a goal that may be chosen now."""
        pages = self._state.pages
        free = pages.live & pages.sealed & ~pages.doomed & (pages.goal == Goal.NONE)
        free &= pages.retry_at <= self._state.now
        chosen: Slots = among[free[among]]
        return chosen

    def wanted(self, slots: Slots) -> NDArray[np.bool_]:
        """Which pages were recalled for steps that are still to come, or are what the present step depends on."""
        pages, sessions = self._state.pages, self._state.sessions
        until = pages.wanted_until[slots]
        wanted: NDArray[np.bool_] = until > 0
        if wanted.any():
            owners, which = np.unique(pages.owner[slots[wanted]], return_inverse=True)
            steps = [sessions[o].step if o in sessions else np.inf for o in owners.tolist()]
            wanted[wanted] = np.array(steps)[which] < until[wanted]
        return wanted | pages.linked[slots]

    def away(self, slots: Slots) -> NDArray[np.bool_]:
        """Which pages are of paused sessions only, and not held for one that is near."""
        pages = self._state.pages
        away: NDArray[np.bool_] = (pages.back_at[slots] > 0) & ~pages.held[slots]
        return away

    def worth(self, slots: Slots) -> Floats:
        """Attention that pages get now; of a paused session's, what it is worth that they will get it later."""
        pages = self._state.pages
        wait = np.maximum(0.0, pages.back_at[slots] - self._state.now)
        worth: Floats = pages.mass[slots] * (HORIZON / (HORIZON + wait)).astype(np.float32)
        return worth

    def coldest_first(self, slots: Slots) -> Iterator[int]:
        """The slots, lowest score first and equals in their order. Superseded pages and then those of paused sessions,
        what is worth least first, come before; pages that are wanted for steps still to come are last. Sorted as far as
        they are asked for, by the scores at the call.
        """
        pages = self._state.pages
        scores, wanted, back_at = pages.score[slots], self.wanted(slots), pages.back_at[slots]
        stale = pages.stale[slots]
        away = ~stale & self.away(slots)
        present = ~stale & ~away
        if present.all() and not wanted.any():
            return _ascending(slots, scores)
        least = np.lexsort((scores[away], -back_at[away], self.worth(slots[away])))
        farthest = slots[away][least].tolist()
        last, rest = present & wanted, present & ~wanted
        stale_first, *others = (_ascending(slots[of], scores[of]) for of in (stale, rest, last))
        return chain(stale_first, farthest, *others)


def warm_up() -> None:
    """Compile the kernels (seconds on a machine that has not run them), so that the first refresh need not wait."""
    none, table = np.zeros(0, np.int64), np.zeros((0, 3), np.int64)
    scores, guards = np.zeros(0, np.float32), np.zeros(0, np.int8)
    form = get_policy("memdecay").exponential
    assert form is not None
    score_sessions(form, "mean", table, table, scores)
    page_scores(scores, none, np.zeros(0, np.int32), "mean")
    clear(none, none, none, scores, guards)
    settle(none, none, none, none, none, none, scores, guards, scores, guards, 0, 0)


def _ascending(slots: Slots, scores: Floats) -> Iterator[int]:
    """A score and a place in one integer: a few of the smallest are found without sorting the rest, and equal scores
    keep their order on every machine.
    """
    bits = (scores + np.float32(0.0)).view(np.uint32)  # -0 as 0
    negative = bits >> np.uint32(31) == 1
    rank = np.where(negative, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)  # orders as the floats do
    keys = rank << np.uint64(32) | np.arange(len(slots), dtype=np.uint64)

    def chunks() -> Iterator[int]:
        rest, chunk = keys, FIRST_CHUNK
        while len(rest):
            if chunk < len(rest):
                rest = np.partition(rest, chunk)
            first, rest, chunk = np.sort(rest[:chunk]), rest[chunk:], 2 * chunk
            yield from slots[(first & np.uint64(0xFFFFFFFF)).astype(np.int64)].tolist()

    return chunks()
