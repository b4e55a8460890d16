"""One agent's life: it reads a prompt, then runs, waits for a tool, resumes, and so on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierkv.benchmarks.pauses.agents import Reader, Turn, working_set
from tierkv.benchmarks.pauses.shell import Life, Shell
from tierkv.daemon import events
from tierkv.daemon.sessions import Session
from tierkv.geometry import Geometry
from tierkv.hint_messages import Pause
from tierkv.protocol import Failure, Reserved, SessionOptions, Table
from tierkv.regions import Region, Run
from tierkv.table import NOWHERE, Kind

GEOMETRY = Geometry(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=16)
"""Llama 3 8B's."""

STEP_SECONDS, STEP_TOKENS = 2.0, 16
"""Between commits, and tokens of each: whole pages, so that no page of a paused session is open."""

TOOL_TOKENS = 32
"""That a tool returns."""

PROMPT_CHUNK = 8
"""Pages that are reserved at once."""

RETRY_SECONDS = 0.05
"""After backpressure."""

READY = 0.95
"""Share of its working set's attention with which a session is ready: the last pages of a set differ from one
observation to the next."""

LOOK_SECONDS = 0.01
"""Between looks whether a working set is there."""

ASKED_PAGES = 16
"""Cold pages that the first step after a pause asks for (`RecallOptions.pages`)."""

ASKED_SECONDS = 1.0

ESTIMATE_SPREAD = 0.5
"""Standard deviation of the logarithm of what a digest's estimate is wrong by."""


@dataclass
class Resumed:
    """How a session found its working set.

    Attributes:
        pages, held: share of the set's pages that were attendable, and of its attention.
        mass: share of all attention that was on attendable pages.
        seconds: until the set was, from the resume on; until the next pause where it was never.
    """

    at: float
    tool: str
    set_share: float
    pages: float
    held: float
    mass: float
    seconds: float = 0.0

    @property
    def ready(self) -> bool:
        return self.held >= READY

    @property
    def whole(self) -> bool:
        return self.pages == 1.0


@dataclass
class Agent:
    """`hint` makes the pause that a turn is announced by; `None` where none is."""

    shell: Shell
    reader: Reader
    turns: Iterator[Turn]
    hint: Callable[[Turn], Pause | None]
    pages: tuple[int, int]
    """After the prompt and whenever the context was compacted; and most."""

    resumed: list[Resumed] = field(default_factory=list)
    attended: list[tuple[float, float]] = field(default_factory=list)
    """When an observation was made, and the share of attention that was on attendable pages."""

    pauses: list[tuple[float, Turn]] = field(default_factory=list)
    """When each began."""

    running: bool = True
    session: int = 0

    def live(self, delay: float) -> Life:
        yield delay
        opened = self.shell.ask(events.Opened, "model", GEOMETRY, SessionOptions(pins={}))
        assert isinstance(opened, Table), opened
        self.session = opened.table.session
        while len(self._session.pages) < self.pages[0]:
            yield from self._write(Run(Region.USER, PROMPT_CHUNK * GEOMETRY.page_tokens), 0)
        shares = self._observe()
        while True:
            turn = next(self.turns)
            stop, seen = self.shell.now + turn.run, shares
            while self.shell.now < stop:
                yield STEP_SECONDS
                yield from self._write(Run(Region.SCRATCHPAD, STEP_TOKENS), STEP_TOKENS)
                shares = self._observe()
                seen = np.append(seen, np.zeros(len(shares) - len(seen), np.float32)) + shares
            self._compact()
            yield from self._pause(turn, seen[: len(self._session.pages)])
            yield from self._write(Run(Region.TOOL_OUT, TOOL_TOKENS), 1)
            shares = self._observe()
            self._recall(shares)

    @property
    def _session(self) -> Session:
        return self.shell.brain.state.sessions[self.session]

    @property
    def held(self) -> int:
        """HBM bytes of its pages."""
        return self.shell.brain.state.hbm_bytes_of(self._session) if self.session else 0

    def _pause(self, turn: Turn, seen: NDArray[np.float32]) -> Life:
        """`seen` is what each page got while the session ran."""
        state, shell = self.shell.brain.state, self.shell
        mass = seen / seen.sum()
        working = self._session.pages.view[working_set(mass)]
        self.running = False
        self.pauses.append((shell.now, turn))
        if (hint := self.hint(turn)) is not None:
            shell.ask(events.Hinted, self.session, hint, None)
        yield turn.pause
        there = state.pages.kind[self._session.pages.view] != Kind.NONE
        found = state.pages.kind[working] != Kind.NONE
        weights = mass[working_set(mass)]
        attention = float((weights * found).sum() / weights.sum()), float(mass[there].sum())
        resumed = Resumed(shell.now, turn.tool, len(working) / len(mass), float(found.mean()), *attention)
        self.resumed.append(resumed)
        self.running = True
        self.reader.drift()
        if not resumed.whole:
            shell.live(self._wait_for(working, weights, resumed))

    def _wait_for(self, working: NDArray[np.int64], weights: NDArray[np.float32], resumed: Resumed) -> Life:
        pages = self.shell.brain.state.pages
        while self.running and float(weights[pages.kind[working] != Kind.NONE].sum()) < READY * weights.sum():
            resumed.seconds = self.shell.now - resumed.at
            yield LOOK_SECONDS

    def _write(self, run: Run, steps: int) -> Life:
        shell, session = self.shell, self._session
        open_tokens = int(session.counts.view[-1]) if session.tail_open else 0
        same = session.tail_open and shell.brain.state.pages.region[session.pages.view[-1]] == run.region
        room = GEOMETRY.page_tokens - open_tokens if same else 0
        needed = -(-max(0, run.tokens - room) // GEOMETRY.page_tokens) - len(session.blanks)
        while needed > 0:
            answer = shell.ask(events.Reserved, self.session, needed)
            if isinstance(answer, Reserved):
                break
            assert isinstance(answer, Failure) and answer.code == "backpressure", answer
            yield RETRY_SECONDS
        answer = shell.ask(
            events.Committed, self.session, session.length + run.tokens, (run,), steps, np.zeros(0, np.int32)
        )
        assert not isinstance(answer, Failure), answer

    def _observe(self) -> NDArray[np.float32]:
        """What each page gets now; the brain is told of cold pages what their digests would."""
        session, pages = self._session, self.shell.brain.state.pages
        slots, counts = session.pages.view, session.counts.view
        self.reader.grow(len(slots))
        shares = self.reader.shares()
        cold = pages.kind[slots] == Kind.NONE
        self.attended.append((self.shell.now, float(shares[~cold].sum())))
        told = shares * np.where(cold, np.exp(self.reader.rng.normal(size=len(slots)) * ESTIMATE_SPREAD), 1.0)
        told[cold & (pages.digest[slots] == NOWHERE)] = np.nan
        mass = np.repeat(told / counts, counts).astype(np.float32)
        self.shell.ask(events.Observed, self.session, session.step, mass)
        return shares

    def _recall(self, shares: NDArray[np.float32]) -> None:
        """The first chunk after a pause asks for the cold pages that it would attend to most."""
        session, pages = self._session, self.shell.brain.state.pages
        slots = session.pages.view
        known = (pages.kind[slots] == Kind.NONE) & (pages.digest[slots] != NOWHERE)
        wanted = [row for row in np.argsort(-shares).tolist() if known[row]][:ASKED_PAGES]
        if wanted:
            ids = tuple(pages.id[slots[wanted]].tolist())
            self.shell.ask(events.Recalled, self.session, ids, tuple(shares[wanted].tolist()), ASKED_SECONDS)

    def _compact(self) -> None:
        """A context that has grown long loses its newest pages: agents drop what failed."""
        session = self._session
        if len(session.pages) > self.pages[1]:
            stop = int(session.starts.view[self.pages[0]])
            self.shell.ask(events.Cropped, self.session, stop)
            self.reader.cut(self.pages[0])
