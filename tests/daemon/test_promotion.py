"""Claims about what comes back: in which order, how much at once, what is given up, what was for nothing."""

from __future__ import annotations

import numpy as np
import pytest

from tests.daemon.test_brain import append, opened
from tests.daemon.test_recall import ask, cold, fill_up, ids, observe, wait, with_cold_pages
from tests.stateful.world import SMALL, WorkerSession, World
from tierkv.daemon import events
from tierkv.daemon.acts import RETURNS
from tierkv.daemon.waste import HIGHEST_BAR
from tierkv.protocol import Ready
from tierkv.table import Kind

FRAME = SMALL.page_bytes


def coming_back(w: World) -> list[int]:
    """Slots of pages that moves are bringing back, as they began."""
    return [move.slot for move in w.brain.moves.flying.values() if move.act in RETURNS]


def slots(w: World, session: WorkerSession, rows: list[int]) -> list[int]:
    return [w.brain.state.pages.index[page] for page in ids(session, rows)]


def steps(w: World, session: WorkerSession, count: int) -> None:
    w.ask(events.Committed, session.client, session.id, session.length, (), count, np.zeros(0, np.int32))
    session.step += count


def room_for_all(**options: object) -> tuple[World, WorkerSession]:
    """Many cold pages, and HBM that has just become free."""
    w, session = with_cold_pages(pages=40, hbm_frames=40, **options)
    crowd = opened(w, ladder="exact")
    append(w, crowd, 33)
    w.settle()
    w.close(crowd)
    w.settle()
    assert len(cold(session)) > 12
    return w, session


def test_two_batches_are_on_their_way_and_the_next_begins_when_one_is_left() -> None:
    """Every page is read exact: a batch of four pages' bytes is four pages."""
    w, _ = room_for_all(promotion_batch=4 * FRAME)
    w.now += 1.0
    w.feed(events.Tick())
    assert len(coming_back(w)) == 8
    for left in (7, 6, 5, 4):
        w.finish_move(next(n for n, m in w.brain.moves.flying.items() if m.act in RETURNS))
        assert len(coming_back(w)) == left
    w.finish_move(next(n for n, m in w.brain.moves.flying.items() if m.act in RETURNS))
    assert len(coming_back(w)) == 8, "three were left; five are planned while they are copied"


def test_all_come_back_without_waiting_for_the_clock() -> None:
    w, session = room_for_all(promotion_batch=4 * FRAME)
    w.now += 1.0
    w.feed(events.Tick())
    w.settle()
    assert not cold(session)


def test_the_second_batch_is_left_to_steps_that_wait() -> None:
    w, session = room_for_all(promotion_batch=4 * FRAME)
    ask(w, session, cold(session)[:1], mass=0.01)
    w.now += 1.0
    w.feed(events.Tick())
    assert len(coming_back(w)) == 4


def test_of_two_sessions_that_wait_the_page_with_more_mass_comes_first() -> None:
    """One page at a time: of the first session one has begun when the second asks."""
    w, session = room_for_all(promotion_batch=1)
    rows = cold(session)
    w.fork(session)
    w.settle()
    child = max(w.sessions.values(), key=lambda one: one.id)
    ask(w, session, rows[:3], mass=0.1)
    ask(w, child, rows[5:6], mass=0.4)
    order = coming_back(w)
    while running := [n for n, m in w.brain.moves.flying.items() if m.act in RETURNS]:
        w.finish_move(running[0])
        order += coming_back(w)
    assert order == slots(w, session, [rows[0], rows[5], rows[1], rows[2]])


def test_another_request_takes_the_place_of_the_first_and_what_had_not_begun_is_given_up() -> None:
    w, session = room_for_all(promotion_batch=FRAME)
    rows = cold(session)
    first = ask(w, session, rows[:6], mass=0.5)
    begun = coming_back(w)
    assert len(begun) == 2
    second = ask(w, session, rows[6:8], mass=0.1)
    assert isinstance(w.answers.pop(first), Ready)
    assert w.brain.state.counters.prefetched["cancelled"] == 4
    seen: set[int] = set(begun)
    while second not in w.answers:
        w.finish_move(next(iter(w.moves)))
        w.adopt_plans(session, acknowledge=True)
        seen |= set(coming_back(w))
    assert seen == set(begun) | set(slots(w, session, rows[6:8]))
    wanted = w.brain.state.pages.wanted_until[slots(w, session, rows[2:6])]
    assert (wanted == 0).all(), "they hold nobody off any more"


def test_what_a_closed_session_waited_for_is_given_up() -> None:
    w, session = room_for_all(promotion_batch=FRAME)
    ask(w, session, cold(session)[:6], mass=0.5)
    assert len(coming_back(w)) == 2
    w.close(session)
    w.settle()
    assert not coming_back(w)
    assert w.brain.state.counters.prefetched["cancelled"] == 6


def test_a_page_that_leaves_soon_after_it_came_back_is_a_ping_pong() -> None:
    w, session = with_cold_pages(min_residency_steps=0)
    row = cold(session)[0]
    wait(w, session, ask(w, session, [row], mass=0.5))
    steps(w, session, 3)
    append(w, session, 60)
    assert session.rows[row].kind == Kind.NONE
    assert w.brain.state.counters.ping_pongs == w.brain.state.sessions[session.id].ledger.ping_pongs > 0


def test_a_page_that_stayed_long_is_none() -> None:
    w, session = with_cold_pages(min_residency_steps=0)
    fill_up(w)
    steps(w, session, 33)
    before = w.brain.state.counters.ping_pongs
    row = cold(session)[0]
    wait(w, session, ask(w, session, [row], mass=0.5))
    steps(w, session, 33)
    append(w, session, 60)
    assert session.rows[row].kind == Kind.NONE
    assert w.brain.state.counters.ping_pongs == before


@pytest.mark.parametrize(("bar", "mass", "comes"), [(0.0, 0.02, True), (8.0, 0.02, False), (8.0, 0.2, True)])
def test_a_bar_keeps_pages_of_little_mass_from_taking_anothers_place(
    bar: float, mass: float, comes: bool
) -> None:
    """Of 640 tokens a page of four gets 1/160 on average: .02 is a lift of 3.2, .2 of 32."""
    w, session = with_cold_pages(min_residency_steps=0)
    fill_up(w)
    row = cold(session)[0]
    for _ in range(8):
        session.step += 1
        w.brain.state.waste.bar = bar
        observe(w, session, {row: mass})
        w.now += 0.3
        w.feed(events.Tick())
        w.settle()
    assert session.rows[row].kind == (Kind.QUANTIZED if comes else Kind.NONE)
    assert (w.brain.state.counters.moved_pages["quantized", "host", "recall"] > 0) == comes


def test_free_room_is_filled_whatever_the_bar_says() -> None:
    w, session = room_for_all()
    w.brain.state.waste.bar = HIGHEST_BAR
    rows = cold(session)
    observe(w, session, dict.fromkeys(rows, 0.001))
    w.now += 1.0
    w.feed(events.Tick())
    w.settle()
    assert not cold(session)
    assert w.brain.state.counters.moved_pages["host", "quantized", "recall"] == 0, "none of them is a bet"
