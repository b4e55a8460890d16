"""Claims about what returns cost and wait for, and what sessions that share pages know of each other's pauses."""

from __future__ import annotations

import numpy as np
import pytest

from tests.daemon.test_brain import append, kinds, opened, session_slots, world
from tests.daemon.test_hints import observed, pass_time, squeeze, told, two_sessions, until_cold
from tests.stateful.world import WorkerSession, World
from tierkv.daemon import events
from tierkv.daemon.returns import FIRST_PAGE_SECONDS, Returns
from tierkv.hint_messages import AgentHint, Pause, Prefetch, Resume
from tierkv.table import Kind


def forked(w: World, parent: WorkerSession) -> WorkerSession:
    before = set(w.sessions)
    w.fork(parent)
    w.settle()
    (child,) = set(w.sessions) - before
    return w.sessions[child]


# Sessions that share pages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", ["close", "crop"])
def test_pages_that_only_a_paused_session_names_any_more_are_a_paused_ones(leaves: str) -> None:
    w, first, _ = two_sessions()
    child = forked(w, first)
    told(w, first, Pause(600.0), AgentHint(reuse_hint="unlikely"))
    back_at = w.brain.state.pages.back_at
    slots = session_slots(w, first)
    assert not back_at[slots].any(), "the fork runs"
    if leaves == "close":
        w.close(child)
    else:
        w.crop(child, 4)
    assert (back_at[slots][1:] > 0).all()


def test_what_was_held_for_a_session_is_let_go_when_it_closes_though_a_fork_names_it() -> None:
    w, first, _ = two_sessions()
    forked(w, first)
    observed(w, first, [2, 3])
    told(w, first, Pause(20.0))
    pass_time(w, 15.0)
    assert w.brain.state.pages.held.any()
    w.close(first)
    assert not w.brain.state.pages.held.any()


def test_a_shared_page_is_wanted_when_the_soonest_of_its_sessions_is_and_held_if_any_is_near() -> None:
    """Against a look at every page and session."""
    w, first, _ = two_sessions()
    children = [forked(w, first) for _ in range(3)]
    observed(w, first, [2, 3])
    told(w, first, Pause(20.0))
    for child, seconds in zip(children, (5.0, 60.0, 600.0), strict=True):
        observed(w, child, [4, 5])
        told(w, child, Pause(seconds))
    state = w.brain.state
    for seconds in (1.0, 3.0, 12.0, 60.0):
        pass_time(w, seconds)
        for session in (first, *children):
            for slot in session_slots(w, session):
                named = [n for n, one in state.sessions.items() if slot in one.pages.view]
                assert state.pages.back_at[slot] == min(
                    state.absent[n].back_at if n in state.absent else 0.0 for n in named
                )
                near = [state.absent[n] for n in named if n in state.absent and state.absent[n].near]
                assert state.pages.held[slot] == any(slot in one.pages for one in near)


def test_a_tick_marks_a_family_of_forks_once_however_many_of_them_are_paused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w, first, _ = two_sessions()
    family = [first, *(forked(w, first) for _ in range(5))]
    for session in family:
        told(w, session, Pause(20.0))
    marked = []
    real = w.brain.state.mark_absence
    monkeypatch.setattr(w.brain.state, "mark_absence", lambda s: (marked.append(s.id), real(s)))
    w.now += 15.0  # all of them are near, and expected at another time
    w.feed(events.Tick())
    assert all(w.brain.state.absent[session.id].near for session in family)
    assert len(marked) == 1


# Waiting ---------------------------------------------------------------------------------------------------------


def test_time_that_a_return_waits_while_others_want_room_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the next paused sessions would be taken for near minutes before they are."""
    w, first, second = two_sessions()
    observed(w, first, list(range(8)))
    told(w, first, Pause(20.0))
    squeeze(w, first, second)
    relieve = w.brain.pressure.relieve
    with monkeypatch.context() as asked:

        def short() -> bool:
            on_its_way = relieve()
            w.brain.pressure.short = True
            return on_its_way

        asked.setattr(w.brain.pressure, "relieve", short)
        pass_time(w, 15.0)
        assert w.brain.state.absent[first.id].near
        assert Kind.NONE in kinds(first)
    pass_time(w, 1.0)
    assert Kind.NONE not in kinds(first)
    assert w.brain.returns.page_seconds <= FIRST_PAGE_SECONDS


def test_a_want_that_nothing_gives_way_for_holds_back_none_that_is_worth_more() -> None:
    w = world(hbm_frames=10, host_frames=800)
    first, second, runs = opened(w), opened(w), opened(w)
    append(w, first, 12)
    append(w, second, 12)
    observed(w, second, [2, 3, 4, 5, 6])
    told(w, second, Pause(1e5))
    append(w, runs, 90)
    w.settle()
    even = np.full(runs.length, 1 / runs.length, np.float32)
    w.ask(events.Observed, runs.client, runs.id, runs.step, even)
    w.brain.promotion.tick = lambda: None  # type: ignore[method-assign]  # else it brings them, too
    w.brain.state.pages.mass[session_slots(w, first)] = 0.0
    assert kinds(first).count(Kind.NONE) > 8
    assert all(kinds(second)[row] == Kind.NONE for row in range(2, 7))
    told(w, first, Prefetch(0, first.length))
    pass_time(w, 0.5)
    told(w, second, Resume())
    pass_time(w, 1.0)
    assert Kind.NONE not in kinds(second)[2:7]
    assert kinds(first).count(Kind.NONE) > 8, "what is worth nothing takes no place"


def test_while_no_move_may_begin_nobodys_pages_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of sessions may want pages, and this is asked at every event."""
    w, first, second = two_sessions()
    told(w, first, Pause(600.0))
    until_cold(w, second, first)
    w.crop(second, 4)
    told(w, first, Resume())
    looked = []
    monkeypatch.setattr(Returns, "_missing", lambda *given: looked.append(given) or [])
    monkeypatch.setattr(w.brain.moves, "full", lambda: True)
    w.feed(events.Acked(first.client, first.id, 0))
    assert not looked


# Prediction --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("predict", [False, True])
def test_a_session_that_is_merely_slow_keeps_sinks_and_last_tokens_exact_unless_silence_is_predicted(
    predict: bool,
) -> None:
    """Why that is off by default (docs/decisions/0011): a step every four seconds is a person's pace."""
    w = world(hbm_frames=16, host_frames=400, predict=predict)
    slow, other = opened(w), opened(w)
    append(w, slow, 16)
    append(w, other, 8)
    w.settle()
    for _ in range(5):
        pass_time(w, 4.0)
        append(w, other, 4)
        w.settle()
        assert Kind.NONE not in kinds(slow)
        append(w, slow, 1)
        w.settle()
    pass_time(w, 4.0)
    append(w, other, 4)
    w.settle()
    guarded = (kinds(slow)[0], kinds(slow)[-1])
    assert (guarded == (Kind.EXACT, Kind.EXACT)) is not predict
