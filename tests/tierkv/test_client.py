"""Client and session against a service in this process, with the real brain."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tierkv
from tests.faults.pages import SMALL, check, step, token_values, write
from tierkv import Client, Geometry, Session, handshake
from tierkv.daemon.brain import Brain, BrainConfig
from tierkv.daemon.service import Service, ServiceConfig
from tierkv.errors import (
    BudgetTooSmall,
    CapacityError,
    ConfigError,
    GeometryMismatch,
    OwnerUnavailable,
    RequestError,
    TierKVError,
    UnknownRegion,
    UnknownSession,
)
from tierkv.protocol import BlankPage, PageChange, Plan
from tierkv.regions import Region, Run
from tierkv.table import Kind

PAGE = SMALL.page_bytes


def brain(config: ServiceConfig) -> Brain:
    return Brain(
        BrainConfig(
            config.hbm_bytes, config.host_bytes, config.epoch, config.codec,
            page_tokens=config.page_tokens, straddle=config.straddle,
        ),
        validate=True,
    )  # fmt: skip


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open: list[Service | Client] = []

    def service(self, hbm: int = 64, host: int = 200, straddle: bool = False) -> Service:
        service = Service(
            ServiceConfig(self.folder, hbm * PAGE, host * PAGE, 1, straddle=straddle, heartbeat_seconds=0.5),
            brain,
        )
        service.start()
        self.open.append(service)
        return service

    def client(self, timeout: float = 10.0, reserve_ahead: int = 1) -> Client:
        client = tierkv.connect(self.folder, timeout, reserve_ahead=reserve_ahead)
        self.open.append(client)
        return client


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        world = World(Path(folder))
        yield world
        for thing in reversed(world.open):
            (thing.close if isinstance(thing, Client) else thing.stop)()


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def table(session: Session) -> list[tuple[int, int]]:
    """(region, count) of the committed pages."""
    return [(entry.region, entry.count) for entry in session.state()[0].table.pages]


def settled(client: Client, session: Session) -> dict[str, float]:
    """The daemon's numbers of the session, once it has heard everything."""
    return client.stats(session.id)


# Layout ----------------------------------------------------------------------------------------------------------


def test_labels_name_the_next_tokens_and_a_region_starts_its_own_page(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    session.label("system", 20)
    session.label(Region.TOOL_OUT, 3)
    step(client, session, 1, 30)  # 20 system, 3 tool_out, 7 that nobody labelled
    step(client, session, 1, 1, steps=1)  # one unlabelled token is scratchpad
    step(client, session, 1, 2)
    assert table(session) == [
        (Region.SYSTEM, 16), (Region.SYSTEM, 4), (Region.TOOL_OUT, 3), (Region.USER, 7),
        (Region.SCRATCHPAD, 1), (Region.USER, 2),
    ]  # fmt: skip
    assert (session.length, session.horizon, session.step) == (33, 33, 1)
    numbers = settled(client, session)
    assert (numbers["tokens"], numbers["step"], numbers["pages_hbm"]) == (33, 1, 6)
    assert check(client, session, 1).wrong == 0


def test_a_label_may_span_steps_and_a_partly_filled_page_goes_on(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    session.label("plan", 25)
    for tokens in (10, 10, 10):
        step(client, session, 1, tokens)
    assert table(session) == [(Region.PLAN, 16), (Region.PLAN, 9), (Region.USER, 5)]
    assert settled(client, session)["tokens"] == 30


def test_the_straddling_layout_fills_every_page(world: World) -> None:
    world.service(straddle=True)
    client = world.client()
    session = client.open(SMALL, "m")
    session.label("system", 20)
    step(client, session, 1, 30)
    step(client, session, 1, 5)
    assert table(session) == [(Region.SYSTEM, 16), (Region.SYSTEM, 16), (Region.USER, 3)]
    assert settled(client, session)["tokens"] == 35


def test_an_unknown_region_is_refused_where_it_is_named(world: World) -> None:
    world.service()
    session = world.client().open(SMALL, "m")
    with pytest.raises(UnknownRegion, match="garden"):
        session.label("garden", 3)


def test_slots_and_rows_say_where_tokens_are(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    session.label("system", 18)
    session.begin(40)  # pages of 16, 2, 16, 6
    offsets, slots = session.slots(0, 40)
    assert offsets.dtype == np.int64 and slots.dtype == np.int32
    assert slots.tolist() == [*range(16), 0, 1, *range(16), *range(6)]
    rows = session.rows(36)
    assert rows.counts.tolist() == [16, 2, 16, 2] and rows.starts.tolist() == [0, 16, 18, 34]
    assert rows.offsets.tolist() == [offsets[0], offsets[16], offsets[18], offsets[34]]
    assert len(set(rows.offsets.tolist())) == 4 and all(offset % 64 == 0 for offset in rows.offsets)
    assert rows.kinds.tolist() == [Kind.EXACT] * 4
    assert session.rows(34).counts.tolist() == [16, 2, 16]
    assert len(session.rows(0).offsets) == 0
    with pytest.raises(ValueError, match="not within"):
        session.slots(0, 41)
    session.commit()
    session.end()


def test_the_pool_view_is_the_shared_memory(world: World) -> None:
    service = world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    step(client, session, 1, 5)
    view = session.pool
    assert view.geometry == SMALL and view.codec.name == "k3v2" and len(view.codec_state) == 0
    offset = int(session.rows(5).offsets[0])
    assert service.brain.state.hbm.size == len(view.data)  # type: ignore[attr-defined]
    view.data[offset] ^= 1
    assert client.hbm()[offset] == view.data[offset]
    assert not client.host().flags.writeable


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


# Plans -----------------------------------------------------------------------------------------------------------


def test_an_idle_session_adopts_plans_by_itself_so_that_memory_comes_back(world: World) -> None:
    world.service(hbm=32)
    client = world.client()
    idle, busy = client.open(SMALL, "m"), client.open(SMALL, "m")
    step(client, idle, 1, 200)
    version = idle.version
    for _ in range(20):
        step(client, busy, 2, 32)
    assert idle.version > version  # nobody called it
    until(lambda: client.stats()["hbm_retiring_bytes"] == 0)
    kinds = np.bincount(idle.rows(200).kinds, minlength=3)
    assert kinds[Kind.EXACT] < 13
    assert check(client, idle, 1).wrong == check(client, busy, 2).wrong == 0


def test_a_table_stands_still_within_a_step(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    step(client, session, 1, 40)
    session.begin(8)
    before, version = session.rows(48), session.version
    entry = session.state()[0].table.pages[0]
    client.plans([Plan(session.id, version + 1, [_moved(entry.page)], 64)])
    assert session.version == version
    assert session.rows(48).kinds.tolist() == before.kinds.tolist()
    session.rollback(40)
    session.end()
    assert session.version == version + 1
    assert session.rows(40).kinds.tolist() == [Kind.QUANTIZED, Kind.EXACT, Kind.EXACT]
    with pytest.raises(ValueError, match="exact"):
        session.slots(0, 1)


def test_an_old_plan_is_not_adopted_and_an_unknown_page_is_ignored(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    step(client, session, 1, 40)
    version = session.version
    entry = session.state()[0].table.pages[0]
    client.plans([Plan(session.id, version, [_moved(entry.page)])])
    client.plans([Plan(session.id, version + 1, [_moved(123_456)]), Plan(77, 1, [])])
    assert session.version == version + 1
    assert session.rows(40).kinds.tolist() == [Kind.EXACT] * 3


def _moved(page: int) -> PageChange:
    return PageChange(page, Kind.QUANTIZED, 4096, 0, -1, 0)


# Refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_opened_is_refused(world: World) -> None:
    world.service(hbm=4)
    client = world.client()
    with pytest.raises(GeometryMismatch):
        client.open(Geometry(2, 1, 32, "float32", 8), "m")
    with pytest.raises(BudgetTooSmall):
        client.open(Geometry(64, 8, 64, "float32", 16), "m")
    with pytest.raises(RequestError, match="ladder"):
        client.open(SMALL, "m", ladder="rope")
    with pytest.raises(UnknownRegion):
        client.open(SMALL, "m", pins={"garden": "exact"})


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


# Life ------------------------------------------------------------------------------------------------------------


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


def test_leaving_a_client_gives_everything_back_and_ends_its_thread(world: World) -> None:
    service = world.service()
    watcher = world.client()
    threads = threading.active_count()
    with tierkv.connect(world.folder) as client:
        session = client.open(SMALL, "m")
        step(client, session, 1, 40)
    until(lambda: watcher.stats()["hbm_used_bytes"] == 0 and watcher.stats()["workers"] == 1)
    assert threading.active_count() == threads
    with pytest.raises(TierKVError):
        session.begin(1)
    with pytest.raises(OwnerUnavailable, match="closed"):
        client.open(SMALL, "m")
    client.close()
    assert service.loop.errors == 0


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


def test_a_forked_process_may_not_use_the_client(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    step(client, session, 1, 10)
    child = os.fork()
    if child == 0:
        code = 0
        for call in (
            client.ping,
            lambda: session.begin(1),
            lambda: session.commit(steps=1),
            session.fork,
            session.close,
        ):
            try:
                call()
                code = 1
            except TierKVError as error:
                code |= 0 if "fork" in str(error) else 2
        client.close()  # must not detach the parent
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    step(client, session, 1, 10)
    assert settled(client, session)["tokens"] == 20


def test_nobody_there_is_said_after_the_timeout(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(OwnerUnavailable, match="is tierkv-daemon running"):
        tierkv.connect(tmp_path, timeout=0.2)
    assert 0.1 < time.monotonic() - start < 2.0


def test_a_client_waits_for_a_daemon_that_starts_a_little_later(world: World) -> None:
    later = threading.Timer(0.3, world.service)
    later.start()
    assert world.client(timeout=10.0).ping() < 5.0
    later.join()


def test_a_path_too_long_for_a_socket_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="107"):
        tierkv.connect(tmp_path / ("x" * 100), timeout=5.0)


def test_the_default_state_directory_is_the_users_own_on_tmpfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIERKV_STATE_DIR", raising=False)
    assert handshake.default_state_dir() == Path(f"/dev/shm/tierkv-{os.getuid()}")
    monkeypatch.setenv("TIERKV_STATE_DIR", "/somewhere")
    assert handshake.default_state_dir() == Path("/somewhere")


def test_many_threads_may_share_a_client(world: World) -> None:
    world.service(hbm=64, host=400)
    client = world.client()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            session = client.open(SMALL, "m")
            for _ in range(10):
                step(client, session, seed, 20)
            assert check(client, session, seed).wrong == 0
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert client.stats()["tokens"] == 6 * 200


def test_what_a_new_owner_gets_is_the_committed_table_and_blanks_in_order(world: World) -> None:
    world.service()
    client = world.client(reserve_ahead=0)
    session = client.open(SMALL, "m")
    step(client, session, 1, 20)
    session.begin(40)  # 12 more in the open page, then two pages that are not committed
    tentative = session.slots(32, 60)[0]
    state, _ = session.state()
    assert (state.table.length, state.table.tail_open, state.step) == (20, True, 0)
    assert [entry.count for entry in state.table.pages] == [16, 4]
    assert [blank.offset for blank in state.table.blanks] == [tentative[0], tentative[16]]
    assert all(isinstance(blank, BlankPage) for blank in state.table.blanks)
    session.commit()
    session.end()
    assert [entry.count for entry in session.state()[0].table.pages] == [16, 16, 16, 12]


def test_any_client_may_ask_why_a_page_of_any_session_is_where_it_is(world: World) -> None:
    world.service()
    owner = world.client()
    session = owner.open(SMALL, "m")
    session.label("plan", 40)
    step(owner, session, 1, 40)
    stranger = world.client()
    told = stranger.explain(session.id, 1)
    assert (told.start, told.tokens, told.region, told.pages, told.open) == (16, 16, "plan", 3, False)
    assert stranger.explain(session.id, token=39).page == 2
    assert told.score == pytest.approx(0.9)  # MemDecay's base value of a plan
    with pytest.raises(UnknownSession, match=f"open: {session.id}"):
        stranger.explain(session.id + 1, 0)
    for refused in ({}, {"page": 3}, {"token": 40}, {"page": 0, "token": 0}, {"page": -2}):
        with pytest.raises(RequestError):
            stranger.explain(session.id, **refused)
