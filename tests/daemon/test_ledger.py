"""What the ledger says of sessions and of all of them, by worked cases."""

from __future__ import annotations

import numpy as np
import pytest

from tests.daemon.test_recall import ask, cold, fill_up, observe, wait, with_cold_pages
from tests.stateful.world import WorkerSession, World
from tierkv.daemon import events
from tierkv.figures import SessionFigures
from tierkv.protocol import Audit
from tierkv.table import Kind


def figures(w: World, session: WorkerSession) -> SessionFigures:
    return next(one for one in w.brain.sessions() if one.session == session.id)


def tell(w: World, session: WorkerSession, mass: dict[int, float], blocked: float = 0.0) -> None:
    """An observation of the next step, with the seconds that steps were blocked before it."""
    session.step += 1
    tokens = np.zeros(session.length, np.float32)
    starts = np.cumsum([0] + [len(row.stamps) for row in session.rows])
    for row, value in mass.items():
        tokens[starts[row] : starts[row + 1]] = value / len(session.rows[row].stamps)
    w.ask(events.Observed, session.client, session.id, session.step, tokens, None, blocked)


def test_audits_are_averaged_and_none_is_no_number() -> None:
    w, session = with_cold_pages(pages=110)
    before = figures(w, session)
    assert (before.audits, before.attention_recall, before.missed_mass) == (0, None, None)
    observe(w, session, {0: 0.5}, Audit(0.75, 0.9, 0.25, 0.2, 3))
    session.step += 1
    observe(w, session, {0: 0.5}, Audit(0.5, 0.9, 0.5, 0.2, 4))
    told = figures(w, session)
    assert (told.audits, told.attention_recall, told.missed_mass) == (2, 0.625, 0.375)
    assert told.needed_cold_pages == w.brain.state.counters.needed_cold == 7
    assert w.brain.state.counters.missed_mass.mean == 0.375


def test_mass_that_estimates_give_to_cold_pages_is_the_latest_observations() -> None:
    w, session = with_cold_pages(pages=110)
    first, second = cold(session)[:2]
    warm = next(row for row, page in enumerate(session.rows) if page.kind != Kind.NONE)
    tell(w, session, {first: 0.25, warm: 0.5})
    assert figures(w, session).expected_mass == 0.25
    tell(w, session, {first: 0.125, second: 0.25, warm: 0.5})
    assert figures(w, session).expected_mass == 0.375
    assert w.brain.state.counters.expected_mass.mean == pytest.approx(0.3125)


def test_blocked_time_adds_up_by_session_and_in_all() -> None:
    w, session = with_cold_pages(pages=30)
    w.fork(session)
    child = max(w.sessions.values(), key=lambda one: one.id)
    steps = np.zeros(0, np.int32)
    w.ask(events.Committed, session.client, session.id, session.length, (), 4, steps)
    tell(w, session, {}, blocked=0.5)
    tell(w, session, {}, blocked=0.25)
    tell(w, child, {}, blocked=1.0)
    assert (figures(w, session).blocked_seconds, figures(w, child).blocked_seconds) == (0.75, 1.0)
    assert figures(w, session).blocked_ms_a_step == 750 / 4
    assert w.brain.snapshot().flat()["blocked_seconds"] == 1.75


def test_an_observation_that_is_sent_twice_counts_once() -> None:
    w, session = with_cold_pages(pages=30)
    tell(w, session, {}, blocked=0.5)
    session.step -= 1
    tell(w, session, {}, blocked=0.5)
    assert figures(w, session).blocked_seconds == 0.5


def test_outcomes_are_the_sessions_own() -> None:
    w, session = with_cold_pages(min_residency_steps=0)
    fill_up(w)
    filled = figures(w, session).prefetched["filled"]
    assert filled > 0
    used, wasted = cold(session)[:2]
    wait(w, session, ask(w, session, [used, wasted], mass=0.5))
    tell(w, session, {used: 0.3})
    w.fork(session)
    child = max(w.sessions.values(), key=lambda one: one.id)
    w.settle()
    late = ask(w, session, cold(session)[:1], mass=0.5, seconds=0.1)
    w.now += 0.2
    w.feed(events.Tick())
    assert w.answers.pop(late)
    told = {"used": 1, "late": 1, "wasted": 0, "cancelled": 0, "filled": filled}
    assert figures(w, session).prefetched == told
    assert set(figures(w, child).prefetched.values()) == {0}


def test_pages_and_bytes_are_those_of_stats() -> None:
    w, session = with_cold_pages(pages=110)
    told, stats = figures(w, session), w.brain.session_stats(session.id)
    assert told.pages == {tier: stats[f"pages_{tier}"] for tier in told.pages}
    assert told.pages["host"] == len(cold(session)) > 0
    assert (told.tokens, told.step, told.hbm_bytes) == (440, stats["step"], stats["hbm_bytes"])
    assert (told.client, told.model) == ("a", "model-2")


def test_pages_that_a_step_had_asked_for_count_for_the_bar_like_others() -> None:
    w, session = with_cold_pages(min_residency_steps=0)
    fill_up(w)
    asked, expected = cold(session)[:3], cold(session)[10]
    wait(w, session, ask(w, session, asked, mass=0.5))
    tell(w, session, dict.fromkeys(asked, 0.3))
    waste = w.brain.state.waste
    assert figures(w, session).prefetched["used"] == 3
    waste.count(wasted=True)
    assert waste.share == 0.25
    for _ in range(8):
        tell(w, session, {expected: 0.2})
        w.now += 0.3
        w.feed(events.Tick())
        w.settle()
    assert session.rows[expected].kind == Kind.QUANTIZED
    assert figures(w, session).prefetched["used"] == 4
    assert waste.share == 0.2
