"""A session's own budget: what gives way for it, and in which order."""

from __future__ import annotations

import pytest

from tests.daemon.test_brain import FRAME, append, kinds, opened, world
from tests.stateful.world import WorkerSession, World
from tierkv.daemon import events
from tierkv.protocol import Failure, Reserved
from tierkv.regions import Region, Run
from tierkv.table import Kind

BUDGET = 24
SINKS, RECENT = 1, 2
"""Pages of `world`'s sinks and recent window."""


def read_prompt(w: World, session: WorkerSession, pages: int, slice_pages: int) -> None:
    """In slices, each of which waits for room as a worker does."""
    for _ in range(0, pages, slice_pages):
        for _ in range(200):
            result = w.reserve(session, slice_pages)
            if isinstance(result, Reserved):
                break
            assert isinstance(result, Failure) and result.code == "backpressure", result
            w.now += 0.01
            for number in list(w.moves)[:1]:  # one after the other, each of them acknowledged
                w.finish_move(number)
            w.adopt_plans(session, acknowledge=True)
        else:
            raise AssertionError("no room")
        w.write(session, [Run(Region.USER, 4 * slice_pages)], 0)
        w.adopt_plans(session, acknowledge=True)
        assert w.brain.session_stats(session.id)["hbm_bytes"] <= BUDGET * FRAME


def fitting(w: World, session: WorkerSession) -> int:
    """Pages that a budget holds as low-bit ones, beside those that stay exact, an open slice and what is in transit."""
    item = w.brain.state.sessions[session.id].model.quant.item
    exact = SINKS + RECENT + 6
    return (BUDGET - exact - 1) * FRAME // item + exact


@pytest.mark.parametrize("slice_pages", [1, 3, 6])
def test_no_page_leaves_hbm_that_the_budget_holds_in_low_bit(slice_pages: int) -> None:
    w = world(hbm_frames=60, host_frames=200)
    session = opened(w, hbm_budget=BUDGET * FRAME)
    pages = fitting(w, session) // slice_pages * slice_pages
    assert pages > 2 * BUDGET  # exact they would not fit
    read_prompt(w, session, pages, slice_pages)
    w.settle()
    assert Kind.NONE not in kinds(session)
    assert kinds(session).count(Kind.QUANTIZED) > BUDGET


def test_what_the_budget_does_not_hold_in_low_bit_either_leaves_and_few_stay_exact() -> None:
    w = world(hbm_frames=60, host_frames=400)
    session = opened(w, hbm_budget=BUDGET * FRAME)
    pages = 2 * fitting(w, session)
    read_prompt(w, session, pages // 3 * 3, 3)
    w.settle()
    found = kinds(session)
    assert Kind.NONE in found
    assert found.count(Kind.EXACT) <= BUDGET // 3, "cold pages make way for few exact ones"


def test_where_only_exact_pages_are_the_refusal_says_so() -> None:
    w = world(hbm_frames=8, host_frames=50)
    session = opened(w, ladder="exact")
    refusal = None
    for _ in range(12):
        refusal = w.reserve(session, 1)
        if isinstance(refusal, Failure):
            break
        w.write(session, [Run(Region.USER, 4)], 0)
    assert isinstance(refusal, Failure) and refusal.code == "out-of-capacity"
    assert 'has the ladder "exact": none of its pages ever gives way' in refusal.message


def test_a_pinned_page_that_the_codec_refused_comes_back_exactly_or_not_at_all() -> None:
    w = world(hbm_frames=60, host_frames=200)
    session = opened(w, hbm_budget=BUDGET * FRAME)
    w.writes_poison = True
    append(w, session, 2 * BUDGET)
    w.settle()
    cold = [index for index, kind in enumerate(kinds(session)) if kind == Kind.NONE]
    assert cold
    w.crop(session, session.length - 16)  # the budget has room for four pages more
    first = 4 * cold[0]
    w.ask(events.Pinned, "a", session.id, first, first + 4, "attendable")
    ended = w.brain.snapshot().counters.failed_moves.total()
    for _ in range(20):
        w.now += 0.3
        w.feed(events.Tick())
        w.settle()
    assert w.brain.snapshot().counters.failed_moves.total() == ended, "it was encoded again, in vain"
    assert kinds(session)[cold[0]] == Kind.EXACT
