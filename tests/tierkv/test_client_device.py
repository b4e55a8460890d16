"""A client of a daemon whose HBM is on a (fake) GPU: what it maps, and what waits for its kernels."""

from __future__ import annotations

import gc
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tierkv
from tests import triton_device  # noqa: F401  # skips the module where kernels cannot run
from tests.fake_cuda import GRANULE, UUIDS, FakeDevice, FakeDriver, fake_gpu
from tests.faults.pages import SMALL, token_values
from tests.tierkv.local_daemon import PAGE, World, until
from tierkv import Client, Geometry, Session, handshake
from tierkv.daemon import events
from tierkv.daemon.service import Service
from tierkv.errors import ConfigError, TierKVError
from tierkv.protocol import PROTOCOL_VERSION, Attach, Plan
from tierkv.quant import get
from tierkv.table import Kind

POOL = GRANULE // PAGE  # 256 pages
LARGE = Geometry(1, 8, 64, "float32", 16)
"""64 KiB a page."""


class Gpus:
    """The GPU as the daemon and as the workers of this process see it."""

    def __init__(self) -> None:
        self.daemon, self.worker = FakeDriver(), FakeDriver()
        self.kernels = FakeDevice()

    def busy(self) -> None:
        """The worker's kernels run on, until they are let go."""
        self.kernels.current.held = True
        self.kernels.current.launch(lambda: None)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    gpus = Gpus()
    monkeypatch.setattr("tierkv.device_pool.CudaDriver", lambda: gpus.worker)
    monkeypatch.setattr("tierkv.device_pool.CudaDevice", lambda index: gpus.kernels)
    return gpus


@pytest.fixture
def world(gpus: Gpus) -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        world = World(Path(folder))
        yield world
        for thing in reversed(world.open):
            (thing.close if isinstance(thing, Client) else thing.stop)()
        world.open.clear()
        gc.collect()  # sessions, and with them tensors over the pool
        assert gpus.worker.left() == gpus.daemon.left() == (0, 0, 0, 0)


def put(client: Client, session: Session, tokens: int, steps: int = 0) -> None:
    """A step that writes tokens as kernels do: through the tensor."""
    session.begin(tokens)
    pool = client.mapped().tensor
    assert pool is not None
    memory, geometry = pool.numpy(), session.geometry
    for token in range(session.length - tokens, session.length):
        ((offset,), (slot,)) = session.slots(token, token + 1)
        page = memory[offset : offset + geometry.page_bytes].view(np.float32).reshape(geometry.shape)
        page[:, :, :, slot] = token_values(geometry, 1, token)
    session.commit(steps=steps)
    session.end()


def told(service: Service, monkeypatch: pytest.MonkeyPatch) -> list[events.Event]:
    """Events that the brain gets from now on."""
    heard: list[events.Event] = []
    handle = service.brain.handle

    def listen(event: events.Event, now: float) -> list[events.Instruction]:
        heard.append(event)
        return handle(event, now)

    monkeypatch.setattr(service.brain, "handle", listen)
    return heard


def test_the_pool_is_a_tensor_over_the_daemons_memory(world: World, gpus: Gpus) -> None:
    service = world.service(hbm=POOL, gpu=fake_gpu(gpus.daemon))
    client = world.client()
    session = client.open(SMALL, "m")
    view = session.pool
    assert view.tensor is not None and len(view.tensor) == client.hbm_bytes == GRANULE
    assert len(view.data) == len(client.hbm()) == 0
    assert session.host.tensor is None and len(session.host.data) == client.host_bytes
    hbm = service._pools["hbm"]
    hbm.write(100, np.arange(8, dtype=np.uint8))
    assert view.tensor[100:108].tolist() == list(range(8))
    assert os.environ.get("TRITON_INTERPRET") == "1" or view.tensor.is_cuda


def test_pages_are_backed_up_and_become_low_bit_and_their_state_is_read_once(
    world: World, gpus: Gpus
) -> None:
    """More pages than the pool holds exactly, so that some must give way."""
    service = world.service(hbm=POOL, host=4 * POOL, gpu=fake_gpu(gpus.daemon))
    client = world.client()
    session = client.open(LARGE, "m")
    for _ in range(GRANULE // LARGE.page_bytes + 4):
        put(client, session, 16)
    until(lambda: client.stats()["pages_quantized"] > 0)
    session.begin(0)  # the table stands still
    codec, view, start = get("k3v2"), session.pool, 0
    assert view.codec_state.shape == (codec.state_floats(LARGE),) and view.codec_state.any()
    assert view.tensor is not None
    forms = {Kind.EXACT: 0, Kind.QUANTIZED: 0}
    for entry in session._residency.table.entries(session.horizon):
        values = np.stack([token_values(LARGE, 1, t) for t in range(start, start + entry.count)], 3)
        start += entry.count
        if entry.host_kind == Kind.EXACT:
            backup = client.host()[entry.host_offset : entry.host_offset + LARGE.page_bytes].view(np.float32)
            np.testing.assert_array_equal(backup.reshape(LARGE.shape)[:, :, :, : entry.count], values)
        if entry.kind == Kind.QUANTIZED:
            packed = view.tensor[entry.offset : entry.offset + codec.page_bytes(LARGE)].numpy()
            read = np.asarray(codec.reference_decode(LARGE, packed, entry.count, view.codec_state))
            lost = ((read.reshape(LARGE.shape)[:, :, :, : entry.count] - values) ** 2).sum() / (
                values**2
            ).sum()
            assert 0.01 < lost < 0.12  # of a Gaussian 3 bits lose .035 and 2 bits .118
        if entry.kind in forms:
            forms[Kind(entry.kind)] += 1
    assert min(forms.values()) > 0
    session.end()
    assert service.loop.errors == 0 and client.stats()["hbm_used_bytes"] <= GRANULE


def test_tokens_are_told_when_the_kernels_that_wrote_them_are_done_and_nobody_waits(
    world: World, gpus: Gpus
) -> None:
    world.service(hbm=POOL, gpu=fake_gpu(gpus.daemon))
    client = world.client()
    session = client.open(SMALL, "m")
    gpus.busy()
    start = time.monotonic()
    put(client, session, 100)
    put(client, session, 100)  # its pages are reserved all the same
    assert time.monotonic() - start < 2.0
    time.sleep(0.1)
    assert client.stats()["tokens"] == 0
    gpus.kernels.current.held = False
    until(lambda: client.stats()["tokens"] == 200)


def test_a_plan_is_acknowledged_when_the_kernels_that_read_the_old_table_are_done(
    world: World, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = world.service(hbm=POOL, gpu=fake_gpu(gpus.daemon))
    client = world.client()
    session = client.open(SMALL, "m")
    put(client, session, 64)
    until(lambda: client.stats()["tokens"] == 64)
    heard = told(service, monkeypatch)
    session.begin(0)
    gpus.busy()
    session.end()  # its kernels run on
    version = session.version
    session.offer(Plan(session.id, version + 1, []))  # as if the daemon had sent one
    assert session.version == version + 1
    time.sleep(0.1)
    acknowledged = (client.id, session.id, version + 1)
    assert not [event for event in heard if isinstance(event, events.Acked) and tuple(event) == acknowledged]
    gpus.kernels.current.held = False
    until(lambda: events.Acked(*acknowledged) in heard)


def test_a_gpu_that_breaks_ends_the_session_and_not_the_line(
    world: World, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.service(hbm=POOL, gpu=fake_gpu(gpus.daemon))
    client = world.client()
    session = client.open(SMALL, "m")

    def lost(fence: object) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with monkeypatch.context() as patch:
        patch.setattr("tests.fake_cuda.FakeFence.query", lost)
        put(client, session, 10)
        until(lambda: session._troubles.broken is not None)
    with pytest.raises(TierKVError, match="the GPU failed: CUDA error: device-side assert"):
        session.begin(1)
    assert client.ping() < 5.0 and client.stats()["tokens"] == 0


def test_leaving_waits_for_kernels_and_gives_everything_back(world: World, gpus: Gpus) -> None:
    world.service(hbm=POOL, gpu=fake_gpu(gpus.daemon))
    watcher = world.client()
    client = tierkv.connect(world.folder)
    session = client.open(SMALL, "m")
    put(client, session, 100)
    until(lambda: watcher.stats()["tokens"] == 100)
    before = gpus.kernels.synchronized
    client.close()
    assert gpus.kernels.synchronized == before + 1
    until(lambda: watcher.stats()["hbm_used_bytes"] == 0 and watcher.stats()["workers"] == 1)


def test_a_stream_that_ends_without_a_farewell_is_not_yet_a_workers_end(world: World, gpus: Gpus) -> None:
    """The process may be dying, with kernels that still run."""
    world.service(hbm=POOL, gpu=fake_gpu(gpus.daemon))
    watcher = world.client()
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        attach = Attach(PROTOCOL_VERSION, "dying")
        stream, *_ = handshake.attach(world.folder, attach, None, 10.0)
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        stream.shutdown(socket.SHUT_RDWR)
        stream.close()
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    until(lambda: watcher.stats()["workers"] == 2)
    os.write(go[1], b"x")
    os.read(ready[0], 1)
    time.sleep(0.3)
    assert watcher.stats()["workers"] == 2
    os.write(go[1], b"x")
    os.waitpid(child, 0)
    until(lambda: watcher.stats()["workers"] == 1)
    for end in (*ready, *go):
        os.close(end)


def test_a_new_owner_takes_the_memory_over_and_the_worker_goes_on(world: World, gpus: Gpus) -> None:
    first = world.service(hbm=POOL, gpu=fake_gpu(gpus.daemon))
    client = world.client(timeout=20.0)
    session = client.open(SMALL, "m")
    put(client, session, 100)
    until(lambda: client.stats()["tokens"] == 100)
    tensor = session.pool.tensor
    settled = gpus.kernels.synchronized
    world.open.remove(first)
    first.stop()
    second = world.service(hbm=POOL, gpu=fake_gpu(gpus.daemon), epoch=2)
    until(lambda: client.connected and client.epoch == 2, 20.0)
    assert gpus.kernels.synchronized > settled  # what the tables say was written before they were handed over
    assert client.stats()["tokens"] == 100 and not second.adopting()
    assert session.pool.tensor is tensor
    put(client, session, 28)
    until(lambda: client.stats()["tokens"] == 128)
    hbm = second._pools["hbm"]
    start = 0
    for entry in session._residency.table.entries(128):
        page = hbm.read(entry.offset, PAGE).view(np.float32).reshape(SMALL.shape)
        for slot in range(entry.count):
            np.testing.assert_array_equal(page[:, :, :, slot], token_values(SMALL, 1, start + slot))
        start += entry.count


def test_a_tensor_that_is_still_held_keeps_the_memory(world: World, gpus: Gpus) -> None:
    world.service(hbm=POOL, gpu=fake_gpu(gpus.daemon))
    client = tierkv.connect(world.folder)
    tensor = client.mapped().tensor
    assert tensor is not None
    part = tensor[64:128]
    del tensor
    client.close()
    gc.collect()
    part[:] = 7
    assert gpus.worker.left()[2] == 1
    del part
    gc.collect()
    assert gpus.worker.left() == (0, 0, 0, 0)


def test_a_gpu_that_this_process_does_not_see_is_named(world: World, gpus: Gpus) -> None:
    gpu = fake_gpu(gpus.daemon)
    gpu.uuid = "cc" * 16
    world.service(hbm=POOL, gpu=gpu)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=rf"{'cc' * 16} is not visible here .*{UUIDS[0]}"):
        tierkv.connect(world.folder)
    until(lambda: len(os.listdir("/proc/self/fd")) == before)  # on both sides


def test_what_kernels_do_not_serve_is_refused_at_the_start(world: World, gpus: Gpus) -> None:
    for settings, said in (
        ({"codec": "kivi2"}, "codec = 'kivi2' has no kernels for a GPU; take k3v2, rotated2 or klt2"),
        ({"codec": "k3v2,0=exact"}, "has no kernels"),
        ({"middle": "nf4"}, "write no middle form"),
    ):
        with pytest.raises(ConfigError, match=said):
            world.service(hbm=POOL, gpu=fake_gpu(gpus.daemon), **settings)
    with pytest.raises(ConfigError, match="less than one allocation of this GPU"):
        world.service(hbm=POOL // 2, gpu=fake_gpu(gpus.daemon))
