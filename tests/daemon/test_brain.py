"""Claims about the brain that a random walk does not state: progress, order of sacrifice, budgets, watermarks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.stateful.world import LARGE, SMALL, WorkerSession, World
from tierkv.daemon import events
from tierkv.daemon.brain_config import BrainConfig
from tierkv.daemon.policy import POLICIES, Thresholds
from tierkv.protocol import Failure, Reserved, SessionOptions
from tierkv.regions import Region, Run
from tierkv.table import Kind

FRAME = SMALL.page_bytes
BOTH_ZERO = Thresholds(quantize_below=0.0, offload_below=0.0, drop_below=0.0, promote_above=9.0)


def world(hbm_frames: int, host_frames: int, **options: object) -> World:
    config = {
        "page_tokens": 4, "sink_tokens": 4, "recent_tokens": 8, "pins": (), "thresholds": BOTH_ZERO,
        "low_watermark": 0.0, "high_watermark": 0.0, "digest_share": 0.0,
    }  # fmt: skip
    made = World(BrainConfig(hbm_frames * FRAME + 1024, host_frames * FRAME, **{**config, **options}))
    made.attach("a")
    return made


def opened(world: World, **options: object) -> WorkerSession:
    session = world.open("a", SMALL, SessionOptions(**options))
    assert session is not None
    return session


def reserve(world: World, session: WorkerSession) -> None:
    """One page, waiting for room like a worker does."""
    for _ in range(100):
        result = world.reserve(session, 1)
        if isinstance(result, Reserved):
            return
        assert isinstance(result, Failure) and result.code == "backpressure", result
        world.now += 0.01
        world.settle()
    raise AssertionError("no room after 100 tries")


def append(world: World, session: WorkerSession, pages: int, region: Region = Region.USER) -> None:
    """Write `pages` whole pages, one at a time."""
    for _ in range(pages):
        reserve(world, session)
        assert not isinstance(world.write(session, [Run(region, 4)], 0), Failure)
        world.adopt_plans(session, acknowledge=True)


def kinds(session: WorkerSession) -> list[Kind]:
    return [Kind(row.kind) for row in session.rows]


def test_a_context_many_times_the_pool_always_finds_room() -> None:
    w = world(hbm_frames=10, host_frames=200)
    session = opened(w)
    append(w, session, 150)
    w.settle()
    assert session.length == 600
    assert w.brain.snapshot().counters.dropped_pages.total() == 0
    assert kinds(session)[0] == Kind.EXACT, "attention sinks stay exact"
    assert kinds(session)[-2:] == [Kind.EXACT, Kind.EXACT], "the recent window stays exact"


def test_pages_become_low_bit_before_any_page_leaves_hbm() -> None:
    w = world(hbm_frames=10, host_frames=200)
    session = opened(w)
    append(w, session, 20)
    w.settle()
    assert Kind.QUANTIZED in kinds(session)
    assert Kind.NONE not in kinds(session)


def test_the_lowest_scored_region_leaves_first() -> None:
    w = world(hbm_frames=10, host_frames=400)
    session = opened(w)
    for region in (Region.SYSTEM, Region.SCRATCHPAD, Region.USER, Region.SCRATCHPAD, Region.USER):
        append(w, session, 16, region)
    w.settle()
    cold = {Region(row.region) for row in session.rows if row.kind == Kind.NONE}
    assert cold == {Region.SCRATCHPAD}, "eighty pages do not fit ten frames; scratchpad is worth least"


@pytest.mark.parametrize("demotion", ["pressure", "eager"])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_decides_under_pressure(name: str, demotion: str) -> None:
    """Validated after every event; the bytes that a worker reads are its own (`World.check_reads`)."""
    w = world(
        hbm_frames=12, host_frames=300, policy=name, thresholds=None, demotion=demotion, digest_share=0.1
    )
    session = opened(w)
    for turn in range(6):
        append(w, session, 6, Region.USER)
        append(w, session, 6, Region.TOOL_OUT)
        for _ in range(4):
            if not session.tail_open:
                reserve(w, session)
            assert not isinstance(w.write(session, [Run(Region.SCRATCHPAD, 1)], 1), Failure)
            mass = np.full(session.length, 0.5 / session.length, np.float32)
            mass[turn] += 0.5
            w.ask(events.Observed, "a", session.id, session.step, mass)
            w.now += 0.3
            w.feed(events.Tick())
            w.settle()
    counters = w.brain.snapshot().counters
    assert (
        sum(n for (before, after, _), n in counters.moved_pages.items() if after in ("quantized", "host"))
        > 20
    )
    assert counters.dropped_pages.total() == counters.lost_pages == 0
    assert kinds(session)[0] == Kind.EXACT and kinds(session)[-2:] == [Kind.EXACT] * 2
    assert np.isfinite(w.brain.state.pages.score[session_slots(w, session)]).all()
    again = type(w.brain).replay(w.config, w.brain.log)
    assert again.snapshot().flat() == w.brain.snapshot().flat()


def session_slots(world: World, session: WorkerSession) -> list[int]:
    return [world.brain.state.pages.index[row.page] for row in session.rows]


def test_a_full_pool_without_host_memory_says_out_of_capacity_not_retry() -> None:
    w = world(hbm_frames=4, host_frames=0, backup="never")
    session = opened(w, ladder="exact")
    for _ in range(4):
        assert isinstance(w.reserve(session, 1), Reserved)
        w.write(session, [Run(Region.USER, 4)], 0)
    result = w.reserve(session, 1)
    assert isinstance(result, Failure) and result.code == "out-of-capacity"


def test_a_request_larger_than_the_pool_is_refused_for_good() -> None:
    w = world(hbm_frames=4, host_frames=10)
    result = w.reserve(opened(w), 9)
    assert (
        isinstance(result, Failure)
        and result.code == "out-of-capacity"
        and "smaller chunks" in result.message
    )


def test_the_drop_ladder_drops_the_lowest_scored_and_keeps_pins() -> None:
    w = world(hbm_frames=8, host_frames=0, pin_quota=0.6)
    session = opened(w, ladder="drop", pins={"system": "exact"})
    append(w, session, 2, Region.SYSTEM)
    append(w, session, 30, Region.SCRATCHPAD)
    assert [row.kind for row in session.rows[:2]] == [Kind.EXACT, Kind.EXACT]
    assert w.brain.snapshot().counters.dropped_pages["scratchpad", "budget"] >= 24


def test_a_session_stays_inside_its_own_budget() -> None:
    w = world(hbm_frames=40, host_frames=100)
    session = opened(w, hbm_budget=8 * FRAME)
    for _ in range(40):
        append(w, session, 1)
        used = w.brain.session_stats(session.id)["hbm_bytes"]
        assert used <= 8 * FRAME
    w.settle()
    assert session.length == 160


def test_below_the_low_watermark_the_pool_is_brought_back_to_the_high_one() -> None:
    w = world(hbm_frames=20, host_frames=100, low_watermark=0.1, high_watermark=0.3)
    session = opened(w)
    append(w, session, 19)
    w.settle()
    w.feed(events.Tick())
    w.settle()
    snapshot = w.brain.snapshot()
    assert snapshot.hbm_capacity - snapshot.hbm_used >= 0.3 * snapshot.hbm_capacity - FRAME


def test_memory_is_not_reused_before_the_slowest_reader_acknowledges() -> None:
    w = world(hbm_frames=6, host_frames=50)
    session = opened(w)
    append(w, session, 4)
    w.fork(session)
    child = next(s for s in w.sessions.values() if s is not session)
    w.reserve(session, 2)
    while w.moves:
        w.finish_move(min(w.moves))
    w.adopt_plans(session, acknowledge=True)
    retiring = w.brain.snapshot().hbm_retiring
    assert retiring > 0, "the child has not acknowledged"
    w.settle()
    assert w.brain.snapshot().hbm_retiring == 0
    assert child.version > 0


def test_what_a_sharer_still_reads_after_an_owner_died_is_not_given_up_as_made_ahead() -> None:
    """One session has adopted the low-bit replica of a page, the other still reads the exact one."""
    w = world(hbm_frames=10, host_frames=100)
    session = opened(w)
    append(w, session, 7)
    w.fork(session)
    child = next(s for s in w.sessions.values() if s is not session)
    while Kind.QUANTIZED not in kinds(child):
        w.reserve(session, 2)
        while w.moves:
            w.finish_move(min(w.moves))
        w.adopt_plans(child, acknowledge=False)
    assert Kind.QUANTIZED not in kinds(session)
    w.restart_owner()
    w.ask(events.Pinned, "a", session.id, 0, session.length, "exact")
    other = opened(w)
    for _ in range(40):  # the child adopts nothing meanwhile; every event is followed by `check_reads`
        w.reserve(other, 1)
        w.write(other, [Run(Region.USER, 4)], 0)
        w.adopt_plans(other, acknowledge=True)
        for number in list(w.moves):
            w.finish_move(number)
    assert Kind.QUANTIZED in kinds(child)


def test_two_forks_of_one_open_page_are_both_answered() -> None:
    """Two copies of the page run at once; the end of the first does not forget the second."""
    w = world(hbm_frames=8, host_frames=50)
    session = opened(w)
    reserve(w, session)
    w.write(session, [Run(Region.USER, 3)], 0)
    w.fork(session)
    w.fork(session)
    assert len(w.moves) == 2
    w.settle()
    assert len(w.sessions) == 3 and [s.length for s in w.sessions.values()] == [3, 3, 3]


def test_a_page_that_a_fork_is_being_copied_from_is_not_dropped() -> None:
    """The copy may wait in the mover's queue for long; the page's frame must not be another page's by then."""
    w = world(hbm_frames=4, host_frames=0)
    session = opened(w, ladder="drop")
    reserve(w, session)
    w.write(session, [Run(Region.SCRATCHPAD, 3)], 0)
    w.fork(session)
    (copy,) = w.moves
    w.write(
        session, [Run(Region.SCRATCHPAD, 1)], 0
    )  # sealed, and the first to go, but it is still being read
    for _ in range(8):
        if isinstance(w.reserve(session, 1), Reserved):
            w.write(session, [Run(Region.SYSTEM, 4)], 0)
        w.adopt_plans(session, acknowledge=True)
    assert kinds(session)[0] == Kind.EXACT and Kind.NONE in kinds(session)[1:]
    w.finish_move(copy)
    child = w.sessions[max(w.sessions)]
    assert [row.stamps for row in child.rows] == [[1, 2, 3]] and kinds(child) == [Kind.EXACT]
    append(w, session, 1, Region.SYSTEM)
    assert kinds(session)[0] == Kind.NONE, "it may go when the copy has ended"


def test_a_model_without_a_layer_that_the_codec_names_is_refused_and_others_are_served() -> None:
    """`SMALL` has two layers, `LARGE` three."""
    w = world(hbm_frames=20, host_frames=100, codec="k3v2,2=kivi2")
    result = w.ask(events.Opened, "a", "model", SMALL, SessionOptions())
    assert isinstance(result, Failure) and result.code == "config"
    assert "names layer 2, and this model has 2" in result.message
    assert w.open("a", LARGE, SessionOptions()) is not None


def test_a_stopped_worker_keeps_every_byte_it_could_write() -> None:
    w = world(hbm_frames=8, host_frames=50)
    w.attach("b")
    stopped = opened(w)
    append(w, stopped, 5)
    w.settle()
    offsets = [row.offset for row in stopped.rows]
    w.feed(events.LeaseExpired("a"))
    other = w.open("b", SMALL, SessionOptions())
    assert other is not None
    for _ in range(50):
        w.now += 1.0
        w.feed(events.Tick())
        if isinstance(w.reserve(other, 1), Reserved):
            w.write(other, [Run(Region.USER, 4)], 0)
        for number in list(w.moves):
            w.finish_move(number)
        w.adopt_plans(other, acknowledge=True)
    assert [row.offset for row in stopped.rows] == offsets
    assert other.length > 0


def test_a_dead_worker_returns_every_page() -> None:
    w = world(hbm_frames=8, host_frames=50)
    append(w, opened(w), 20)
    w.reserve(next(iter(w.sessions.values())), 1)
    w.kill("a")
    for number in list(w.moves):
        w.finish_move(number)
    snapshot = w.brain.snapshot()
    assert (snapshot.hbm_used, snapshot.host_used, snapshot.sessions) == (0, 0, 0)


def test_unknown_and_foreign_sessions_are_refused() -> None:
    w = world(hbm_frames=8, host_frames=8)
    w.attach("b")
    session = opened(w)
    for client, number in (("a", 999), ("b", session.id)):
        result = w.ask(events.Reserved, client, number, 1)
        assert isinstance(result, Failure) and result.code == "unknown-session"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"ladder": "sideways"}, "config"),
        ({"pins": {"system": "forever"}}, "config"),
        ({"pins": {"attic": "exact"}}, "unknown-region"),
        ({"hbm_budget": FRAME}, "budget-too-small"),
    ],
)
def test_bad_session_options_are_refused_and_lose_nothing(options: dict[str, object], code: str) -> None:
    w = world(hbm_frames=8, host_frames=8)
    result = w.ask(events.Opened, "a", "m", SMALL, SessionOptions(**options))
    assert isinstance(result, Failure) and result.code == code
    assert w.brain.snapshot().hbm_used == 0


def test_a_commit_that_does_not_add_up_changes_nothing() -> None:
    w = world(hbm_frames=8, host_frames=8)
    session = opened(w)
    append(w, session, 2)
    no_ids = np.zeros(0, np.int32)
    for length, runs in ((99, (Run(Region.USER, 4),)), (8, ()), (12, (Run(Region.USER, 4),))):
        result = w.ask(events.Committed, "a", session.id, length, runs, 0, no_ids)
        if length != 8:
            assert isinstance(result, Failure)
    assert w.brain.session_stats(session.id)["tokens"] == 8


def test_idle_sessions_do_not_outrank_busy_ones() -> None:
    w = world(hbm_frames=30, host_frames=30)
    idle, busy = opened(w), opened(w)
    for session in (idle, busy):
        append(w, session, 3)
    for _ in range(20):
        w.now += 0.1
        for session in (idle, busy):
            if session is busy or w.now < 1.0:
                w.reserve(session, 1)
                w.write(session, [Run(Region.USER, 1)], 1)
    w.now += 60.0
    w.reserve(busy, 1)
    w.write(busy, [Run(Region.USER, 1)], 1)
    w.brain.scores.refresh()
    scores = {
        s.id: float(w.brain.state.pages.score[w.brain.state.sessions[s.id].pages.view[1]])
        for s in (idle, busy)
    }
    assert scores[idle.id] < scores[busy.id]


def test_the_log_replays_to_the_same_state() -> None:
    w = world(hbm_frames=10, host_frames=100)
    append(w, opened(w), 40)
    again = type(w.brain).replay(w.config, w.brain.log)
    assert again.snapshot().flat() == w.brain.snapshot().flat()


def test_cold_pages_come_back_when_there_is_room_again() -> None:
    w = world(hbm_frames=8, host_frames=200)
    crowd, survivor = opened(w), opened(w)
    append(w, survivor, 30)
    append(w, crowd, 40)
    w.settle()
    assert Kind.NONE in kinds(survivor)
    w.close(crowd)
    for _ in range(10):
        w.now += 0.5
        w.feed(events.Tick())
        w.settle()
    assert Kind.NONE not in kinds(survivor)
    assert w.brain.snapshot().counters.recalled_pages > 0
    assert w.brain.snapshot().counters.moved_pages["host", "quantized", "room"] > 0


def test_a_bandwidth_limit_makes_a_reservation_wait_and_never_fail() -> None:
    w = world(hbm_frames=10, host_frames=200, move_bandwidth=200_000)
    session = opened(w)
    append(w, session, 60)
    assert session.length == 240


def test_a_model_without_tiered_pages_keeps_no_frame_back() -> None:
    w = World(BrainConfig(
        8 * LARGE.page_bytes + 4096, 0, page_tokens=4, sink_tokens=4, recent_tokens=8, pins=(),
        low_watermark=0.0, high_watermark=0.0, backup="never",
    ))  # fmt: skip
    w.attach("a")
    append(w, opened(w), 1)
    exact = w.open("a", LARGE, SessionOptions(ladder="exact"))
    assert exact is not None
    assert isinstance(w.reserve(exact, 7), Reserved), "the eighth frame holds the small page"


def test_pages_of_a_model_without_a_slot_do_not_stand_in_the_way_of_another_models() -> None:
    """The coldest page's frames are all taken; the other model's recent pages still become low-bit."""
    w = World(BrainConfig(
        4 * LARGE.page_bytes, 60 * LARGE.page_bytes, page_tokens=4, sink_tokens=4, recent_tokens=40, pins=(),
        low_watermark=0.0, high_watermark=0.0,
    ))  # fmt: skip
    w.attach("a")
    large = w.open("a", LARGE, SessionOptions())
    small = w.open("a", SMALL, SessionOptions())
    assert large is not None and small is not None
    append(w, large, 2, Region.SCRATCHPAD)
    append(w, small, 4)
    w.settle()
    append(w, small, 4)
    assert small.length == 32


def test_a_replica_made_ahead_does_not_hold_the_frame_of_a_page_that_was_pinned_since() -> None:
    """Fourteen frames: the sink and the pin exact, the rest low-bit in one frame, eleven for the exact session."""
    w = world(hbm_frames=14, host_frames=200, thresholds=Thresholds(99.0, 0.0, 0.0, 999.0))
    first, session = opened(w), opened(w)
    append(w, first, 40)
    w.close(first)
    append(w, session, 6)
    for _ in range(8):
        w.now += 0.3
        w.feed(events.Tick())
        w.settle()
    pages = w.brain.state.pages
    assert np.any(pages.live & (pages.kind == Kind.EXACT) & (pages.quant >= 0)), "a replica is made ahead"
    w.ask(events.Pinned, "a", session.id, 4, 8, "exact")
    append(w, session, 30)
    exact = opened(w, ladder="exact")
    append(w, exact, 11)
    assert exact.length == 44


def test_a_full_host_compresses_pages_of_one_score_before_it_says_out_of_capacity() -> None:
    """Ten frames and twelve: two exact, eight and twelve of ten low-bit pages each hold 202; one is kept back."""
    w = world(hbm_frames=10, host_frames=12)
    session = opened(w)
    append(w, session, 190)  # of one region and one step: every score is equal
    counters = w.brain.snapshot().counters
    assert (session.length, counters.dropped_pages.total(), counters.lost_pages) == (760, 0, 0)


def test_a_host_full_of_cold_exact_pages_has_a_slot_left_to_compress_into() -> None:
    w = world(hbm_frames=6, host_frames=3, backup="on_demote")
    session = opened(w)
    append(w, session, 50)  # three exact at the least, thirty in HBM: the others are low-bit in host
    assert session.length == 200
