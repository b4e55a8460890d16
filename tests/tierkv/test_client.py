"""A client: what it opens, who may use it, what it waits for, and how it leaves."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

import tierkv
from tests.faults.pages import SMALL, check, step
from tests.tierkv.local_daemon import World, settled, until
from tierkv import Geometry, handshake
from tierkv.errors import (
    BudgetTooSmall,
    ConfigError,
    GeometryMismatch,
    OwnerUnavailable,
    RequestError,
    TierKVError,
    UnknownRegion,
    UnknownSession,
)


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
