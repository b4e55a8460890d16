"""Long use does not compound loss: whatever a page has been through, its exact replicas are the bytes that were
written, and its low-bit replicas are the one encoding of them. A real brain, a real mover and real pools; no model.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from tests.quant.pages import gaussian_page
from tierkv.daemon import events
from tierkv.daemon.brain import Brain
from tierkv.daemon.brain_config import BrainConfig
from tierkv.daemon.cpu_carrier import CpuCarrier
from tierkv.daemon.forms import Forms
from tierkv.daemon.mover import Mover
from tierkv.daemon.policy import Thresholds
from tierkv.daemon.pools import HbmPool, HostPool
from tierkv.geometry import Geometry
from tierkv.protocol import Reserved, Result, SessionOptions, Table
from tierkv.quant import get
from tierkv.quant.contract import Bytes, Floats
from tierkv.regions import Region, Run
from tierkv.table import NOWHERE, Kind

GEOMETRY = Geometry(num_layers=2, num_kv_heads=1, head_dim=64, dtype="bfloat16", page_tokens=4)
PAGES = 2
CYCLES = 1_000
COMPILER_SECONDS = 120
"""What the first move may wait for."""


class Daemon:
    """One session of `PAGES` full pages; what lies in the pools is checked after every event."""

    def __init__(
        self, folder: Path, codec: str, backup: Literal["on_seal", "never"], offload_below: float
    ) -> None:
        size = 64 * GEOMETRY.page_bytes
        self.pools: dict[str, HbmPool | HostPool] = {
            "hbm": HbmPool.create(size),
            "host": HostPool(folder, size),
        }
        self._done: queue.Queue[events.MoveDone | events.MoveFailed] = queue.Queue()
        self.mover = Mover(CpuCarrier(self.pools, Forms(get(codec))), self._done.put)
        self.mover.start()
        self.brain = Brain(
            BrainConfig(
                size, size, codec=codec, page_tokens=4, sink_tokens=0, recent_tokens=0, pins=(), digest_share=0.0,
                demotion="eager", backup=backup, thresholds=Thresholds(np.inf, offload_below, -np.inf, np.inf),
            )
        )  # fmt: skip
        self.exact = [gaussian_page(GEOMETRY, seed) for seed in range(PAGES)]
        self.low: dict[int, Bytes] = {}
        self.slots: list[int] = []
        self.feed(events.AdoptionEnded())
        self.feed(events.Attached("a"))
        (opened,) = self.feed(events.Opened(1, "a", "model", GEOMETRY, SessionOptions()))
        assert isinstance(opened, Table)
        self.session = opened.table.session
        (given,) = self.feed(events.Reserved(2, "a", self.session, PAGES))
        assert isinstance(given, Reserved)
        for blank, page in zip(given.blanks, self.exact, strict=True):
            self.pools["hbm"].write(blank.offset, page)
        self.slots = [self.brain.state.pages.index[blank.page] for blank in given.blanks]
        runs, ids = (Run(Region.USER, 4 * PAGES),), np.zeros(0, np.int32)
        self.feed(events.Committed(3, "a", self.session, 4 * PAGES, runs, 0, ids))
        self.feed(events.Tick())

    def close(self) -> None:
        self.mover.stop()
        for pool in self.pools.values():
            pool.close()

    def feed(self, event: events.Event) -> list[Result]:
        """Carries out what the brain says, and what it says to that; returns its answers."""
        answers: list[Result] = []
        waiting: list[events.Event] = [event]
        while waiting:
            for instruction in self.brain.handle(waiting.pop(0), 0.0):
                if isinstance(instruction, events.Answer):
                    answers.append(instruction.result)
                elif isinstance(instruction, events.SendPlan):
                    plan = instruction.plan
                    waiting.append(events.Acked("a", plan.session, plan.version))
                elif not isinstance(instruction, events.Adopted):
                    self.mover.submit(instruction)
                    waiting.append(self._done.get(timeout=COMPILER_SECONDS))
            self.check()
        return answers

    def pin(self, level: str) -> None:
        self.feed(events.Pinned(4, "a", self.session, 0, 4 * PAGES, level))
        for _ in range(2):  # from host it comes back low-bit first
            self.feed(events.Tick())

    def check(self) -> None:
        pages = self.brain.state.pages
        for number, slot in enumerate(self.slots):
            kind = pages.host_kind[slot]
            host = self.read("host", max(0, int(pages.host[slot])), kind == Kind.EXACT)
            if pages.exact[slot] != NOWHERE:
                assert np.array_equal(self.read("hbm", int(pages.exact[slot]), True), self.exact[number])
            if kind == Kind.EXACT:
                assert np.array_equal(host, self.exact[number])
            if pages.quant[slot] != NOWHERE:
                packed = self.read("hbm", int(pages.quant[slot]), False)
                assert np.array_equal(packed, self.low.setdefault(number, packed.copy()))
            if kind == Kind.QUANTIZED:
                assert np.array_equal(host, self.low[number])

    def read(self, pool: str, offset: int, exact: bool) -> Bytes:
        size = GEOMETRY.page_bytes if exact else self.brain.state.codec.page_bytes(GEOMETRY)
        return self.pools[pool].read(offset, size)

    def codec_state(self) -> Floats:
        (model,) = self.brain.state.models.values()
        if not model.state_bytes:
            return np.zeros(0, np.float32)
        return self.pools["hbm"].read(model.state, model.state_bytes).view(np.float32)

    def turns(self, source: str, target: str) -> int:
        moved = self.brain.state.counters.moved_pages
        return sum(count for (src, dst, _), count in moved.items() if (src, dst) == (source, target))


Backup = Literal["on_seal", "never"]
Living = Callable[[str, Backup, float], Daemon]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Living]:
    """Pages that were sent a thousand times to where scores send them, and back to where a pin wants them."""
    daemons: list[Daemon] = []

    def live(codec: str, backup: Backup, offload_below: float) -> Daemon:
        daemon = Daemon(tmp_path, codec, backup, offload_below)
        daemons.append(daemon)
        for _ in range(CYCLES):
            daemon.pin("none")
            daemon.pin("exact")
        daemon.brain.check_integrity()
        assert daemon.brain.state.counters.failed_moves.total() == 0
        return daemon

    yield live
    for daemon in daemons:
        daemon.close()


@pytest.mark.parametrize("codec", ["k3v2", "kivi2"])
def test_exact_to_low_bit_and_back_a_thousand_times(live: Living, codec: str) -> None:
    daemon = live(codec, "on_seal", -np.inf)
    assert daemon.turns("hbm", "quantized") >= CYCLES * PAGES
    assert daemon.turns("quantized", "hbm") >= CYCLES * PAGES
    for number, exact in enumerate(daemon.exact):
        first = get(codec).reference_encode(GEOMETRY, exact, 4, daemon.codec_state())
        assert np.array_equal(daemon.low[number], first)


def test_through_all_three_tiers_and_back_a_thousand_times(live: Living) -> None:
    """Back from host a page is encoded again, from the exact bytes there: to the same low-bit bytes."""
    daemon = live("k3v2", "on_seal", np.inf)
    for step in (("hbm", "quantized"), ("quantized", "host"), ("host", "quantized"), ("quantized", "hbm")):
        assert daemon.turns(*step) >= CYCLES * PAGES, step


def test_a_page_without_exact_bytes_is_copied_a_thousand_times_and_never_encoded_again(live: Living) -> None:
    daemon = live("k3v2", "never", np.inf)
    for step in (("quantized", "host"), ("host", "quantized")):
        assert daemon.turns(*step) >= CYCLES * PAGES, step
    assert daemon.turns("hbm", "quantized") == PAGES, "encoded once, from what was written"
    assert daemon.turns("quantized", "hbm") == 0, "nothing exact is ever made of a low-bit page"
