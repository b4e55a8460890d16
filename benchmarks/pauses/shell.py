"""The daemon's shell in made-up time: a clock, a mover that copies one page after another, and workers that adopt."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator

from tierkv.daemon import events
from tierkv.daemon.brain import Brain
from tierkv.daemon.brain_config import BrainConfig
from tierkv.daemon.events import Answer, Copy, Event, FitCodec, Quantize, SendPlan, Summarize
from tierkv.protocol import Result

TICK_SECONDS = 0.05
"""The server's."""

BANDWIDTH = 8e9
"""Bytes a second that a move reads; half of what PCIe 4.0 x8 copies, as each is encoded, too."""

MOVE_SECONDS = 1e-4
"""Of a move, besides."""

ADOPT_SECONDS = 0.005
"""Until a worker's client thread has adopted a plan."""

CLIENT = "agents"
Life = Generator[float, None, None]
"""Of one agent: yields seconds to wait."""


class Shell:
    def __init__(self, config: BrainConfig) -> None:
        self.brain = Brain(config)
        self.now = 0.0
        self.returned_bytes = 0
        """Read from host memory to bring pages back."""
        self.samples: list[tuple[float, float, float]] = []
        """Time, sessions that run, and share of HBM that the others hold."""

        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._requests = itertools.count(1)
        self._answers: dict[int, Result] = {}
        self._free_at = 0.0  # when the mover has nothing left to do
        self._adopting: dict[int, int] = {}  # session -> version
        self.feed(events.Attached(CLIENT))
        self.feed(events.AdoptionEnded())
        self._tick()

    def run(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, action = heapq.heappop(self._due)
            action()
        self.now = until

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._order), action))

    def live(self, life: Life) -> None:
        """An agent begins, or goes on."""
        seconds = next(life, None)
        if seconds is not None:
            self.after(seconds, lambda: self.live(life))

    def ask(self, make: Callable[..., Event], *args: object) -> Result | None:
        """The brain's answer; `None` when it is still to come."""
        request = next(self._requests)
        self.feed(make(request, CLIENT, *args))
        return self._answers.pop(request, None)

    def feed(self, event: Event) -> None:
        for instruction in self.brain.handle(event, self.now):
            if isinstance(instruction, Answer):
                self._answers[instruction.request] = instruction.result
            elif isinstance(instruction, SendPlan):
                self._adopt(instruction.plan.session, instruction.plan.version)
            elif isinstance(instruction, Copy | Quantize | Summarize | FitCodec):
                self._carry(instruction)

    def _tick(self) -> None:
        self.feed(events.Tick())
        self.after(TICK_SECONDS, self._tick)

    def _adopt(self, session: int, version: int) -> None:
        if session not in self._adopting:
            self.after(ADOPT_SECONDS, lambda: self._adopted(session))
        self._adopting[session] = version

    def _adopted(self, session: int) -> None:
        self.feed(events.Acked(CLIENT, session, self._adopting.pop(session)))

    def _carry(self, move: Copy | Quantize | Summarize | FitCodec) -> None:
        size = _bytes_read(move)
        if isinstance(move, Copy | Quantize) and (move.src_pool, move.dst_pool) == ("host", "hbm"):
            self.returned_bytes += size
        self._free_at = max(self._free_at, self.now) + MOVE_SECONDS + size / BANDWIDTH
        self.after(self._free_at - self.now, lambda: self.feed(events.MoveDone(move.move, checksum=1)))


def _bytes_read(move: Copy | Quantize | Summarize | FitCodec) -> int:
    if isinstance(move, Copy):
        return move.size
    pages = len(move.pages) if isinstance(move, FitCodec) else 1
    return pages * move.geometry.page_bytes
