"""How long the daemon takes to score its pages and to choose the coldest, beside the same anew in plain numpy.

Sessions are laid out as the brain has them, of random regions a page and with one observation; in each sample the
sessions that changed are a decode step further. The peer knows nothing of what changed: it scores every session's
tokens with the policy's formula in numpy, takes the pages' means, the guards, and a full sort.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tierkv.benchmarks import pairs
from tierkv.daemon.brain_config import BrainConfig
from tierkv.daemon.pages import Guard, Ladder
from tierkv.daemon.scoring import Scores
from tierkv.daemon.sessions import Client, Session
from tierkv.daemon.state import State
from tierkv.geometry import PAGE_TOKENS, Geometry
from tierkv.protocol import SessionOptions
from tierkv.regions import Region

GOAL_MILLISECONDS = {"one_session": 10.0, "all_changed": 50.0}
CHOSEN = 1000
STEPS = 50
"""Decode steps between the prompt and the first sample."""


def run(quick: bool = False) -> dict[str, pairs.Figures]:
    """Milliseconds of CPU time (all of it is one thread's); see the package for keys."""
    count = 3 if quick else 9
    long = _Daemon(1, 100_000 if quick else 1_000_000)
    figures = {
        "one_session": _measure(long, 1, lambda: long.score() and long.choose(), long.plain_both, count)
    }
    many = _Daemon(300 if quick else 10_000, 1000)
    figures["all_changed"] = _measure(many, 1, many.score, many.plain_scores, count)
    figures["one_in_100_changed"] = _measure(many, 100, many.score, many.plain_scores, count)
    figures["choice"] = _measure(many, 100, many.choose, many.plain_choice, count)
    return figures


def _measure(
    daemon: _Daemon, one_in: int, ours: Callable[[], object], peer: Callable[[], object], count: int
) -> pairs.Figures:
    def sample(work: Callable[[], object]) -> pairs.Sample:
        def once() -> float:
            daemon.step(one_in)
            start = time.process_time()
            work()
            return 1e3 * (time.process_time() - start)

        return once

    figures = pairs.interleave(sample(ours), sample(peer), count)
    return {
        **figures,
        "sessions": len(daemon.sessions),
        "tokens": daemon.tokens,
        "pages": len(daemon.state.pages),
    }


class _Daemon:
    """`sessions` tiered sessions of `tokens` tokens in whole pages; no bytes behind them."""

    def __init__(self, sessions: int, tokens: int) -> None:
        self.tokens = tokens
        self.state = State(BrainConfig(hbm_bytes=1 << 30, host_bytes=0))
        self.state.clients["bench"] = Client("bench")
        self.scores = Scores(self.state)
        self._model = self.state.register_model("bench", Geometry(1, 1, 64, "bfloat16"))
        rng = np.random.default_rng(0)
        self.sessions = [self._session(rng) for _ in range(sessions)]
        self.scores.refresh()

    def _session(self, rng: np.random.Generator) -> Session:
        state, pages = self.state, self.state.pages
        session = Session(
            state.new_session_id(), "bench", self._model, SessionOptions(), Ladder.TIERED, {},
            state.policy.new_state(), set(), length=self.tokens, step=STEPS,
        )  # fmt: skip
        state.enroll(session)
        starts = range(0, self.tokens, PAGE_TOKENS)
        regions = rng.integers(0, len(Region), len(starts)).astype(np.int8)
        session.tokens.append(regions.repeat(PAGE_TOKENS)[: self.tokens], 0)
        mass = rng.random(self.tokens, np.float32)
        session.tokens.observe(mass / mass.sum(), 1)
        for start in starts:
            slot = pages.add(state.new_page_id(), self._model.index, session.id, 0, int(Ladder.TIERED))
            session.pages.append(slot)
            session.starts.append(start)
            session.counts.append(min(PAGE_TOKENS, self.tokens - start))
        pages.sealed[session.pages.view], pages.region[session.pages.view] = True, regions
        return session

    def step(self, one_in: int) -> None:
        """Every `one_in`th session decodes a token."""
        for session in self.sessions[::one_in]:
            session.stepped(1, self.state.now)

    # Ours ----------------------------------------------------------------------------------------------------

    def score(self) -> bool:
        self.scores.refresh()
        return True

    def choose(self) -> list[int]:
        pages = self.state.pages
        ready = self.scores.idle(pages.slots())
        return list(islice(self.scores.coldest_first(ready[pages.guard[ready] == Guard.NONE]), CHOSEN))

    # The peer --------------------------------------------------------------------------------------------------

    def plain_both(self) -> list[int]:
        self.plain_scores()
        return self.plain_choice()

    def plain_scores(self) -> None:
        config, pages = self.state.config, self.state.pages
        for session in self.sessions:
            slots, starts, counts = session.pages.view, session.starts.view, session.counts.view
            pages.score[slots] = np.add.reduceat(session.tokens.token_scores(session.step), starts) / counts
            guards: NDArray[np.int8] = pages.pin[slots]
            recent = starts + counts > session.length - config.recent_tokens
            guards[recent] = np.maximum(guards[recent], Guard.RECENT)
            guards[starts < config.sink_tokens] = Guard.EXACT
            pages.guard[slots] = guards

    def plain_choice(self) -> list[int]:
        pages = self.state.pages
        slots = np.flatnonzero(pages.live & pages.sealed & (pages.goal == 0) & (pages.guard == Guard.NONE))
        chosen: list[int] = slots[np.argsort(pages.score[slots], kind="stable")[:CHOSEN]].tolist()
        return chosen
