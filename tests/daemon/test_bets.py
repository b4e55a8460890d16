"""Claims about pages that take others' places: which are used, which come into free room, what is forgotten."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.daemon.test_brain import append
from tests.daemon.test_recall import ask, cold, fill_up, ids, observe, wait, with_a_budget, with_cold_pages
from tierkv.daemon import events
from tierkv.daemon.pages import Outcome
from tierkv.table import Kind


def test_a_recalled_page_counts_as_used_once_it_is_attended_else_as_wasted() -> None:
    w, session = with_cold_pages(min_residency_steps=0)
    fill_up(w)
    used, wasted = cold(session)[:2]
    wait(w, session, ask(w, session, [used, wasted], mass=0.5))
    session.step += 1
    observe(w, session, {used: 0.3})
    counters = w.brain.state.counters
    assert (counters.prefetched["used"], counters.prefetched["wasted"]) == (1, 0)
    w.ask(events.Committed, session.client, session.id, session.length, (), 100, np.zeros(0, np.int32))
    append(w, session, 60)
    assert session.rows[wasted].kind == Kind.NONE
    assert (counters.prefetched["used"], counters.prefetched["wasted"]) == (1, 1)


def test_a_page_is_used_when_one_of_its_tokens_is() -> None:
    """Of 640 tokens the average gets 1/640. A fact is a token or two: the mean of its page's four says little."""
    w, session = with_cold_pages(min_residency_steps=0)
    fill_up(w)
    used, dull = cold(session)[:2]
    wait(w, session, ask(w, session, [used, dull], mass=0.5))
    starts = np.cumsum([0] + [len(row.stamps) for row in session.rows])
    mass = np.full(session.length, 0.9 / 640, np.float32)
    mass[starts[used]] = 2.1 / 640
    mass[starts[dull] : starts[dull] + 4] = 1.9 / 640
    session.step += 1
    w.ask(events.Observed, session.client, session.id, session.step, mass)
    states = [
        w.brain.state.pages.recalled[w.brain.state.pages.index[page]] for page in ids(session, [used, dull])
    ]
    assert states == [Outcome.USED, Outcome.PENDING]


def test_what_comes_into_free_room_is_no_bet() -> None:
    w, session = with_cold_pages(pages=110, min_residency_steps=0)
    fill_up(w)
    counters, rows = w.brain.state.counters, len(cold(session))
    w.crop(session, session.length - 80)
    fill_up(w)
    assert counters.prefetched["filled"] >= rows - len(cold(session)) > 0
    append(w, session, 60)
    assert counters.prefetched["wasted"] == 0


def test_a_step_that_needs_room_comes_before_the_pages_that_it_asked_for() -> None:
    """Under a budget what leaves for a reservation is not taken by pages that would leave again at once."""
    w, session = with_a_budget()
    w.reserve(session, 2)
    back = w.brain.state.counters.recalled_pages
    request = ask(w, session, cold(session)[:8], mass=0.9, seconds=60.0)
    while w.brain.pressure.demanded(w.brain.state.sessions[session.id]):
        assert w.brain.state.counters.recalled_pages == back
        for number in list(w.moves):
            w.finish_move(number)
        w.adopt_plans(session, acknowledge=True)
        w.now += 0.05
        w.feed(events.Tick())
    wait(w, session, request)


@given(known=st.lists(st.booleans(), min_size=1, max_size=30))
@settings(max_examples=20, deadline=None)
def test_a_cold_pages_mass_fades_while_nothing_is_told_of_it(known: list[bool]) -> None:
    """With recall off nothing ever is."""
    w, session = with_cold_pages(pages=110, hbm_frames=8, digest_share=0.0)
    row = cold(session)[0]
    slot = w.brain.state.pages.index[session.rows[row].page]
    start = sum(len(one.stamps) for one in session.rows[:row])
    w.brain.state.pages.mass[slot] = expected = 0.5
    for told in known:
        session.step += 1
        mass = np.full(session.length, np.nan, np.float32)
        mass[-1] = 0.5
        if told:
            mass[start : start + 4] = 0.05
        w.ask(events.Observed, session.client, session.id, session.step, mass)
        expected = 0.5 * (expected + 0.2) if told else 0.9 * expected
    assert w.brain.state.pages.mass[slot] == pytest.approx(expected, rel=1e-4)


def test_places_of_a_model_that_is_gone_are_no_bets() -> None:
    w, session = with_cold_pages(min_residency_steps=0)
    fill_up(w)
    index = w.brain.state.sessions[session.id].model.index
    w.brain.recall._places[index] = (
        3  # pages leave, and everything is closed before another takes their places
    )
    w.close(session)
    w.settle()
    assert index not in w.brain.state.models_by_index
    w.now += 1.0
    w.feed(events.Tick())
    assert w.brain.recall.open_bets() == 0
