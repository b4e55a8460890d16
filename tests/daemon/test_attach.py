"""The attach socket and adoption, in front of a scripted brain."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tierkv import handshake
from tierkv.daemon import attach, events
from tierkv.daemon.pools import HbmPool
from tierkv.daemon.registry import Registry, Worker, boot_id, start_time
from tierkv.daemon.service import Service, ServiceConfig
from tierkv.errors import ConfigError, OwnerUnavailable, PagesLost, ProtocolError, TierKVError
from tierkv.protocol import (
    ATTACH_SOCKET,
    PROTOCOL_VERSION,
    Attach,
    Attached,
    GeometryFields,
    Observing,
    SessionOptions,
    SessionState,
    TableState,
)

HBM, HOST = 16 * 4096, 8 * 4096
STATE = SessionState(
    TableState(5, 1, 0, []), "m", GeometryFields(1, 1, 8, "float32", 16), SessionOptions(), 0
)  # fmt: skip


class Brain:
    def __init__(self, config: ServiceConfig) -> None:
        self.events: list[events.Event] = []
        self.lost: tuple[tuple[int, int, int], ...] = ()

    def handle(self, event: events.Event, now: float) -> list[events.Instruction]:
        if not isinstance(event, events.Tick):
            self.events.append(event)
        if isinstance(event, events.Attached) and event.sessions:
            return [events.Adopted(event.client, self.lost)]
        return []

    def snapshot(self) -> None: ...

    def session_stats(self, session: int) -> dict[str, float]:
        return {}


class Worker_:
    """What `handshake.attach` gave, closed at the end."""

    def __init__(
        self, folder: Path, name: str, hbm: int | None = None, sessions: tuple[SessionState, ...] = ()
    ) -> None:
        message = Attach(PROTOCOL_VERSION, name, list(sessions), "k3v2" if sessions else "")
        self.stream, self.reply, self.hbm, self.host = handshake.attach(folder, message, hbm, 5.0)

    def close(self) -> None:
        self.stream.close()
        os.close(self.hbm)
        os.close(self.host)


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.services: list[Service] = []

    def start(self, epoch: int = 1, hbm: int = HBM) -> tuple[Service, Brain]:
        service = Service(ServiceConfig(self.folder, hbm, HOST, epoch, heartbeat_seconds=0.5), Brain)
        service.start()
        self.services.append(service)
        assert isinstance(service.brain, Brain)
        return service, service.brain

    def survivor(self, name: str) -> None:
        """As if an earlier owner had this process as its worker."""
        started = start_time(os.getpid())
        assert started is not None
        Registry(self.folder).add(Worker(name, os.getpid(), started, boot_id()))


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        world = World(Path(folder))
        yield world
        for service in world.services:
            service.stop()


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def test_a_worker_gets_both_pools_and_the_daemons_terms(world: World) -> None:
    _service, brain = world.start(epoch=4, hbm=HBM + 5)
    worker = Worker_(world.folder, "a")
    assert worker.reply == Attached(
        PROTOCOL_VERSION,
        4,
        f"ipc://{world.folder}/requests.sock",
        HBM,
        HOST,
        "k3v2",
        16,
        False,
        Observing(),
        0.5,
    )
    assert os.fstat(worker.hbm).st_size == HBM and os.fstat(worker.host).st_size == HOST
    os.pwrite(worker.hbm, b"x", 0)
    with pytest.raises(OSError):
        os.pwrite(worker.host, b"x", 0)
    assert brain.events == [events.AdoptionEnded(), events.Attached("a", ())]
    worker.close()


def test_the_end_of_the_stream_is_a_detach(world: World) -> None:
    service, brain = world.start()
    worker = Worker_(world.folder, "a")
    worker.close()
    until(lambda: events.WorkerDied("a") in brain.events)
    assert service.loop.workers() == 0
    Worker_(world.folder, "a").close()  # and may come back as somebody new


def test_an_attach_again_ends_what_the_client_had_before(world: World) -> None:
    service, brain = world.start()
    first = Worker_(world.folder, "a")
    second = Worker_(world.folder, "a")
    assert brain.events[1:] == [events.Attached("a", ()), events.WorkerDied("a"), events.Attached("a", ())]
    first.close()
    time.sleep(0.05)
    assert service.loop.workers() == 1
    second.close()


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", "../etc", "\u00e4"])
def test_a_client_id_that_is_no_plain_name_is_refused(world: World, name: str) -> None:
    world.start()
    with pytest.raises(ProtocolError, match="client id"):
        Worker_(world.folder, name)


def test_silent_strangers_are_cut_off_and_keep_nobody_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "HANDSHAKE_SECONDS", 0.2)
    world.start()
    strangers = []
    for _ in range(attach.MAX_STRANGERS + 20):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(str(world.folder / ATTACH_SOCKET))
        strangers.append(stranger)
    Worker_(world.folder, "a").close()
    strangers[0].settimeout(5)
    assert strangers[0].recv(1) == b""
    for stranger in strangers:
        stranger.close()


def test_descriptors_that_nobody_asked_for_do_not_pile_up(world: World) -> None:
    world.start()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(str(world.folder / ATTACH_SOCKET))
            socket.send_fds(stream, [struct.pack("<I", 10)], [0, 1, 2])
            socket.send_fds(stream, [b"x"], [0])
    until(lambda: len(os.listdir("/proc/self/fd")) == before)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can pose as another user")
def test_another_users_process_is_refused(world: World) -> None:
    world.start()
    os.chmod(world.folder, 0o711)
    os.chmod(world.folder / ATTACH_SOCKET, 0o777)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.setuid(65_534)
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(str(world.folder / ATTACH_SOCKET))
            os.write(writer, stream.recv(1000))
        os._exit(0)
    os.waitpid(child, 0)
    assert b"not 65534" in os.read(reader, 1000)
    os.close(reader)
    os.close(writer)


def test_the_first_descriptor_that_comes_back_becomes_the_pool(world: World) -> None:
    world.survivor("a")
    world.survivor("b")
    pool = HbmPool.create(HBM)
    service, brain = world.start(epoch=2)
    brain.lost = ((5, 16, 32),)
    assert service.adopting() == 2
    with pytest.raises(OwnerUnavailable, match="2 workers"):
        Worker_(world.folder, "newcomer")
    a = Worker_(world.folder, "a", pool.descriptor(), (STATE,))
    assert pool.same(a.hbm) and a.reply.lost == [(5, 16, 32)]
    newcomer = Worker_(world.folder, "newcomer")
    assert pool.same(newcomer.hbm)
    assert events.AdoptionEnded() not in brain.events
    other = HbmPool.create(HBM)
    with pytest.raises(PagesLost, match="not this daemon's"):
        Worker_(world.folder, "b", other.descriptor(), (STATE,))
    until(lambda: brain.events[-1] == events.AdoptionEnded())
    assert brain.events[0] == events.Attached("a", (STATE,))
    b = Worker_(world.folder, "b")  # having given its pages up
    for holder in (a, b, newcomer, pool, other):
        holder.close()


def test_a_pool_of_another_size_is_not_adopted_and_a_fresh_one_is_made(world: World) -> None:
    world.survivor("a")
    pool = HbmPool.create(2 * HBM)
    _service, brain = world.start(epoch=2)
    with pytest.raises(PagesLost, match="start it with the old --hbm"):
        Worker_(world.folder, "a", pool.descriptor(), (STATE,))
    a = Worker_(world.folder, "a")
    assert not pool.same(a.hbm) and os.fstat(a.hbm).st_size == HBM
    assert brain.events == [events.AdoptionEnded(), events.Attached("a", ())]
    a.close()
    pool.close()


def test_sessions_are_adopted_only_from_whom_the_owner_waits_for(world: World) -> None:
    _service, brain = world.start()
    a = Worker_(world.folder, "a")
    with pytest.raises(PagesLost, match="does not wait"):
        Worker_(world.folder, "late", a.hbm, (STATE,))
    with pytest.raises(PagesLost, match="without their HBM"):
        Worker_(world.folder, "late", None, (STATE,))
    assert brain.events == [events.AdoptionEnded(), events.Attached("a", ())]
    a.close()


def test_a_survivor_that_says_it_left_is_not_waited_for(world: World) -> None:
    world.survivor("a")
    _service, brain = world.start(epoch=2)
    assert brain.events == []
    handshake.leave(world.folder, "a")
    until(lambda: brain.events == [events.AdoptionEnded()])
    Worker_(world.folder, "b").close()


def test_an_adoption_that_the_brain_cannot_do_is_refused_and_undone(world: World) -> None:
    world.survivor("a")
    pool = HbmPool.create(HBM)
    service, brain = world.start(epoch=2)

    def fail(event: events.Event, now: float) -> list[events.Instruction]:
        brain.events.append(event)
        if isinstance(event, events.Attached):
            raise ValueError("two pages in one place")
        return []

    brain.handle = fail  # type: ignore[method-assign]
    with pytest.raises(PagesLost, match="two pages"):
        Worker_(world.folder, "a", pool.descriptor(), (STATE,))
    until(lambda: events.WorkerDied("a") in brain.events and events.AdoptionEnded() in brain.events)
    assert service.loop.workers() == 0
    pool.close()


def test_a_state_directory_with_a_long_path_is_refused(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    service = Service(ServiceConfig(long, HBM, HOST, 1), Brain)
    with pytest.raises(ConfigError, match="107"):
        service.start()
    with pytest.raises(ConfigError, match="107"):
        handshake.attach(long, Attach(PROTOCOL_VERSION, "a"), None, 1.0)


def test_a_stopped_service_leaves_no_thread_no_descriptor_and_no_socket(world: World) -> None:
    first, _ = world.start()
    first.stop()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for epoch in range(2, 6):
        service, _ = world.start(epoch)
        Worker_(world.folder, "a").close()
        service.stop(drain=True)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert threading.active_count() <= threads
    assert not list(world.folder.glob("*.sock"))
    with pytest.raises(TierKVError):
        Worker_(world.folder, "a")
