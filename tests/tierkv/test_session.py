"""A session's steps: tokens that are taken back, forked or refused, and its end."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.faults.pages import SMALL, check, step, token_values, write
from tests.tierkv.local_daemon import PAGE, World, settled, table, until
from tierkv.errors import CapacityError, RequestError, UnknownSession
from tierkv.regions import Region, Run

# Tentative tokens ------------------------------------------------------------------------------------------------


def test_tokens_that_are_rolled_back_leave_pages_and_labels_for_the_next(world: World) -> None:
    world.service()
    client = world.client(reserve_ahead=0)
    session = client.open(SMALL, "m")
    step(client, session, 1, 10)
    session.label("tool_out", 40)
    session.begin(40)
    first = session.slots(10, 50)
    session.rollback(30)
    assert session.length == 30
    session.rollback(10)
    with pytest.raises(RequestError, match="use crop"):
        session.rollback(9)
    session.begin(40)  # a scout's replay: same pages, same region
    again = session.slots(10, 50)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    write(client, session, 1, 10, 50)
    session.commit()
    session.end()
    assert table(session) == [
        (Region.USER, 10),
        (Region.TOOL_OUT, 16),
        (Region.TOOL_OUT, 16),
        (Region.TOOL_OUT, 8),
    ]
    numbers = settled(client, session)
    assert (numbers["tokens"], numbers["pages_hbm"], numbers["blank_pages"]) == (50, 4, 0)


def test_default_labels_do_not_stick_to_tokens_that_were_rolled_back(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    session.begin(4)  # a draft
    session.rollback(0)
    step(client, session, 1, 1, steps=1)
    assert table(session) == [(Region.SCRATCHPAD, 1)]


def test_regions_of_a_step_name_what_no_label_does_and_do_not_wait(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    session.label("system", 5)
    given = [Run(Region.PLAN, 3), Run(Region.RETRIEVAL, 7), Run(Region.TOOL_OUT, 4)]
    session.reserve(20, given)
    session.begin(20, given)
    session.rollback(0)  # the label waits again
    session.begin(20, given)
    write(client, session, 1, 0, 20)
    session.commit()
    session.end()
    step(client, session, 1, 2)
    assert table(session) == [
        (Region.SYSTEM, 5), (Region.RETRIEVAL, 5), (Region.TOOL_OUT, 4), (Region.USER, 6 + 2),
    ]  # fmt: skip


def test_a_crop_below_the_horizon_forgets_committed_tokens(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    step(client, session, 1, 100)
    session.crop(40)  # into the third page, which is sealed
    assert (session.length, session.horizon) == (40, 40)
    assert settled(client, session)["tokens"] == 40
    step(client, session, 1, 30)
    assert table(session) == [
        (Region.USER, 16),
        (Region.USER, 16),
        (Region.USER, 8),
        (Region.USER, 16),
        (Region.USER, 14),
    ]
    assert settled(client, session)["tokens"] == 70
    session.crop(65)  # into the open page, which goes on
    step(client, session, 1, 5)
    assert table(session)[-1] == (Region.USER, 14)
    assert check(client, session, 1).wrong == 0


def test_a_crop_within_a_step_waits_for_what_the_step_committed(world: World) -> None:
    world.service()
    client = world.client(timeout=5.0)
    session = client.open(SMALL, "m")
    session.begin(40)
    write(client, session, 1, 0, 40)
    session.commit()
    start = time.monotonic()
    session.crop(20)
    assert time.monotonic() - start < 0.4  # not a heartbeat's wait
    session.end()
    assert settled(client, session)["tokens"] == session.length == 20


def test_a_crop_within_tentative_tokens_is_a_rollback(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    step(client, session, 1, 10)
    session.begin(10)
    session.crop(15)
    assert (session.length, session.horizon) == (15, 10)
    with pytest.raises(RequestError):
        session.crop(16)


def test_a_fork_shares_what_is_committed_and_goes_its_own_way(world: World) -> None:
    world.service()
    client = world.client()
    parent = client.open(SMALL, "m")
    step(client, parent, 1, 40)
    before = client.stats()["bytes_hbm"]
    child = parent.fork()
    assert (child.length, child.step, child.geometry) == (40, 0, SMALL)
    step(client, parent, 1, 20)
    step(client, child, 2, 20)  # tokens 40..59 of another seed
    shared = [parent.rows(32).offsets.tolist(), child.rows(32).offsets.tolist()]
    assert shared[0] == shared[1]
    assert parent.rows(60).offsets[2] != child.rows(60).offsets[2]
    assert check(client, parent, 1).wrong == 0
    for token, offset, slot in zip(range(60), *child.slots(0, 60), strict=True):
        page = client.hbm()[offset : offset + PAGE].view(np.float32).reshape(SMALL.shape)
        assert np.array_equal(page[:, :, :, slot], token_values(SMALL, 1 if token < 40 else 2, token))
    parent.close()
    until(lambda: client.stats()["sessions"] == 1)
    assert child.slots(0, 40)[0][:32].tolist() == [shared[0][0]] * 16 + [shared[0][1]] * 16
    child.close()
    until(lambda: client.stats()["bytes_hbm"] == 0)
    assert before > 0


# What is expected ------------------------------------------------------------------------------------------------


def test_pages_of_the_step_that_is_expected_are_there_before_this_one_ends(world: World) -> None:
    """20 tokens fill a page and a quarter of 16; 48 more need three further pages."""
    world.service()
    client = world.client(reserve_ahead=0)
    session = client.open(SMALL, "m")
    session.begin(20)
    assert client.stats(session.id)["blank_pages"] == 2
    session.expect(48)
    assert client.stats(session.id)["blank_pages"] == 5
    write(client, session, 1, 0, 20)
    session.commit()
    session.end()
    step(client, session, 1, 48)
    assert client.stats(session.id)["blank_pages"] == 0
    check(client, session, 1)


def test_room_in_a_full_pool_is_made_while_the_step_runs(world: World) -> None:
    """Eight pages, three that are written and three to come do not fit into fourteen, two of them kept."""
    world.service(hbm=14)
    client = world.client(reserve_ahead=0)
    session = client.open(SMALL, "m")
    step(client, session, 1, 8 * 16)
    session.begin(3 * 16)
    time.sleep(0.1)
    assert client.stats(session.id)["pages_quantized"] == 0
    session.expect(3 * 16)
    until(lambda: client.stats(session.id)["pages_quantized"] > 0)
    write(client, session, 1, 8 * 16, 11 * 16)
    session.commit()
    session.end()
    step(client, session, 1, 3 * 16)
    assert session.length == 14 * 16


def test_under_a_budget_nothing_is_asked_for_ahead(world: World) -> None:
    world.service()
    client = world.client(reserve_ahead=0)
    session = client.open(SMALL, "m", hbm_budget=12 * PAGE)
    session.begin(16)
    session.expect(16)
    assert client.stats(session.id)["blank_pages"] == 1


def test_pages_that_are_refused_ahead_are_nobodys_error(world: World) -> None:
    """Four frames and a little: three are written, so four more can never be had, but one can."""
    world.service(hbm=5)  # the codec's state takes a part of one
    client = world.client(reserve_ahead=0)
    session = client.open(SMALL, "m", ladder="exact")
    session.begin(48)
    session.expect(64)
    write(client, session, 1, 0, 48)
    session.commit()
    session.end()
    step(client, session, 1, 16)
    check(client, session, 1)


def test_a_step_that_is_rolled_back_expects_nothing(world: World) -> None:
    world.service()
    client = world.client(reserve_ahead=0)
    session = client.open(SMALL, "m")
    session.begin(16)
    session.expect(16)
    session.rollback(0)
    session.end()
    assert client.stats(session.id)["blank_pages"] == 2
    session.begin(32)
    assert client.stats(session.id)["blank_pages"] == 2


def test_a_step_that_could_not_begin_is_not_expected_any_more(world: World) -> None:
    world.service(hbm=9)  # the codec's state takes a part of one
    client = world.client(timeout=0.5, reserve_ahead=0)
    session, other = client.open(SMALL, "m", ladder="exact"), client.open(SMALL, "m", ladder="exact")
    step(client, other, 2, 48)
    session.begin(48)
    session.expect(64)
    write(client, session, 1, 0, 48)
    session.commit()
    session.end()
    with pytest.raises(CapacityError):
        session.begin(64)
    other.close()
    time.sleep(0.1)  # so that the daemon may be asked again
    session.end()
    assert client.stats(session.id)["blank_pages"] == 0
    step(client, session, 1, 64)


# Refusals --------------------------------------------------------------------------------------------------------


def test_a_step_that_does_not_fit_changes_nothing(world: World) -> None:
    world.service(hbm=8, host=0)
    client = world.client(timeout=0.5, reserve_ahead=0)
    session = client.open(SMALL, "m", ladder="exact")
    step(client, session, 1, 64)
    with pytest.raises(CapacityError):
        session.begin(16 * 8)
    assert session.length == session.horizon == 64
    step(client, session, 1, 16)
    assert check(client, session, 1) == (5, 0, 0, 0)


def test_time_that_steps_were_blocked_is_told_once_with_the_next_observation(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    step(client, session, 1, 10)
    total = 0.0
    for _ in range(2):
        before = session._in_flight.blocked_seconds
        began = time.monotonic()
        session.recall([], [], 1.0)
        assert 0.0 < session._in_flight.blocked_seconds - before <= time.monotonic() - began
        step(client, session, 1, 1, steps=1)
        total += session._in_flight.blocked_seconds
        session.observe(np.full(session.length, 0.01, np.float32))
        assert session._in_flight.blocked_seconds == 0.0
        until(lambda total=total: client.sessions()[0].blocked_seconds == pytest.approx(total, abs=1e-9))


def test_a_failed_observation_is_told_at_the_next_step_once(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    step(client, session, 1, 10)
    session.observe(np.full(10, -1.0, np.float32))
    client.ping()
    until(lambda: session._in_flight.unanswered == 0)
    with pytest.raises(RequestError, match="between 0 and 1"):
        session.begin(1)
    step(client, session, 1, 1, steps=1)
    with pytest.raises(RequestError, match="mass of 3"):
        session.observe(np.zeros(3, np.float32))


def test_a_failed_commit_ends_the_session(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    session.begin(10)
    session._labels.commit()  # a worker's bug: it commits other tokens than it wrote
    session.commit()
    session.end()
    until(lambda: session._in_flight.unanswered == 0)
    for _ in range(2):
        with pytest.raises(RequestError):
            session.begin(1)
    session.close()


def test_token_ids_must_be_one_a_token(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    session.begin(3)
    with pytest.raises(RequestError, match="4 token ids for 3"):
        session.commit(np.arange(4, dtype=np.int32))
    session.commit(np.arange(3, dtype=np.int32))
    session.end()
    assert settled(client, session)["tokens"] == 3


def test_pins_are_asked_for_and_remembered_for_the_next_owner(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    step(client, session, 1, 40)
    session.pin(0, 20, "exact")
    assert [(pin.start, pin.stop, pin.level) for pin in session._pins] == [(0, 20, "exact")]
    session.pin(0, 20, "none")
    assert session._pins == []
    with pytest.raises(RequestError):
        session.pin(0, 20, "tight")
    with pytest.raises(RequestError):
        session.pin(0, 4000)


# What leaves when ------------------------------------------------------------------------------------------------


def test_a_decode_step_wakes_the_line_only_for_what_it_observed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    woken: list[int] = []
    flush = client.flush
    monkeypatch.setattr(client, "flush", lambda: (woken.append(session.step), flush()))
    step(client, session, 1, 10)
    assert woken  # a prompt's pages are news
    step(client, session, 1, 1, steps=1)  # opens a page
    until(lambda: len(session._residency.blanks) == 1)
    woken.clear()
    for _ in range(3):
        step(client, session, 1, 1, steps=1)
    assert not woken
    session.begin(1)
    write(client, session, 1, 14, 15)
    session.commit(steps=1)
    session.observe(np.full(15, 1 / 15, np.float32))
    session.end()
    assert woken == [5]


def test_commits_that_wake_nobody_arrive_all_the_same(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    step(client, session, 1, 3)
    for _ in range(5):
        step(client, session, 1, 1, steps=1)
    until(lambda: session._in_flight.unanswered == 0)
    assert (settled(client, session)["tokens"], session.horizon) == (8, 8)


# Pages ahead, and the end ----------------------------------------------------------------------------------------


def test_one_spare_page_is_kept_so_that_a_decode_step_does_not_wait(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    step(client, session, 1, 32)
    until(lambda: len(session._residency.blanks) == 1)
    for _ in range(40):
        step(client, session, 1, 1, steps=1)
        assert len(session._residency.blanks) <= 1
    assert settled(client, session)["blank_pages"] <= 1


def test_a_closed_session_gives_everything_back_and_refuses_work(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    step(client, session, 1, 40)
    session.close()
    session.close()
    until(lambda: client.stats()["hbm_used_bytes"] == 0)
    for work in (
        lambda: session.begin(1),
        lambda: session.commit(),
        lambda: session.fork(),
        lambda: session.crop(0),
    ):
        with pytest.raises(UnknownSession):
            work()
