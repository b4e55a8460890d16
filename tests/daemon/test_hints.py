"""Claims about what hints change, under a fake clock."""

from __future__ import annotations

import numpy as np
import pytest

from tests.daemon.test_brain import FRAME, append, kinds, opened, session_slots, world
from tests.stateful.world import SMALL, WorkerSession, World
from tierkv.daemon import events
from tierkv.daemon.pages import Guard
from tierkv.hint_messages import AgentHint, DependsOn, HintKind, Pause, Prefetch, Resume, Retain, Supersede
from tierkv.protocol import Done, Failure, SessionOptions
from tierkv.regions import Region
from tierkv.table import Kind


def hint(
    w: World, session: WorkerSession, given: HintKind | None, agent: AgentHint | None = None
) -> Done | Failure:
    result = w.ask(events.Hinted, session.client, session.id, given, agent)
    assert isinstance(result, Done | Failure)
    return result


def told(w: World, session: WorkerSession, given: HintKind | None, agent: AgentHint | None = None) -> None:
    assert isinstance(hint(w, session, given, agent), Done)


def pass_time(w: World, seconds: float, tick: float = 0.05) -> None:
    """Ticks, with every move ended at once."""
    stop = w.now + seconds
    while w.now < stop - 1e-9:
        w.now += tick
        w.feed(events.Tick())
        w.settle()


def resumes(w: World) -> dict[tuple[str, str], int]:
    return dict(w.brain.state.counters.resumes)


def until_cold(w: World, grows: WorkerSession, *watched: WorkerSession) -> None:
    """A session grows until another has a cold page."""
    while not any(Kind.NONE in kinds(session) for session in watched):
        append(w, grows, 4)
        w.settle()


def squeeze(w: World, first: WorkerSession, second: WorkerSession) -> None:
    """The other session grows until pages of `first`, which is paused, lie in host memory; then it lets go."""
    until_cold(w, second, first)
    w.crop(second, 4)
    w.settle()
    assert Kind.NONE in kinds(first)


def two_sessions(pages: int = 8, frames: int = 12) -> tuple[World, WorkerSession, WorkerSession]:
    w = world(hbm_frames=frames, host_frames=200)
    first, second = opened(w), opened(w)
    append(w, first, pages)
    w.settle()
    return w, first, second


# Pauses ----------------------------------------------------------------------------------------------------------


def test_a_paused_sessions_pages_leave_before_any_of_a_session_that_runs() -> None:
    w, first, second = two_sessions()
    told(w, first, Pause(600.0))
    append(w, second, 8)
    w.settle()
    assert Kind.QUANTIZED in kinds(first) and Kind.NONE not in kinds(first), "low-bit ones are attendable"
    assert set(kinds(second)) == {Kind.EXACT}
    until_cold(w, second, first, second)
    assert Kind.NONE in kinds(first) and Kind.NONE not in kinds(second)
    assert all(row.host_kind for row in first.rows if row.kind == Kind.NONE), "they lie in host memory"


def test_without_pressure_a_paused_session_keeps_everything() -> None:
    w, first, _ = two_sessions()
    told(w, first, Pause(600.0))
    pass_time(w, 5.0)
    assert set(kinds(first)) == {Kind.EXACT}


def test_sinks_and_the_recent_window_of_a_paused_session_give_way_too_and_are_guarded_again_after() -> None:
    w, first, second = two_sessions()
    told(w, first, Pause(600.0))
    while kinds(first)[0] != Kind.NONE:
        append(w, second, 4)
        w.settle()
    guards = w.brain.state.pages.guard[session_slots(w, first)]
    assert set(guards.tolist()) == {Guard.NONE}
    assert kinds(first)[0] == Kind.NONE
    told(w, first, Resume())
    w.brain.scores.refresh()
    guards = w.brain.state.pages.guard[session_slots(w, first)]
    assert guards[0] == Guard.EXACT and guards[-1] == Guard.RECENT


def test_the_session_that_resumes_last_gives_way_first() -> None:
    w = world(hbm_frames=12, host_frames=200)
    near, far, runs = opened(w), opened(w), opened(w)
    append(w, near, 8)
    append(w, far, 8)
    w.settle()
    told(w, near, Pause(60.0))
    told(w, far, Pause(900.0))
    until_cold(w, runs, near, far)
    assert Kind.NONE in kinds(far) and Kind.NONE not in kinds(near)


def test_pages_are_back_before_the_expected_resume_and_the_resume_counts_as_ready() -> None:
    w, first, second = two_sessions()
    told(w, first, Pause(20.0))
    squeeze(w, first, second)
    pass_time(w, 5.0)
    assert Kind.NONE in kinds(first), "it is too early"
    pass_time(w, 10.0)
    assert Kind.NONE not in kinds(first)
    told(w, first, Resume())
    assert resumes(w) == {("ready", "hinted"): 1}
    assert w.brain.session_stats(first.id)["resumes_ready"] == 1


def test_an_early_resume_is_late_for_its_pages_which_come_at_once() -> None:
    w, first, second = two_sessions()
    told(w, first, Pause(900.0))
    squeeze(w, first, second)
    told(w, first, Resume())
    assert resumes(w) == {("late", "hinted"): 1}
    w.settle()
    w.settle()
    assert Kind.NONE not in kinds(first)


def test_what_returns_displaces_no_page_of_a_running_session_that_gets_more_attention() -> None:
    """The running one has all of HBM, as low-bit pages with mass; the paused one's pages had none."""
    w, first, second = two_sessions(pages=8, frames=12)
    told(w, first, Pause(5.0))
    append(w, second, 90)
    w.settle()
    mass = np.full(second.length, 1 / second.length, np.float32)
    w.ask(events.Observed, "a", second.id, 1, mass)
    warm = [row for row, kind in enumerate(kinds(second)) if kind != Kind.NONE]
    assert kinds(first).count(Kind.NONE) >= 7
    pass_time(w, 5.0)
    assert all(kinds(second)[row] != Kind.NONE for row in warm)


def test_any_step_resumes() -> None:
    w, first, _ = two_sessions()
    told(w, first, Pause(60.0))
    append(w, first, 1)
    assert resumes(w) == {("ready", "hinted"): 1}
    told(w, first, Resume())  # it has resumed already: nothing is counted twice
    assert resumes(w) == {("ready", "hinted"): 1}


def test_a_tools_duration_is_learned_from_its_pauses() -> None:
    w, first, _ = two_sessions()
    for _ in range(12):
        told(w, first, Pause(tool="build"))
        w.now += 30.0
        told(w, first, Resume())
    told(w, first, Pause(tool="build"))
    absence = w.brain.state.absent[first.id]
    assert absence.known == "learned"
    assert absence.duration.median == pytest.approx(30.0, rel=0.1)
    assert absence.duration.spread < 0.5
    told(w, first, Resume())
    told(w, first, Pause(tool="other"))
    assert w.brain.state.absent[first.id].known == "unknown"


def test_a_session_past_its_ttl_is_not_expected_back() -> None:
    w, first, second = two_sessions()
    told(w, first, Pause(4.0), AgentHint(ttl=1.0))
    squeeze(w, first, second)
    pass_time(w, 8.0)
    assert Kind.NONE in kinds(first)
    told(w, first, Resume())
    w.settle()
    w.settle()
    assert Kind.NONE not in kinds(first), "it came back all the same"


def test_a_page_that_a_running_fork_shares_is_not_a_paused_ones() -> None:
    w, first, second = two_sessions()
    w.fork(first)
    w.settle()
    told(w, first, Pause(600.0))
    append(w, second, 14)
    w.settle()
    assert kinds(first)[0] == Kind.EXACT, "the sink of the fork, which runs"
    assert Kind.NONE not in kinds(first), "nothing of what the fork attends has left"


def test_a_paused_session_that_closes_is_forgotten() -> None:
    w, first, _ = two_sessions()
    told(w, first, Pause(60.0))
    w.close(first)
    pass_time(w, 0.2)
    assert not w.brain.state.absent
    assert w.brain.snapshot().paused == 0


# Spans and seconds -------------------------------------------------------------------------------------------------


def with_cold(pages: int = 60) -> tuple[World, WorkerSession]:
    """More than ten frames hold as low-bit pages; nothing comes back by itself, for there is no room."""
    w = world(hbm_frames=10, host_frames=400)
    session = opened(w)
    append(w, session, pages)
    w.settle()
    assert Kind.NONE in kinds(session)
    return w, session


def cold_rows(session: WorkerSession) -> list[int]:
    return [row for row, kind in enumerate(kinds(session)) if kind == Kind.NONE]


def test_prefetch_brings_a_span_back_over_pages_with_less_attention() -> None:
    w, session = with_cold()
    row = cold_rows(session)[0]
    w.brain.state.pages.mass[session_slots(w, session)[row]] = 0.5
    told(w, session, Prefetch(4 * row, 4 * row + 4))
    pass_time(w, 1.0)
    assert kinds(session)[row] == Kind.QUANTIZED


def test_prefetch_of_a_region_leaves_the_others_where_they_are() -> None:
    w = world(hbm_frames=12, host_frames=400)
    session, other = opened(w), opened(w)
    append(w, session, 8, Region.TOOL_OUT)
    append(w, session, 8, Region.USER)
    w.settle()
    told(w, session, Pause(1e5))
    append(w, other, 90)
    w.settle()
    w.close(other)
    w.brain.promotion.tick = lambda: None  # type: ignore[method-assign]  # else the rest comes back, too
    before = kinds(session)
    assert before.count(Kind.NONE) > 8
    told(w, session, Prefetch(0, session.length, int(Region.TOOL_OUT)))
    pass_time(w, 1.0)
    assert Kind.NONE not in kinds(session)[:8]
    assert kinds(session)[8:] == before[8:]


def test_retained_pages_do_not_leave_until_the_seconds_are_over() -> None:
    w = world(hbm_frames=10, host_frames=400)
    session = opened(w)
    append(w, session, 8)
    told(w, session, Retain(30.0))
    append(w, session, 60)
    w.settle()
    assert Kind.NONE not in kinds(session)[:8]
    w.now += 31.0
    append(w, session, 40)
    w.settle()
    assert Kind.NONE in kinds(session)[:8]


def test_retention_is_capped_by_the_configuration() -> None:
    w = world(hbm_frames=10, host_frames=400, retain_most=60.0)
    session = opened(w)
    append(w, session, 4)
    told(w, session, Retain(1e6))
    slots = session_slots(w, session)
    assert (w.brain.state.pages.retained_until[slots] == w.now + 60.0).all()


def test_more_than_the_quota_is_not_retained_and_says_so() -> None:
    w = world(hbm_frames=10, host_frames=400, pin_quota=0.1)
    session = opened(w)
    append(w, session, 30)
    result = hint(w, session, Retain(30.0))
    assert isinstance(result, Failure) and result.code == "out-of-capacity"
    assert not w.brain.state.pages.retained_until.any()


def test_superseded_pages_go_to_host_first_and_score_nothing() -> None:
    w, first, second = two_sessions()
    told(w, first, Supersede(4, 20))  # rows 1 to 4
    append(w, second, 8)
    w.settle()
    assert [row for row, kind in enumerate(kinds(first)) if kind == Kind.NONE] == [1, 2, 3, 4]
    w.brain.scores.refresh()
    assert (w.brain.state.pages.score[session_slots(w, first)[1:5]] == 0).all()
    assert w.brain.snapshot().counters.dropped_pages.total() == 0


def test_a_page_with_other_tokens_is_not_superseded() -> None:
    w, first, _ = two_sessions()
    told(w, first, Supersede(2, 11))  # all of row 1, half of rows 0 and 2
    stale = w.brain.state.pages.stale[session_slots(w, first)]
    assert np.flatnonzero(stale).tolist() == [1]


def test_what_the_present_step_depends_on_gives_way_last() -> None:
    """Of equal pages the first ones go first: unless the step depends on them."""
    w = world(hbm_frames=10, host_frames=400)
    session = opened(w)
    append(w, session, 8)
    told(w, session, DependsOn(4, 20))  # rows 1 to 4
    append(w, session, 50)
    w.settle()
    assert Kind.NONE not in kinds(session)[1:5]
    assert Kind.NONE in kinds(session)[5:8]


def test_a_step_depends_on_its_parents_tokens_and_gets_them_back() -> None:
    w = world(hbm_frames=10, host_frames=400)
    session = opened(w)
    append(w, session, 2)
    told(w, session, None, AgentHint(workflow_id="w", step_id="plan"))
    append(w, session, 3)  # tokens 8 to 20, rows 2 to 4
    told(w, session, None, AgentHint(workflow_id="w", step_id="work"))
    append(w, session, 60)
    w.settle()
    assert Kind.NONE in kinds(session)[2:5]
    slots = session_slots(w, session)
    w.brain.state.pages.mass[slots[2:5]] = 0.1
    told(w, session, None, AgentHint(workflow_id="w", step_id="more", parent_step_id="plan"))
    pass_time(w, 1.0)
    assert Kind.NONE not in kinds(session)[2:5]
    assert np.flatnonzero(w.brain.state.pages.linked[slots]).tolist() == [2, 3, 4]
    told(w, session, None, AgentHint(workflow_id="w", step_id="last"))
    assert not w.brain.state.pages.linked[slots].any(), "the link was the step's"


def test_an_envelope_with_a_tools_duration_pauses() -> None:
    w, first, _ = two_sessions()
    told(w, first, None, AgentHint(step_id="s", expected_tool_duration_ms=2500.0))
    assert w.brain.state.absent[first.id].duration.median == pytest.approx(2.5)


@pytest.mark.parametrize("kind", [Prefetch, Supersede, DependsOn])
@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 3), (5, 2), (0, 49), (1 << 40, 1 << 41)])
def test_tokens_that_are_not_there_are_refused_and_nothing_changes(
    kind: type[Prefetch | Supersede | DependsOn], start: int, stop: int
) -> None:
    w, first, _ = two_sessions()
    before = {name: getattr(w.brain.state.pages, name).tobytes() for name in w.brain.state.pages._arrays}
    result = hint(w, first, kind(start, stop), AgentHint(step_id="next"))
    assert isinstance(result, Failure) and result.code == "request" and "committed tokens" in result.message
    assert before == {name: getattr(w.brain.state.pages, name).tobytes() for name in before}
    assert first.rows and w.brain.state.sessions[first.id].links.present == ("", "")


def test_hints_of_another_workers_session_are_refused() -> None:
    w, first, _ = two_sessions()
    w.attach("b")
    result = w.ask(events.Hinted, "b", first.id, Pause(1.0))
    assert isinstance(result, Failure) and result.code == "unknown-session"


def test_a_log_with_hints_replays_to_the_same_brain() -> None:
    w, first, second = two_sessions()
    told(w, first, Pause(20.0, "build"))
    append(w, second, 14)
    pass_time(w, 19.0)
    told(w, first, Resume())
    again = type(w.brain).replay(w.config, w.brain.log)
    assert again.snapshot().flat() == w.brain.snapshot().flat()


def test_a_session_with_a_budget_of_its_own_pauses_and_comes_back() -> None:
    w = world(hbm_frames=16, host_frames=200)
    first = w.open("a", SMALL, SessionOptions(hbm_budget=8 * FRAME))
    assert first is not None
    append(w, first, 12)
    w.settle()
    told(w, first, Pause(3.0))
    second = opened(w)
    append(w, second, 14)
    pass_time(w, 2.8)
    append(w, first, 2)
    assert sum(resumes(w).values()) == 1
    assert w.brain.session_stats(first.id)["hbm_bytes"] <= 8 * FRAME


# What is held for a resume -----------------------------------------------------------------------------------------


def observed(w: World, session: WorkerSession, warm: list[int]) -> None:
    """Nearly all attention on these rows."""
    mass = np.full(session.length, 1e-4, np.float32)
    for row in warm:
        mass[4 * row : 4 * row + 4] = 1.0
    w.ask(events.Observed, session.client, session.id, session.step, mass / mass.sum())


def test_a_resume_is_ready_when_its_working_set_is_there_whatever_else_it_had() -> None:
    w, first, second = two_sessions()
    observed(w, first, [2, 3, 4])
    told(w, first, Pause(600.0))
    absence = w.brain.state.absent[first.id]
    assert set(absence.pages[: absence.working].tolist()) == set(session_slots(w, first)[2:5])
    until_cold(w, second, first)
    assert all(kinds(first)[row] != Kind.NONE for row in (2, 3, 4)), "what is worth least has left first"
    told(w, first, Resume())
    assert resumes(w) == {("ready", "hinted"): 1}


def test_what_came_back_stays_until_the_resume_though_others_ask_for_room() -> None:
    """It gives way by its score, as of the pause, and not before all others: a running session grows meanwhile."""
    w, first, second = two_sessions()
    observed(w, first, [2, 3, 4])
    told(w, first, Pause(20.0))
    squeeze(w, first, second)
    pass_time(w, 12.0)
    assert w.brain.state.absent[first.id].near
    held = np.flatnonzero(w.brain.state.pages.held).tolist()
    assert held == sorted(session_slots(w, first)[2:5])
    before = w.brain.state.counters.moved_pages["host", "quantized", "resume"]
    for _ in range(6):
        append(w, second, 2)
        pass_time(w, 0.5)
    assert all(kinds(first)[row] != Kind.NONE for row in (2, 3, 4))
    moved = w.brain.state.counters.moved_pages["host", "quantized", "resume"]
    assert moved - before <= 3, "nothing comes and goes"


def test_held_pages_are_let_go_when_the_session_runs_or_is_not_expected_any_more() -> None:
    w, first, _ = two_sessions()
    observed(w, first, [1])
    for seconds in (15.0, 200.0):
        told(w, first, Pause(20.0))
        pass_time(w, 15.0)
        assert w.brain.state.pages.held.any()
        pass_time(w, seconds - 15.0, tick=1.0)
        if seconds == 15.0:
            told(w, first, Resume())
        assert not w.brain.state.pages.held.any()


def test_silence_is_taken_for_a_pause_only_where_that_is_predicted() -> None:
    for predict in (False, True):
        w = world(hbm_frames=12, host_frames=200, predict=predict)
        first = opened(w)
        append(w, first, 4)
        pass_time(w, 4.0)
        assert (first.id in w.brain.state.absent) is predict
        append(w, first, 1)
        assert resumes(w) == ({("ready", "predicted"): 1} if predict else {})
