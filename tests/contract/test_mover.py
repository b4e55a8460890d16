"""What a move does wherever pages lie: in this machine's memory, and on a fake GPU whose kernels are interpreted."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests import triton_device  # noqa: F401  # skips the module where kernels cannot run
from tests.fake_cuda import GRANULE, FakeDriver, fake_gpu
from tierkv.daemon.calibrations import Calibrations
from tierkv.daemon.carriers import Move
from tierkv.daemon.cpu_carrier import CpuCarrier
from tierkv.daemon.events import Copy, FitCodec, MoveDone, MoveFailed, Quantize, Summarize
from tierkv.daemon.forms import Forms
from tierkv.daemon.mover import Mover
from tierkv.daemon.pools import BytePool, Bytes, HbmPool, HostPool
from tierkv.geometry import Geometry
from tierkv.pool import checksum
from tierkv.prefetch.deviation import DEVIATION
from tierkv.prefetch.transform_digests import TransformForm, flat_state
from tierkv.quant import get
from tierkv.quant.moments import About, KeyTransform, plain_keys, save, standard
from tierkv.table import Kind

GEOMETRY = Geometry(2, 2, 16, "float32", 16)
PAGE = GEOMETRY.page_bytes  # 8192
CODEC = get("k3v2")
PACKED = CODEC.page_bytes(GEOMETRY)
STATE, FREE = 8 * PAGE, 16 * PAGE  # where the codec's state lies in HBM, and unused memory
KEY = 42
RANDOM = np.random.default_rng(7)


ABOUT = About("m", 2, 2, 16, "float32", ("noise",), 100)


def keys_of(seed: int) -> KeyTransform:
    random = np.random.default_rng(seed)
    return KeyTransform(*(random.random(part.shape, np.float32) + 0.5 for part in plain_keys(GEOMETRY)))


@dataclass
class World:
    hbm: BytePool
    host: BytePool
    mover: Mover
    results: queue.Queue[MoveDone | MoveFailed]
    moves: list[tuple[str, str, int]] = field(default_factory=list)

    def run(self, move: Move) -> MoveDone | MoveFailed:
        self.mover.submit(move)
        return self.results.get(timeout=60)

    def page(self, offset: int, pool: str = "hbm") -> Bytes:
        page = RANDOM.standard_normal(PAGE // 4).astype(np.float32).view(np.uint8)
        getattr(self, pool).write(offset, page)
        return page

    def fit(self) -> np.ndarray:
        """The codec's state in HBM, from one page."""
        self.page(FREE)
        assert self.run(FitCodec(99, GEOMETRY, (FREE,), (16,), STATE)) == MoveDone(99)
        return self.hbm.read(STATE, 4 * CODEC.state_floats(GEOMETRY)).view(np.float32)


@pytest.fixture(params=["cpu", "cuda"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    for number, file in enumerate(("old.npz", "new.npz")):
        save(tmp_path / file, standard(GEOMETRY), keys_of(number), ABOUT)
        os.utime(tmp_path / file, (1e9 + number, 1e9 + number))
    forms, results = Forms(CODEC, None, Calibrations(tmp_path, True), measure_every=1), queue.Queue()
    host = HostPool(tmp_path, 32 * PAGE)
    moves: list[tuple[str, str, int]] = []
    if request.param == "cpu":
        hbm: BytePool = HbmPool.create(32 * PAGE)
        carrier = CpuCarrier({"hbm": hbm, "host": host}, forms)
    else:
        gpu = fake_gpu(driver := FakeDriver())
        hbm = gpu.pools.create(GRANULE)
        carrier = gpu.carrier({"hbm": hbm, "host": host}, forms)
    mover = Mover(carrier, results.put, lambda src, dst, seconds, size: moves.append((src, dst, size)))
    mover.start()
    yield World(hbm, host, mover, results, moves)
    mover.stop()
    assert not mover.alive() and mover.pending() == 0 and mover.restarts == 0
    hbm.close()
    host.close()
    if request.param == "cuda":
        assert driver.left() == (0, 0, 0, 0)


def test_a_backup_has_the_exact_bytes_and_a_checksum_seeded_with_the_page(world: World) -> None:
    exact = world.page(512)
    done = world.run(Copy(7, "hbm", 512, 0, "host", 1024, PAGE, KEY))
    assert done == MoveDone(7, xxhash.xxh3_64_intdigest(exact.tobytes(), seed=KEY))
    np.testing.assert_array_equal(world.host.read(1024, PAGE), exact)
    assert world.moves == [("hbm", "host", PAGE)]


def test_a_page_comes_back_and_moves_within_hbm_with_the_same_bytes(world: World) -> None:
    exact = world.page(0)
    backup = world.run(Copy(1, "hbm", 0, 0, "host", 0, PAGE, KEY))
    assert isinstance(backup, MoveDone)
    assert world.run(Copy(2, "host", 0, backup.checksum, "hbm", 2 * PAGE, PAGE, KEY)) == MoveDone(2)
    assert world.run(Copy(3, "hbm", 2 * PAGE, 0, "hbm", 5 * PAGE, PAGE, KEY)) == MoveDone(3)
    np.testing.assert_array_equal(world.hbm.read(2 * PAGE, PAGE), exact)
    np.testing.assert_array_equal(world.hbm.read(5 * PAGE, PAGE), exact)
    assert world.moves == [("hbm", "host", PAGE), ("host", "hbm", PAGE), ("hbm", "hbm", PAGE)]


@pytest.mark.parametrize("damage", ["a bit", "another page's key"])
def test_damaged_host_bytes_are_never_copied_encoded_or_summarized(world: World, damage: str) -> None:
    world.page(0)
    backup = world.run(Copy(1, "hbm", 0, 0, "host", 0, PAGE, KEY))
    assert isinstance(backup, MoveDone)
    key = KEY if damage == "a bit" else KEY + 1
    if damage == "a bit":
        byte = world.host.read(17, 1).copy()
        world.host.write(17, byte ^ 1)
    before = world.hbm.read(0, 32 * PAGE).copy()
    source = (0, backup.checksum)
    for number, move in enumerate((
        Copy(2, "host", *source, "hbm", PAGE, PAGE, key),
        Quantize(3, GEOMETRY, STATE, 16, "host", *source, "hbm", PAGE, key),
        Summarize(4, GEOMETRY, 2, 16, 0, Kind.EXACT, backup.checksum, -1, PAGE, key),
    ), 2):  # fmt: skip
        assert world.run(move) == MoveFailed(number, "checksum")
    np.testing.assert_array_equal(world.hbm.read(0, 32 * PAGE), before)


@pytest.mark.parametrize("src", ["hbm", "host"])
@pytest.mark.parametrize("dst", ["hbm", "host"])
def test_a_page_is_encoded_from_and_into_either_pool(world: World, src: str, dst: str) -> None:
    """The packed page, and what it decodes to, are the reference's but for the last bits of a scale."""
    state = world.fit()
    exact = world.page(3 * PAGE, src)
    source = checksum(exact, KEY) if src == "host" else 0
    done = world.run(Quantize(1, GEOMETRY, STATE, 9, src, 3 * PAGE, source, dst, PAGE, KEY))
    assert isinstance(done, MoveDone)
    packed = getattr(world, dst).read(PAGE, PACKED)
    assert done.checksum == (checksum(packed, KEY) if dst == "host" else 0)
    assert world.moves[-1] == (src, "quantized" if dst == "hbm" else "host", PACKED)
    expected = CODEC.reference_encode(GEOMETRY, exact, 9, state)
    assert (packed != expected).mean() < 0.02
    decoded = np.asarray(CODEC.reference_decode(GEOMETRY, packed, 9, state))
    wanted = np.asarray(CODEC.reference_decode(GEOMETRY, expected, 9, state))
    np.testing.assert_allclose(decoded, wanted, rtol=1e-4, atol=1e-5)
    keys, values = exact.view(np.float32).reshape(GEOMETRY.shape)[:, :, :, :9].transpose(1, 0, 2, 3, 4)
    read = decoded.reshape(GEOMETRY.shape)[:, :, :, :9].transpose(1, 0, 2, 3, 4)
    losses = [float(((r - x) ** 2).sum() / (x**2).sum()) for r, x in zip(read, (keys, values), strict=True)]
    assert done.errors == pytest.approx(losses, rel=1e-3)


def test_a_codecs_state_is_the_mean_of_the_keys_of_pages_that_are_finite(world: World) -> None:
    broken = world.page(0).view(np.float32).copy()
    broken[5] = np.inf
    world.hbm.write(0, broken.view(np.uint8))
    sound = [world.page(offset).view(np.float32).reshape(GEOMETRY.shape) for offset in (PAGE, 2 * PAGE)]
    assert world.run(FitCodec(1, GEOMETRY, (0, PAGE, 2 * PAGE), (16, 16, 16), STATE)) == MoveDone(1)
    state = world.hbm.read(STATE, 4 * CODEC.state_floats(GEOMETRY)).view(np.float32)
    mean = np.concatenate([page[:, 0] for page in sound], axis=2).mean(axis=2)  # [layers, heads, dim]
    np.testing.assert_allclose(state.reshape(mean.shape), mean, atol=1e-6)


def test_a_state_that_takes_anothers_place_is_the_one_that_encodes(world: World) -> None:
    """A model has gone and the next one's state lies where its state lay."""
    world.fit()
    exact = world.page(0)
    world.run(Quantize(1, GEOMETRY, STATE, 16, "hbm", 0, 0, "hbm", PAGE, KEY))
    state = world.fit()
    assert isinstance(
        world.run(Quantize(2, GEOMETRY, STATE, 16, "hbm", 0, 0, "hbm", 2 * PAGE, KEY)), MoveDone
    )
    packed = world.hbm.read(2 * PAGE, PACKED)
    expected = CODEC.reference_encode(GEOMETRY, exact, 16, state)
    assert (packed != expected).mean() < 0.02


def test_a_page_that_is_not_finite_is_refused(world: World) -> None:
    world.fit()
    page = world.page(0).view(np.float32).copy()
    page[-1] = np.nan
    world.hbm.write(0, page.view(np.uint8))
    encode = Quantize(1, GEOMETRY, STATE, 16, "hbm", 0, 0, "hbm", PAGE, KEY)
    assert world.run(encode) == MoveFailed(1, "non-finite")
    world.hbm.write(0, page[: PAGE // 8].repeat(2).view(np.uint8))
    assert isinstance(world.run(encode._replace(move=2)), MoveDone)  # the mark is not another page's
    only_keys = np.full(PAGE // 4, np.nan, np.float32)
    world.hbm.write(0, only_keys.view(np.uint8))
    assert world.run(FitCodec(3, GEOMETRY, (0,), (16,), STATE)) == MoveFailed(3, "non-finite")


@pytest.mark.parametrize("kind", [Kind.EXACT, Kind.QUANTIZED])
def test_a_digest_is_that_of_what_the_host_replica_says(world: World, kind: Kind) -> None:
    state = world.fit()
    exact = world.page(0)
    if kind == Kind.EXACT:
        backup = world.run(Copy(1, "hbm", 0, 0, "host", 0, PAGE, KEY))
        read = exact
    else:
        backup = world.run(Quantize(1, GEOMETRY, STATE, 16, "hbm", 0, 0, "host", 0, KEY))
        packed = world.host.read(0, PACKED)
        read = np.empty(PAGE, np.uint8)
        CODEC.decode(GEOMETRY, packed, 16, state, read)
    assert isinstance(backup, MoveDone)
    move = Summarize(2, GEOMETRY, 2, 16, 0, kind, backup.checksum, STATE, 5 * PAGE, KEY)
    assert world.run(move) == MoveDone(2)
    digests = DEVIATION.of(GEOMETRY, 2)
    shape, expected = digests.shape, np.empty(digests.shape.nbytes, np.uint8)
    digests.reference_write(read, 16, expected)
    np.testing.assert_array_equal(world.hbm.read(5 * PAGE, shape.nbytes), expected)
    assert world.moves[-1] == ("host", "digest", shape.nbytes)


WRONG: list[tuple[Callable[[int], Move], str]] = [
    (lambda size: Copy(1, "hbm", size - 10, 0, "host", 0, PAGE, KEY), "io"),
    (lambda size: Copy(1, "hbm", 0, 0, "host", 32 * PAGE - 10, PAGE, KEY), "io"),
    (lambda size: Copy(1, "hbm", 0, 0, "nvme", 0, PAGE, KEY), "io"),
    (lambda size: Quantize(1, GEOMETRY, STATE, 16, "hbm", 0, 0, "nvme", 0, KEY), "io"),
    (lambda size: Quantize(1, GEOMETRY, STATE, 16, "hbm", size - 10, 0, "hbm", 0, KEY), "codec"),
    (lambda size: Quantize(1, GEOMETRY, STATE, 16, "hbm", 0, 0, "hbm", -64, KEY), "codec"),
    (lambda size: Quantize(1, GEOMETRY, -1, 16, "hbm", 0, 0, "hbm", PAGE, KEY), "codec"),
    (lambda size: Quantize(1, GEOMETRY, -1, 16, "hbm", 0, 0, "hbm", PAGE, KEY, Kind.MIDDLE), "codec"),
]


@pytest.mark.parametrize(("wrong", "reason"), WRONG)
def test_every_failure_is_answered_and_the_next_move_goes_well(
    world: World, wrong: Callable[[int], Move], reason: str
) -> None:
    exact = world.page(0)
    assert world.run(wrong(world.hbm.size)) == MoveFailed(1, reason)
    assert isinstance(world.run(Copy(2, "hbm", 0, 0, "host", 0, PAGE, KEY)), MoveDone)
    np.testing.assert_array_equal(world.host.read(0, PAGE), exact)


def test_many_moves_at_once_end_each_in_its_own_answer(world: World) -> None:
    world.fit()
    pages = {offset: world.page(offset) for offset in range(0, 6 * PAGE, PAGE)}
    for number, offset in enumerate(pages):
        world.mover.submit(Copy(2 * number, "hbm", offset, 0, "host", offset, PAGE, number))
        low_bit = Quantize(
            2 * number + 1, GEOMETRY, STATE, 16, "hbm", offset, 0, "host", 16 * PAGE + offset, number
        )
        world.mover.submit(low_bit)
    found = {done.move: done for done in (world.results.get(timeout=60) for _ in range(12))}
    assert set(found) == set(range(12))
    for number, (offset, page) in enumerate(pages.items()):
        assert found[2 * number] == MoveDone(2 * number, checksum(page, number))
        packed = world.host.read(16 * PAGE + offset, PACKED)
        low_bit_done = found[2 * number + 1]
        assert isinstance(low_bit_done, MoveDone) and low_bit_done.checksum == checksum(packed, number)


def test_a_transforms_state_lies_behind_the_codecs_and_its_digests_are_made_by_it(world: World) -> None:
    """By that of the latest calibration, until another model's state lies there."""
    world.page(FREE)
    fit = FitCodec(1, GEOMETRY, (FREE,), (16,), STATE, "m", "transform-24")
    assert world.run(fit) == MoveDone(1)
    floats = CODEC.state_floats(GEOMETRY)
    read = world.hbm.read(STATE, 4 * (floats + TransformForm(24).state_floats(GEOMETRY))).view(np.float32)
    own = flat_state(keys_of(1))
    np.testing.assert_array_equal(read[floats:], own)
    exact = world.page(0)
    backup = world.run(Copy(2, "hbm", 0, 0, "host", 0, PAGE, KEY))
    assert isinstance(backup, MoveDone)
    for number, state in enumerate((own, 2 * own)):
        world.hbm.write(STATE + 4 * floats, state.view(np.uint8))
        move = Summarize(
            3 + number, GEOMETRY, 1, 16, 0, Kind.EXACT, backup.checksum, STATE, 5 * PAGE, KEY, "transform-24"
        )
        assert world.run(move) == MoveDone(3 + number)
        digests = TransformForm(24).of(GEOMETRY, 1, own)
        expected = np.empty(digests.shape.nbytes, np.uint8)
        digests.write(exact, 16, expected)  # read once: it does not change while it lies there
        np.testing.assert_array_equal(world.hbm.read(5 * PAGE, len(expected)), expected)


def test_a_model_that_no_calibration_describes_has_no_state_of_digests(world: World) -> None:
    world.page(FREE)
    fit = FitCodec(1, GEOMETRY, (FREE,), (16,), STATE, "another", "transform-24")
    assert world.run(fit) == MoveFailed(1, "codec")
