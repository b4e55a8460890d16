"""Moves on a device that is late: what is told when, what may fly beside what, and what a failure waits for."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import triton_device  # noqa: F401  # skips the module where kernels cannot run
from tests.fake_cuda import GRANULE, FakeDevice, fake_gpu
from tierkv.daemon import device_carrier
from tierkv.daemon.desk import DESKS
from tierkv.daemon.events import Copy, FitCodec, MoveDone, MoveFailed, Quantize
from tierkv.daemon.forms import Forms
from tierkv.daemon.mover import Mover
from tierkv.daemon.pools import HostPool
from tierkv.geometry import Geometry
from tierkv.pool import checksum
from tierkv.quant import get

GEOMETRY = Geometry(1, 1, 16, "float32", 16)
PAGE = GEOMETRY.page_bytes  # 2048
STATE = 100 * PAGE


class World:
    def __init__(self, folder: Path) -> None:
        self.device = FakeDevice()
        gpu = fake_gpu(device=self.device)
        self.hbm, self.host = gpu.pools.create(GRANULE), HostPool(folder, 64 * PAGE)
        self.results: queue.Queue[MoveDone | MoveFailed] = queue.Queue()
        carrier = gpu.carrier({"hbm": self.hbm, "host": self.host}, Forms(get("k3v2")))
        self.out, self.into, self.kernels = self.device.streams
        self.mover = Mover(carrier, self.results.put)
        self.mover.start()

    def nothing_for(self, seconds: float) -> bool:
        try:
            self.results.get(timeout=seconds)
        except queue.Empty:
            return True
        return False


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for stream in world.device.streams:
        stream.held = False
    world.mover.stop()
    assert not world.mover.alive() and world.mover.restarts == 0
    world.hbm.close()
    world.host.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.001)


def test_a_copy_is_told_when_it_is_done_and_hinders_nobody(world: World) -> None:
    page = np.arange(PAGE, dtype=np.uint8)
    world.hbm.write(0, page)
    world.host.write(PAGE, page[::-1].copy())
    world.out.held = True
    world.mover.submit(Copy(1, "hbm", 0, 0, "host", 0, PAGE, 1))
    until(lambda: world.out.launched == 1)
    assert world.nothing_for(0.05)
    world.mover.submit(Copy(2, "host", PAGE, checksum(page[::-1].copy(), 2), "hbm", PAGE, PAGE, 2))
    world.mover.submit(Copy(3, "hbm", 0, 0, "hbm", 2 * PAGE, PAGE, 3))
    assert {world.results.get(timeout=5).move for _ in range(2)} == {2, 3}
    assert world.mover.pending() == 1 and world.mover.busy_seconds() > 0.05
    assert not world.host.read(0, PAGE).any()
    world.out.held = False
    assert world.results.get(timeout=5) == MoveDone(1, checksum(page, 1))
    np.testing.assert_array_equal(world.host.read(0, PAGE), page)
    until(lambda: world.mover.busy_seconds() == 0)


def fit(world: World) -> None:
    world.mover.submit(FitCodec(90, GEOMETRY, (0,), (16,), STATE))
    assert world.results.get(timeout=60) == MoveDone(90)


def encode_one(world: World) -> None:
    """From now on the codec's state need not be read."""
    fit(world)
    world.mover.submit(Quantize(91, GEOMETRY, STATE, 16, "hbm", 0, 0, "hbm", PAGE, 1))
    assert world.results.get(timeout=60) == MoveDone(91)


def test_more_pages_than_desks_are_encoded_in_turn(world: World) -> None:
    encode_one(world)
    world.out.held = True
    before = world.out.launched
    for number in range(DESKS + 3):
        at = (20 + number) * PAGE
        world.mover.submit(Quantize(number, GEOMETRY, STATE, 16, "hbm", number * PAGE, 0, "host", at, 1))
    until(lambda: world.out.launched == before + 2 * DESKS)  # waits for the kernel, and copies
    assert world.nothing_for(0.1)
    assert world.out.launched == before + 2 * DESKS
    world.out.held = False
    assert {world.results.get(timeout=60).move for _ in range(DESKS + 3)} == set(range(DESKS + 3))


def test_models_that_have_gone_leave_no_codec_on_the_device(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its state elsewhere. What was dropped is fetched again."""
    made: list[int] = []
    make = device_carrier.device_pages

    def count(*args: Any) -> Any:
        made.append(1)
        return make(*args)

    monkeypatch.setattr(device_carrier, "device_pages", count)
    monkeypatch.setattr(device_carrier, "MODELS", 2)
    for model in (0, 1, 1, 2, 2, 0):
        state = STATE + model * PAGE
        world.mover.submit(Quantize(model, GEOMETRY, state, 16, "hbm", 0, 0, "hbm", PAGE, 1))
        assert world.results.get(timeout=60) == MoveDone(model)
    assert len(made) == 4  # 0, 1, 2, and 0 again


def test_a_page_from_host_is_encoded_after_it_has_arrived(world: World) -> None:
    fit(world)
    page = np.random.default_rng(0).standard_normal(PAGE // 4).astype(np.float32).view(np.uint8)
    world.host.write(0, page)
    world.mover.submit(Quantize(1, GEOMETRY, STATE, 16, "host", 0, checksum(page, 5), "host", PAGE, 5))
    done = world.results.get(timeout=60)
    packed = world.host.read(PAGE, get("k3v2").page_bytes(GEOMETRY))
    assert done == MoveDone(1, checksum(packed, 5))
    assert packed.any()


def test_a_failure_is_told_when_nothing_of_the_move_is_running(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its destination is given to another page then."""
    encode_one(world)
    page = np.ones(PAGE // 4, np.float32).view(np.uint8)
    world.host.write(0, page)
    tried: list[object] = []

    def broken(*args: object) -> None:
        tried.append(args)
        raise RuntimeError("the launch failed")

    monkeypatch.setattr("tierkv.quant.rotated_triton.RotatedPages.encode", broken)
    world.out.held = True
    world.out.launch(lambda: None)  # another's copy, of which nobody can tell that it is not the move's
    world.mover.submit(Quantize(1, GEOMETRY, STATE, 16, "host", 0, checksum(page, 5), "hbm", PAGE, 5))
    until(lambda: bool(tried))
    assert world.nothing_for(0.1)
    world.out.held = False
    assert world.results.get(timeout=5) == MoveFailed(1, "codec")


def test_a_device_that_breaks_fails_moves_and_not_the_thread(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(fence: object) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr("tests.fake_cuda.FakeFence.query", lost)
        world.mover.submit(Copy(1, "hbm", 0, 0, "host", 0, PAGE, 1))
        assert world.results.get(timeout=5) == MoveFailed(1, "io")
    world.mover.submit(Copy(2, "hbm", 0, 0, "host", 0, PAGE, 1))
    assert isinstance(world.results.get(timeout=5), MoveDone)
