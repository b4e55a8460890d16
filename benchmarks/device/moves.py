"""Pages through the real mover, beside bare copies of the same bytes: demote, promote, encode and recall."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.benchmarks.device.kernels import LIMITS
from tierkv.benchmarks.device.machine import Machine, memory_folder
from tierkv.benchmarks.device.table import Row
from tierkv.daemon.carriers import Move
from tierkv.daemon.events import Copy, FitCodec, MoveDone, MoveFailed, Quantize
from tierkv.daemon.forms import Forms
from tierkv.daemon.mover import Mover
from tierkv.daemon.pools import DevicePool, HostPool
from tierkv.geometry import Geometry
from tierkv.pool import checksum
from tierkv.quant import get

CODEC = "k3v2"
MOVE_SECONDS = 60.0
REPEATS = 3
SPARE_BYTES = 4 << 20
"""A pool is rounded down to the device's granularity."""


def run(machine: Machine) -> Iterator[Row]:
    geometry, pages = machine.sizes.page, machine.sizes.pages
    packed = -(-get(CODEC).page_bytes(geometry) // 64) * 64
    state = -(-4 * get(CODEC).state_floats(geometry) // 64) * 64
    exact = pages * geometry.page_bytes
    with ExitStack() as open_:
        gpu = machine.gpu()
        wanted = 2 * exact + pages * packed + state
        hbm = gpu.pools.create(wanted + SPARE_BYTES)
        open_.callback(hbm.close)
        folder = open_.enter_context(memory_folder(exact))
        host = HostPool(Path(folder), exact)
        open_.callback(host.close)
        open_.callback(gpu.pin(host.data).close)
        results: queue.SimpleQueue[MoveDone | MoveFailed] = queue.SimpleQueue()
        mover = Mover(gpu.carrier({"hbm": hbm, "host": host}, Forms(get(CODEC))), results.put)
        mover.start()
        open_.callback(mover.stop)
        yield from _Bench(geometry, pages, packed, hbm, host, mover, results).rows(machine)


class _Bench:
    """HBM holds the pages, then room for them again, then packed ones, then the codec's state."""

    def __init__(
        self, geometry: Geometry, pages: int, packed: int, hbm: DevicePool, host: HostPool, mover: Mover,
        results: queue.SimpleQueue[MoveDone | MoveFailed],
    ) -> None:  # fmt: skip
        self.geometry, self.pages, self.packed = geometry, pages, packed
        self.hbm, self.host, self.mover, self.results = hbm, host, mover, results
        self.page, self.exact = geometry.page_bytes, pages * geometry.page_bytes
        self.state = 2 * self.exact + pages * packed

    def rows(self, machine: Machine) -> Iterator[Row]:
        content = self.fill()
        out, into = bare_copies(machine, self.exact)
        numbers, page = range(self.pages), self.page
        demote = [Copy(i, "hbm", i * page, 0, "host", i * page, page, i) for i in numbers]
        took, done = self.timed(demote)
        sums = [checksum(content[i * page : (i + 1) * page], i) for i in numbers]
        good = [done[i] for i in numbers] == [MoveDone(i, sums[i]) for i in numbers]
        good &= bool(np.array_equal(self.host.data, content))
        yield self.rate("demote: HBM to host, with checksums", took, out, good)
        promote = [Copy(i, "host", i * page, sums[i], "hbm", self.exact + i * page, page, i) for i in numbers]
        took, done = self.timed(promote)
        good = all(done[i] == MoveDone(i) for i in numbers)
        good &= bool(np.array_equal(self.hbm.read(self.exact, self.exact), content))
        yield self.rate("promote: host to HBM, verified", took, into, good)
        fitted = self.carry(
            [FitCodec(0, self.geometry, (0, page), (self.geometry.page_tokens,) * 2, self.state)]
        )
        yield Row(f"{CODEC} is fitted from two pages", "", fitted[0] == MoveDone(0))
        for what, src in (
            ("encode: exact to low-bit in HBM", "hbm"),
            ("recall: host to low-bit in HBM", "host"),
        ):
            moves = [self.encoding(i, src, sums[i] if src == "host" else 0) for i in numbers]
            took, done = self.timed(moves)
            good = all(done[i] == MoveDone(i) for i in numbers) and self.near(0) and self.near(self.pages - 1)
            yield self.rate(what, took, into if src == "host" else None, good)

    def fill(self) -> NDArray[np.uint8]:
        """Random values in every page."""
        values = torch.randn(self.exact // self.geometry.item_bytes).to(getattr(torch, self.geometry.dtype))
        content: NDArray[np.uint8] = values.view(torch.uint8).numpy()
        self.hbm.write(0, content)
        return content

    def encoding(self, number: int, src: str, sum_: int) -> Quantize:
        at, to = number * self.page, 2 * self.exact + number * self.packed
        tokens = self.geometry.page_tokens
        return Quantize(number, self.geometry, self.state, tokens, src, at, sum_, "hbm", to, number)

    def near(self, number: int) -> bool:
        """A packed page is the CPU codec's, but for what roundings of its scales, which lead it, make of a code."""
        codec, geometry = get(CODEC), self.geometry
        state = self.hbm.read(self.state, 4 * codec.state_floats(geometry)).view(np.float32)
        packed = self.hbm.read(2 * self.exact + number * self.packed, codec.page_bytes(geometry))
        expected = np.empty_like(packed)
        exact = self.hbm.read(number * self.page, self.page)
        codec.encode(geometry, exact, geometry.page_tokens, state, expected)
        scales = 8 * geometry.num_layers * geometry.num_kv_heads
        return float((packed[scales:] != expected[scales:]).mean()) <= LIMITS["bytes"]

    def carry(self, moves: Sequence[Move]) -> dict[int, MoveDone | MoveFailed]:
        for move in moves:
            self.mover.submit(move)
        found = [self.results.get(timeout=MOVE_SECONDS) for _ in moves]
        return {result.move: result for result in found}

    def timed(self, moves: Sequence[Move]) -> tuple[float, dict[int, MoveDone | MoveFailed]]:
        """The best of some runs: the first one compiles and touches memory."""
        times = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            done = self.carry(moves)
            times.append(time.perf_counter() - begun)
        return min(times), done

    def rate(self, what: str, took: float, bare: float | None, good: bool) -> Row:
        beside = "" if bare is None else f"  {bare / took:5.0%} of a bare copy"
        return Row(
            f"{what}, {self.pages} pages", f"{self.exact / took / 1e9:6.1f} GB/s of exact bytes{beside}", good
        )


def bare_copies(machine: Machine, size: int) -> tuple[float, float]:
    """Seconds of one copy of `size` bytes from the device to pinned memory, and back."""
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=machine.device.type == "cuda")
    device = torch.empty(size, dtype=torch.uint8, device=machine.device)

    def best(copy: Callable[[], object]) -> float:
        times = []
        for _ in range(REPEATS):
            machine.synchronize()
            begun = time.perf_counter()
            copy()
            machine.synchronize()
            times.append(time.perf_counter() - begun)
        return min(times)

    return (
        best(lambda: pinned.copy_(device, non_blocking=True)),
        best(lambda: device.copy_(pinned, non_blocking=True)),
    )
