from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tierkv.daemon.cpu_carrier import CpuCarrier
from tierkv.daemon.events import Copy, FitCodec, MoveDone, MoveFailed, Quantize, Summarize
from tierkv.daemon.forms import Forms
from tierkv.daemon.mover import Mover
from tierkv.daemon.pools import HbmPool, HostPool
from tierkv.geometry import Geometry
from tierkv.pool import checksum
from tierkv.prefetch.deviation import DEVIATION
from tierkv.quant import get
from tierkv.quant.contract import Bytes, Codec, Floats, NonFiniteValues
from tierkv.table import Kind

GEOMETRY = Geometry(1, 1, 8, "float32", 4)
PAGE = GEOMETRY.page_bytes  # 256
SIZE = 4 * 4096
RANDOM = np.random.default_rng(0)


class Signs(Codec):
    """One byte a value: is it above the state's single float?"""

    name = "signs"
    code = 99

    def page_bytes(self, geometry: Geometry) -> int:
        return geometry.values

    def state_floats(self, geometry: Geometry) -> int:
        return 1

    def fit_state(self, geometry: Geometry, pages, counts) -> Floats:
        mean = np.mean([page.view(np.float32).mean() for page in pages])
        if not np.isfinite(mean):
            raise NonFiniteValues("not finite")
        return np.array([mean], np.float32)

    def encode(self, geometry: Geometry, exact: Bytes, count: int, state: Floats, out: Bytes) -> None:
        values = exact.view(np.float32)
        if not np.isfinite(values).all():
            raise NonFiniteValues("not finite")
        if count > geometry.page_tokens:
            raise RuntimeError("a codec's own bug")
        out[:] = values > state[0]

    def decode(self, geometry, packed, count, state, out) -> None: ...

    def reference_encode(self, geometry, exact, count, state) -> Bytes:
        return exact

    def reference_decode(self, geometry, packed, count, state) -> Floats:
        return state


class Shell:
    def __init__(self, folder: Path) -> None:
        self.hbm, self.host = HbmPool.create(SIZE), HostPool(folder, SIZE)
        self.results: queue.Queue[MoveDone | MoveFailed] = queue.Queue()
        self.moves: list[tuple[str, str, int]] = []
        self.mover = Mover(
            CpuCarrier({"hbm": self.hbm, "host": self.host}, Forms(Signs())), self.results.put,
            lambda src, dst, seconds, size: self.moves.append((src, dst, size)),
        )  # fmt: skip
        self.mover.start()

    def run(self, move: Copy | Quantize | FitCodec) -> MoveDone | MoveFailed:
        self.mover.submit(move)
        return self.results.get(timeout=5)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.mover.stop()
    assert not shell.mover.alive()
    shell.hbm.close()
    shell.host.close()


def page(shell: Shell, offset: int, pool: str = "hbm") -> Bytes:
    values = RANDOM.standard_normal(PAGE // 4).astype(np.float32).view(np.uint8)
    getattr(shell, pool).write(offset, values)
    return values


def test_a_backup_has_the_exact_bytes_and_a_checksum_seeded_with_the_page(shell: Shell) -> None:
    exact = page(shell, 512)
    done = shell.run(Copy(7, "hbm", 512, 0, "host", 1024, PAGE, 42))
    assert done == MoveDone(7, xxhash.xxh3_64_intdigest(exact.tobytes(), seed=42))
    assert np.array_equal(shell.host.read(1024, PAGE), exact)
    assert shell.moves == [("hbm", "host", PAGE)]


def test_a_recall_brings_the_same_bytes_back(shell: Shell) -> None:
    exact = page(shell, 0)
    backup = shell.run(Copy(1, "hbm", 0, 0, "host", 0, PAGE, 5))
    assert shell.run(Copy(2, "host", 0, backup.checksum, "hbm", 4096, PAGE, 5)) == MoveDone(2, 0)
    assert np.array_equal(shell.hbm.read(4096, PAGE), exact)


@pytest.mark.parametrize("damage", ["a bit", "another page's key"])
def test_damaged_host_bytes_are_never_copied(shell: Shell, damage: str) -> None:
    page(shell, 0)
    backup = shell.run(Copy(1, "hbm", 0, 0, "host", 0, PAGE, 5))
    if damage == "a bit":
        shell.host.data[17] ^= 1
    key = 5 if damage == "a bit" else 6
    before = shell.hbm.data.copy()
    assert shell.run(Copy(2, "host", 0, backup.checksum, "hbm", 4096, PAGE, key)) == MoveFailed(2, "checksum")
    assert shell.run(
        Quantize(3, GEOMETRY, 8192, 4, "host", 0, backup.checksum, "hbm", 4096, key)
    ) == MoveFailed(3, "checksum")
    assert np.array_equal(shell.hbm.data, before)


def test_a_page_is_encoded_in_place_with_the_codecs_state_from_the_pool(shell: Shell) -> None:
    values = page(shell, 0).view(np.float32)
    shell.hbm.write(8192, np.array([0.25], np.float32).view(np.uint8))
    assert shell.run(Quantize(1, GEOMETRY, 8192, 4, "hbm", 0, 0, "hbm", 4096, 9)) == MoveDone(1, 0)
    assert np.array_equal(shell.hbm.read(4096, 64), values > 0.25)
    done = shell.run(Quantize(2, GEOMETRY, 8192, 4, "hbm", 0, 0, "host", 64, 9))
    packed = (values > 0.25).astype(np.uint8)
    assert done == MoveDone(2, xxhash.xxh3_64_intdigest(packed.tobytes(), seed=9))
    assert shell.moves == [("hbm", "quantized", 64), ("hbm", "host", 64)]


def test_a_codec_state_is_fitted_from_pages_and_written_as_float32(shell: Shell) -> None:
    pages = [page(shell, offset).view(np.float32) for offset in (0, 512)]
    assert shell.run(FitCodec(1, GEOMETRY, (0, 512), (4, 4), 8192)) == MoveDone(1, 0)
    fitted = shell.hbm.read(8192, 4).view(np.float32)
    assert fitted[0] == pytest.approx(np.concatenate(pages).mean(), abs=1e-6)


def test_a_page_that_is_not_finite_is_refused(shell: Shell) -> None:
    page(shell, 0).view(np.float32)
    shell.hbm.data[:4].view(np.float32)[0] = np.nan
    assert shell.run(Quantize(1, GEOMETRY, 8192, 4, "hbm", 0, 0, "hbm", 4096, 9)) == MoveFailed(
        1, "non-finite"
    )
    assert shell.run(FitCodec(2, GEOMETRY, (0,), (4,), 8192)) == MoveFailed(2, "non-finite")


def test_a_codec_state_is_fitted_from_those_pages_that_are_finite(shell: Shell) -> None:
    page(shell, 0)
    shell.hbm.data[:4].view(np.float32)[0] = np.inf
    sound = page(shell, 512).view(np.float32)
    assert shell.run(FitCodec(1, GEOMETRY, (0, 512), (4, 4), 8192)) == MoveDone(1, 0)
    assert shell.hbm.read(8192, 4).view(np.float32)[0] == pytest.approx(sound.mean(), abs=1e-6)


class SignsReadBack(Signs):
    """What is above the state's float reads as 1, all else as 0."""

    def decode(self, geometry: Geometry, packed: Bytes, count: int, state: Floats, out: Bytes) -> None:
        out.view(np.float32)[:] = packed[: geometry.values]


@pytest.mark.parametrize(("every", "measured"), [(0, []), (1, [0, 1, 2, 3]), (3, [0, 3])])
def test_one_of_so_many_pages_is_compared_with_what_its_low_bit_form_says(
    tmp_path: Path, every: int, measured: list[int]
) -> None:
    """Keys of 2 read back as 1: (2 - 1)^2 / 2^2. Values of -3 read back as 0: all is lost."""
    hbm, host = HbmPool.create(SIZE), HostPool(tmp_path, SIZE)
    results: queue.Queue[MoveDone | MoveFailed] = queue.Queue()
    mover = Mover(
        CpuCarrier({"hbm": hbm, "host": host}, Forms(SignsReadBack(), measure_every=every)), results.put
    )
    hbm.write(0, np.repeat(np.array([2, -3], np.float32), GEOMETRY.values // 2).view(np.uint8))
    mover.start()
    for number, pool in enumerate(("hbm", "host", "hbm", "host")):
        mover.submit(Quantize(number, GEOMETRY, 8192, 4, "hbm", 0, 0, pool, 4096, 1))
    done = [results.get(timeout=5) for _ in range(4)]
    mover.stop()
    errors = {d.move: d.errors for d in done if isinstance(d, MoveDone) and d.errors}
    assert errors == dict.fromkeys(measured, (0.25, 1.0))


def test_a_page_takes_the_middle_form_by_the_middle_codec(tmp_path: Path) -> None:
    """Without a state, and not measured: that is what the low-bit form loses."""
    hbm, host, middle = HbmPool.create(SIZE), HostPool(tmp_path, SIZE), get("nf4")
    results: queue.Queue[MoveDone | MoveFailed] = queue.Queue()
    moves: list[tuple[str, str, int]] = []
    mover = Mover(
        CpuCarrier({"hbm": hbm, "host": host}, Forms(Signs(), middle, measure_every=1)), results.put,
        lambda src, dst, _, size: moves.append((src, dst, size)),
    )  # fmt: skip
    page = np.linspace(-1, 1, GEOMETRY.values, dtype=np.float32).view(np.uint8)
    hbm.write(0, page)
    mover.start()
    mover.submit(Quantize(1, GEOMETRY, -1, 4, "hbm", 0, 0, "hbm", 4096, 1, Kind.MIDDLE))
    done = results.get(timeout=60)
    mover.stop()
    assert done == MoveDone(1)
    size = middle.page_bytes(GEOMETRY)
    assert moves == [("hbm", "middle", size)]
    expected = middle.reference_encode(GEOMETRY, page, 4, np.zeros(0, np.float32))
    np.testing.assert_array_equal(hbm.read(4096, size), expected)


def test_a_digest_of_a_page_that_left_in_the_middle_form_is_that_of_its_numbers(tmp_path: Path) -> None:
    hbm, host, middle = HbmPool.create(SIZE), HostPool(tmp_path, SIZE), get("nf4")
    results: queue.Queue[MoveDone | MoveFailed] = queue.Queue()
    mover = Mover(CpuCarrier({"hbm": hbm, "host": host}, Forms(Signs(), middle)), results.put)
    page = np.linspace(-1, 1, GEOMETRY.values, dtype=np.float32).view(np.uint8)
    nothing, size = np.zeros(0, np.float32), middle.page_bytes(GEOMETRY)
    packed = middle.reference_encode(GEOMETRY, page, 4, nothing)
    host.write(0, packed)
    mover.start()
    layers = GEOMETRY.num_layers
    mover.submit(Summarize(2, GEOMETRY, layers, 4, 0, Kind.MIDDLE, checksum(packed, 1), -1, 8192, 1))
    assert results.get(timeout=60) == MoveDone(2)
    mover.stop()
    digests = DEVIATION.of(GEOMETRY, layers)
    expected = np.empty(digests.shape.nbytes, np.uint8)
    decoded = middle.reference_decode(GEOMETRY, packed[:size], 4, nothing)
    digests.write(np.ascontiguousarray(decoded).reshape(-1).view(np.uint8), 4, expected)
    np.testing.assert_array_equal(hbm.read(8192, digests.shape.nbytes), expected)


def test_every_failure_is_answered_and_the_thread_goes_on(shell: Shell) -> None:
    page(shell, 0)
    assert shell.run(Copy(1, "hbm", SIZE - 10, 0, "host", 0, PAGE, 1)) == MoveFailed(1, "io")
    assert shell.run(Copy(2, "hbm", 0, 0, "nvme", 0, PAGE, 1)) == MoveFailed(2, "io")
    assert shell.run(Quantize(3, GEOMETRY, 8192, 5, "hbm", 0, 0, "hbm", 4096, 1)) == MoveFailed(3, "codec")
    assert isinstance(shell.run(Copy(4, "hbm", 0, 0, "host", 0, PAGE, 1)), MoveDone)
    assert shell.mover.alive() and shell.mover.restarts == 0 and shell.mover.pending() == 0


def test_a_failing_metrics_hook_does_not_fail_the_move(tmp_path: Path) -> None:
    hbm, host = HbmPool.create(SIZE), HostPool(tmp_path, SIZE)
    results: queue.Queue[MoveDone | MoveFailed] = queue.Queue()

    def broken(src: str, dst: str, seconds: float, size: int) -> None:
        raise RuntimeError("no metrics today")

    mover = Mover(CpuCarrier({"hbm": hbm, "host": host}, Forms(Signs())), results.put, broken)
    mover.start()
    mover.submit(Copy(1, "hbm", 0, 0, "host", 0, PAGE, 1))
    assert isinstance(results.get(timeout=5), MoveDone)
    mover.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_seen_and_replaced(tmp_path: Path) -> None:
    hbm, host = HbmPool.create(SIZE), HostPool(tmp_path, SIZE)
    results: queue.Queue[MoveDone | MoveFailed] = queue.Queue()
    first = threading.Event()

    def post(result: MoveDone | MoveFailed) -> None:
        if not first.is_set():
            first.set()
            raise RuntimeError("the thread's end")
        results.put(result)

    mover = Mover(CpuCarrier({"hbm": hbm, "host": host}, Forms(Signs())), post)
    mover.start()
    mover.submit(Copy(1, "hbm", 0, 0, "host", 0, PAGE, 1))
    assert first.wait(5)
    for _ in range(500):
        if not mover.alive():
            break
        threading.Event().wait(0.01)
    assert not mover.alive()
    mover.submit(Copy(2, "hbm", 0, 0, "host", 0, PAGE, 1))
    assert results.get(timeout=5).move == 2
    assert mover.alive() and mover.restarts == 1
    mover.stop()
