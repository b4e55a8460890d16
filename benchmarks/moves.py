"""How fast the mover copies and packs pages, beside a bare `memmove` of the same bytes between the same mappings.

A sample moves every page of a window once, through the mover's own queue and thread, as the daemon does. The peer
copies the same offsets in one Python loop over `ctypes.memmove`. What the mover adds is the checksum of host
replicas (taken on the way out, verified on the way in), an answer for each move, and its thread.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from tierkv import quant
from tierkv.benchmarks import pairs, processes
from tierkv.daemon.carriers import Move
from tierkv.daemon.cpu_carrier import CpuCarrier
from tierkv.daemon.events import Copy, MoveDone, MoveFailed, Quantize
from tierkv.daemon.forms import Forms
from tierkv.daemon.mover import Mover
from tierkv.daemon.pools import Bytes, HbmPool, HostPool
from tierkv.geometry import Geometry
from tierkv.pool import checksum

GOAL_RATIO = 0.8
CODEC = "k3v2"

GEOMETRIES = {
    "smollm2-135m": Geometry(30, 3, 64, "bfloat16"),
    "8b": Geometry(32, 8, 128, "bfloat16"),
}
"""Pages of 368,640 and 2,097,152 bytes."""

WINDOW_BYTES = 64 << 20
"""Moved by a sample: well beyond a core's own caches."""

QUICK_WINDOW_BYTES = 8 << 20

MOVE_SECONDS = 60.0
"""A sample that takes longer has lost a move."""


def run(quick: bool = False) -> dict[str, dict[str, pairs.Figures]]:
    """GB/s by geometry and move; see the package for keys."""
    window, count = (QUICK_WINDOW_BYTES, 3) if quick else (WINDOW_BYTES, 41)
    return {name: _geometry(geometry, window, count) for name, geometry in GEOMETRIES.items()}


def _geometry(geometry: Geometry, window: int, count: int) -> dict[str, pairs.Figures]:
    with processes.folder() as folder:
        bench = _Bench(HbmPool.create(2 * window), HostPool(folder, window), geometry, window)
        try:
            figures = {
                "hbm_to_host": pairs.interleave(bench.demote, bench.copy_out, count),
                "host_to_hbm": pairs.interleave(bench.promote, bench.copy_in, count),
                "checksum": pairs.interleave(bench.hash, bench.copy_out, count),
                CODEC: pairs.interleave(bench.pack, bench.copy_within, max(3, count // 4)),
            }
        finally:
            bench.close()
    for one in figures.values():
        one["page_bytes"] = geometry.page_bytes
    return figures


class _Bench:
    """Two pools and a mover. Pages lie at the start of either pool; the upper half of HBM takes packed ones."""

    def __init__(self, hbm: HbmPool, host: HostPool, geometry: Geometry, window: int) -> None:
        self.hbm, self.host, self.geometry, self.upper = hbm, host, geometry, window
        self.size = geometry.page_bytes
        self.offsets = [index * self.size for index in range(window // self.size)]
        self.codec = quant.get(CODEC)
        self.checksums: dict[int, int] = {}
        self._left = 0
        self._finished = threading.Event()
        self._failed: list[MoveFailed] = []
        self.mover = Mover(CpuCarrier({"hbm": hbm, "host": host}, Forms(self.codec)), self._post)
        values = np.random.default_rng(1).standard_normal(window // 2, np.float32)
        hbm.data[:window] = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)  # bfloat16
        host.data[:] = 0  # every page of memory is there before the clock runs
        hbm.data[window:] = 0
        self.packed = -(-self.codec.page_bytes(geometry) // 64) * 64
        state = self.codec.fit_state(geometry, [hbm.read(0, self.size)], [geometry.page_tokens])
        self.state = window + len(self.offsets) * self.packed
        hbm.write(self.state, state.view(np.uint8))
        self.mover.start()
        self.mover.warmed.wait()
        self.demote()

    def close(self) -> None:
        self.mover.stop()
        self.hbm.close()
        self.host.close()

    # Ours: GB/s of exact bytes ------------------------------------------------------------------------------------

    def demote(self) -> float:
        return self._moves(
            Copy(i, "hbm", at, 0, "host", at, self.size, key=i) for i, at in enumerate(self.offsets)
        )

    def promote(self) -> float:
        return self._moves(
            Copy(i, "host", at, self.checksums[i], "hbm", at, self.size, key=i)
            for i, at in enumerate(self.offsets)
        )

    def pack(self) -> float:
        tokens = self.geometry.page_tokens
        return self._moves(
            Quantize(
                i, self.geometry, self.state, tokens, "hbm", at, 0, "hbm", self.upper + i * self.packed, key=i
            )
            for i, at in enumerate(self.offsets)
        )

    def hash(self) -> float:
        """The checksum alone, one page after the other."""
        return self._timed(lambda: [checksum(self.hbm.read(at, self.size), at) for at in self.offsets])

    # Peers --------------------------------------------------------------------------------------------------------

    def copy_out(self) -> float:
        return self._memmove(self.host.data, self.hbm.data, 0)

    def copy_in(self) -> float:
        return self._memmove(self.hbm.data, self.host.data, 0)

    def copy_within(self) -> float:
        return self._memmove(self.hbm.data, self.hbm.data, self.upper)

    def _memmove(self, target: Bytes, source: Bytes, shift: int) -> float:
        to, start = target.ctypes.data + shift, source.ctypes.data
        return self._timed(
            lambda: [ctypes.memmove(to + offset, start + offset, self.size) for offset in self.offsets]
        )

    # Inside -------------------------------------------------------------------------------------------------------

    def _moves(self, moves: Iterator[Move]) -> float:
        self._left, self._failed = len(self.offsets), []
        self._finished.clear()

        def submit_all() -> None:
            for move in moves:
                self.mover.submit(move)
            if not self._finished.wait(MOVE_SECONDS):
                raise RuntimeError(f"{self._left} moves were not answered within {MOVE_SECONDS:.0f} s")

        rate = self._timed(submit_all)
        if self._failed:
            raise RuntimeError(f"{len(self._failed)} moves failed; the first: {self._failed[0]}")
        return rate

    def _post(self, result: MoveDone | MoveFailed) -> None:
        """In the mover's thread."""
        if isinstance(result, MoveFailed):
            self._failed.append(result)
        elif result.checksum:
            self.checksums[result.move] = result.checksum
        self._left -= 1
        if not self._left:
            self._finished.set()

    def _timed(self, work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return len(self.offsets) * self.size / (time.perf_counter() - start) / 1e9
