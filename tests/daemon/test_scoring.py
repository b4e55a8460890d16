"""Scores and guards of the pages against a loop over sessions and pages, and the order in which pages are chosen."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.daemon.brain_config import BrainConfig
from tierkv.daemon.pages import Goal, Guard, Ladder
from tierkv.daemon.policy.exponential import _score_sessions
from tierkv.daemon.scoring import Scores, _ascending, warm_up
from tierkv.daemon.scoring_kernels import clear, settle
from tierkv.daemon.sessions import Client, Session
from tierkv.daemon.state import State
from tierkv.geometry import Geometry
from tierkv.protocol import SessionOptions
from tierkv.regions import Region

POLICIES = ("memdecay", "memdecay-lift", "ema", "streaming")


def a_state(policy: str, rng: np.random.Generator, sessions: int) -> State:
    """Sessions of three clients, one of them silent; some are forks that share their parent's whole pages."""
    state = State(BrainConfig(1 << 30, 0, policy=policy, recent_tokens=20, sink_tokens=5))
    state.now = 100.0
    for name in ("a", "b", "silent"):
        state.clients[name] = Client(name, quarantined=name == "silent")
    model = state.register_model("m", Geometry(1, 1, 64, "bfloat16"))
    for _ in range(sessions):
        parents = list(state.sessions.values())
        parent = parents[int(rng.integers(len(parents)))] if parents and rng.random() < 0.4 else None
        ladder = Ladder(int(rng.integers(3)))
        session = Session(
            state.new_session_id(), str(rng.choice(["a", "b", "silent"])), model, SessionOptions(), ladder, {},
            parent.tokens.copy() if parent else state.policy.new_state(), parent.family if parent else set(),
            step=int(rng.integers(50)), active_at=100.0 - float(rng.choice([0, 30])), step_rate=2.0,
        )  # fmt: skip
        state.enroll(session)
        if parent:
            session.pages, session.starts = parent.pages.copy(), parent.starts.copy()
            session.counts, session.length = parent.counts.copy(), parent.length
            for slot in session.pages.view.tolist():
                state.share(slot, session)
        for _ in range(int(rng.integers(0, 30))):
            count, region = int(rng.integers(1, 17)), int(rng.integers(len(Region)))
            slot = state.pages.add(state.new_page_id(), 1, session.id, 0, ladder)
            state.pages.pin[slot] = rng.choice([Guard.NONE, Guard.ATTENDABLE, Guard.EXACT], p=[0.8, 0.1, 0.1])
            session.pages.append(slot)
            session.starts.append(session.length)
            session.counts.append(count)
            session.length += count
            session.tokens.append(np.full(count, region, np.int8), session.step)
        if session.length:
            session.tokens.observe(
                rng.dirichlet(np.full(session.length, 0.2)).astype(np.float32), session.step
            )
        session.step += 5
    return state


def by_hand(state: State) -> tuple[dict[int, float], dict[int, int]]:
    scores: dict[int, float] = {}
    guards: dict[int, int] = {}
    for session in state.sessions.values():
        step = session.clock(state.now)
        tokens = session.tokens.token_scores(step)
        for slot, start, count in zip(
            session.pages.view.tolist(),
            session.starts.view.tolist(),
            session.counts.view.tolist(),
            strict=True,
        ):
            page = tokens[start : start + count]
            score = float(page.mean())
            if state.policy.aggregate == "relief":
                given = state.policy.importance(session.tokens, step, slice(start, start + count))
                score -= float(given.min())
            guard = int(state.pages.pin[slot])
            if session.ladder is Ladder.TIERED and start + count > session.length - 20:
                guard = max(guard, Guard.RECENT)
            if state.clients[session.client].quarantined or (session.ladder is Ladder.TIERED and start < 5):
                guard = Guard.EXACT
            scores[slot] = max(scores.get(slot, -np.inf), score)
            guards[slot] = max(guards.get(slot, 0), guard)
    return scores, guards


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), sessions=st.integers(0, 9))
def test_a_page_has_the_highest_score_and_the_strictest_guard_of_its_sessions(
    policy: str, seed: int, sessions: int
) -> None:
    state = a_state(policy, np.random.default_rng(seed), sessions)
    Scores(state).refresh()
    scores, guards = by_hand(state)
    slots = sorted(scores)
    assert state.pages.score[slots] == pytest.approx([scores[s] for s in slots], rel=2e-5, abs=2e-6)
    assert state.pages.guard[slots].tolist() == [guards[s] for s in slots]
    assert not any(session.stale for session in state.sessions.values())


def test_only_what_changed_is_scored_again_with_its_family() -> None:
    state = a_state("memdecay", np.random.default_rng(3), 12)
    scores = Scores(state)
    scores.refresh()
    families = {frozenset(s.family) for s in state.sessions.values() if len(s.pages)}
    changed = max(families, key=len)
    assert len(changed) > 1 and len(families) > 1
    state.pages.score[:] = 7.0
    state.sessions[min(changed)].stale = True
    scores.refresh()
    for session in state.sessions.values():
        again = state.pages.score[session.pages.view] != 7.0
        assert again.all() if session.id in changed else not again.any()


def test_idle_sessions_are_scored_again_after_a_second() -> None:
    state = a_state("memdecay", np.random.default_rng(3), 12)
    scores = Scores(state)
    scores.refresh()
    state.pages.score[:] = 7.0
    state.now += 0.9
    scores.refresh()
    assert (state.pages.score == 7.0).all()
    state.now += 0.2
    scores.refresh()
    assert not (state.pages.score[state.pages.slots()] == 7.0).any()


def test_pages_that_are_open_doomed_underway_or_resting_are_not_idle() -> None:
    state = a_state("memdecay", np.random.default_rng(0), 3)
    pages, scores = state.pages, Scores(state)
    slots = pages.slots()
    assert len(slots) >= 8
    pages.sealed[slots] = True
    pages.sealed[slots[1]] = False
    pages.doomed[slots[2]] = True
    pages.goal[slots[3]] = Goal.HOST
    pages.retry_at[slots[4]] = state.now + 1
    pages.retry_at[slots[5]] = state.now
    assert scores.idle(slots[:7]).tolist() == slots[[0, 5, 6]].tolist()
    assert scores.idle(slots[:0]).tolist() == []


SCORES = st.lists(st.sampled_from([-np.inf, -2.5, -1e-30, -0.0, 0.0, 1e-30, 0.25, 1.0, 3e38]), max_size=60)


@settings(max_examples=200, deadline=None)
@given(scores=SCORES, seed=st.integers(0, 1000))
def test_ascending_is_a_stable_sort(scores: list[float], seed: int) -> None:
    slots = np.random.default_rng(seed).permutation(len(scores)).astype(np.int64)
    ordered = sorted(zip(slots.tolist(), scores, strict=True), key=lambda pair: pair[1])  # sorted is stable
    assert list(_ascending(slots, np.array(scores, np.float32))) == [slot for slot, _ in ordered]


def test_it_is_one_beyond_the_first_chunks_too() -> None:
    scores = np.random.default_rng(0).integers(0, 50, 10_000).astype(np.float32)
    slots = np.arange(10_000, 20_000)
    expected = slots[np.argsort(scores, kind="stable")].tolist()
    assert list(_ascending(slots, scores)) == expected
    assert list(islice(_ascending(slots, scores), 3000)) == expected[:3000]


def test_the_coldest_come_first_and_recalled_ones_that_are_still_wanted_last() -> None:
    state = a_state("memdecay", np.random.default_rng(0), 1)
    pages, scores = state.pages, Scores(state)
    slots = pages.slots()[:5]
    pages.score[slots] = [0.5, 0.1, 0.3, 0.1, 0.9]
    step = next(iter(state.sessions.values())).step
    pages.wanted_until[slots[1]], pages.wanted_until[slots[0]] = step + 3, step - 3
    assert list(scores.coldest_first(slots)) == slots[[3, 2, 0, 4, 1]].tolist()


def test_the_order_is_that_of_the_call_whatever_happens_meanwhile() -> None:
    state = a_state("memdecay", np.random.default_rng(0), 1)
    slots = state.pages.slots()[:4]
    state.pages.score[slots] = [3, 1, 2, 4]
    order = Scores(state).coldest_first(slots)
    state.pages.score[slots] = 0
    assert list(order) == slots[[1, 2, 0, 3]].tolist()


def test_what_is_warmed_up_is_what_a_refresh_runs() -> None:
    warm_up()
    Scores(a_state("memdecay", np.random.default_rng(0), 2)).refresh()
    assert [len(kernel.signatures) for kernel in (_score_sessions, clear, settle)] == [1, 1, 1]  # type: ignore[attr-defined]
