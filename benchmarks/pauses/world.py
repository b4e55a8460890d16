"""Agents over the daemon's brain under a fake clock: no bytes, no threads, the same in every run.

An agent decodes, calls a tool, pauses for as long as that takes, reads its answer, and so on; after some turns it ends
and another begins. Moves are carried out one after another by a modelled engine, at a bandwidth.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon import events
from tierkv.daemon.brain import Brain, BrainConfig
from tierkv.geometry import Geometry
from tierkv.hint_messages import Pause, Resume
from tierkv.protocol import Failure, Reserved, Result, SessionOptions, Table
from tierkv.regions import Region, Run
from tierkv.table import Kind

GEOMETRY = Geometry(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
"""Llama 3 8B's: a page is 2 MiB."""

TICK_SECONDS = 0.05
MOVE_SECONDS = 20e-6
"""What a move costs besides its bytes."""

TOKENS = GEOMETRY.page_tokens


class Plan(NamedTuple):
    """What runs: the same agents, tools and pauses in every arm.

    Attributes:
        sessions: agents at a time.
        pages: of a context at its start; each turn adds one of the tool's answer and one decoded.
        turns: of an agent, before another takes its place.
        median_seconds, spread: of pauses: the tools' medians and each pause about its tool's are log-normal, and so is
            a pause drawn at random, with this deviation of its logarithm.
        wrong: deviation of the logarithm of hint over truth.
        bandwidth: bytes a second of the copy engine.
        step_seconds: of a decode step.
        seconds: simulated; resumes of the first `warm_seconds` do not count.
    """

    sessions: int = 64
    pages: int = 64
    turns: int = 12
    tools: int = 8
    median_seconds: float = 4.0
    spread: float = 1.25
    wrong: float = 0.5
    bandwidth: float = 20e9
    step_seconds: float = 0.02
    seconds: float = 240.0
    warm_seconds: float = 60.0
    seed: int = 7


@dataclass
class Tally:
    """Of resumes: how many found all they had, and the mean share of it that was there."""

    resumes: int = 0
    ready: int = 0
    present: float = 0.0
    blocked: float = 0.0
    moved: dict[str, int] = field(default_factory=dict)


@dataclass
class _Agent:
    rng: np.random.Generator
    id: int = 0
    length: int = 0
    turns: int = 0
    step: int = 0
    had: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    waited_from: float = 0.0


class World:
    """Runs `plan` on `hbm_bytes`. `hints`: `none`, `tool` (its name only) or `seconds`."""

    def __init__(self, plan: Plan, hbm_bytes: int, hints: str) -> None:
        self.plan = plan
        self.hints = hints
        host = 2 * plan.sessions * (plan.pages + 2 * plan.turns) * GEOMETRY.page_bytes
        self.brain = Brain(BrainConfig(hbm_bytes, host, pins=(), digest_share=0.05, digest_layers=8))
        self.tally = Tally()
        self.now = 0.0
        rng = np.random.default_rng(plan.seed)
        # Half of the variance lies between tools, half within each.
        own = plan.spread / np.sqrt(2)
        self._within = own
        self._tools = plan.median_seconds * np.exp(own * rng.standard_normal(plan.tools))
        self._agents = [_Agent(np.random.default_rng([plan.seed, n])) for n in range(plan.sessions)]
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._moves: deque[events.Instruction] = deque()
        self._engine_at = 0.0
        self._requests = itertools.count(1)
        self._answers: dict[int, Result] = {}

    # The shell -------------------------------------------------------------------------------------------------

    def run(self) -> Tally:
        self._feed(events.AdoptionEnded())
        self._feed(events.Attached("a"))
        for number, agent in enumerate(self._agents):
            self._at(0.3 * number, lambda a=agent: self._begin(a))  # type: ignore[misc]
        self._at(TICK_SECONDS, self._tick)
        while self._due and self._due[0][0] < self.plan.seconds:
            self.now, _, act = heapq.heappop(self._due)
            act()
        names = {f"{a}-{b}": n for (a, b), n in self.brain.state.counters.moved_bytes.items()}
        self.tally.moved = names
        return self.tally

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._order), act))

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._at(self.now + seconds, act)

    def _tick(self) -> None:
        self._feed(events.Tick())
        self._after(TICK_SECONDS, self._tick)

    def _feed(self, event: events.Event) -> None:
        todo = deque([event])
        while todo:
            for told in self.brain.handle(todo.popleft(), self.now):
                match told:
                    case events.Answer(request, result):
                        self._answers[request] = result
                    case events.SendPlan(client, plan):  # adopted between steps, which are short
                        todo.append(events.Acked(client, plan.session, plan.version))
                    case events.Adopted():
                        pass
                    case move:
                        self._start(move)

    def _start(self, move: events.Copy | events.Quantize | events.Summarize | events.FitCodec) -> None:
        size = move.size if isinstance(move, events.Copy) else GEOMETRY.page_bytes
        self._engine_at = max(self._engine_at, self.now) + MOVE_SECONDS + size / self.plan.bandwidth
        self._at(self._engine_at, lambda: self._feed(events.MoveDone(move.move)))

    def _ask(self, event: events.Event, request: int) -> Result | None:
        self._feed(event)
        return self._answers.pop(request, None)

    # Agents ----------------------------------------------------------------------------------------------------

    def _begin(self, agent: _Agent) -> None:
        """A new agent: a prompt, then its first turn."""
        request = next(self._requests)
        opened = self._ask(events.Opened(request, "a", "m", GEOMETRY, SessionOptions()), request)
        assert isinstance(opened, Table), opened
        agent.id, agent.length, agent.turns, agent.step = opened.table.session, 0, 0, 0
        self._write(agent, [Region.USER] * self.plan.pages, 0, lambda: self._decode(agent))

    def _write(self, agent: _Agent, regions: list[Region], steps: int, then: Callable[[], None]) -> None:
        """A page of each region, one at a time, waiting for room where there is none."""
        if not regions:
            return then()
        request = next(self._requests)
        result = self._ask(events.Reserved(request, "a", agent.id, 1), request)
        if not isinstance(result, Reserved):
            assert isinstance(result, Failure) and result.code == "backpressure", result
            self.tally.blocked += result.retry_after
            return self._after(result.retry_after, lambda: self._write(agent, regions, steps, then))
        agent.length += TOKENS
        agent.step += steps
        none = np.zeros(0, np.int32)
        runs = (Run(regions[0], TOKENS),)
        self._feed(events.Committed(next(self._requests), "a", agent.id, agent.length, runs, steps, none))
        self._after(
            max(1, steps) * self.plan.step_seconds, lambda: self._write(agent, regions[1:], steps, then)
        )

    def _decode(self, agent: _Agent) -> None:
        """A page of decode steps ends in a call of a tool."""
        self._write(agent, [Region.SCRATCHPAD], TOKENS, lambda: self._call(agent))

    def _call(self, agent: _Agent) -> None:
        self._observe(agent)
        if agent.turns >= self.plan.turns:
            request = next(self._requests)
            self._ask(events.Closed(request, "a", agent.id), request)
            return self._begin(agent)
        agent.turns += 1
        tool = int(agent.rng.integers(self.plan.tools))
        truth = float(self._tools[tool] * np.exp(self._within * agent.rng.standard_normal()))
        hint = truth * float(np.exp(self.plan.wrong * agent.rng.standard_normal()))
        slots = self._slots(agent)
        agent.had = slots[self.brain.state.pages.kind[slots] != Kind.NONE]
        if self.hints != "none":
            given = Pause(hint if self.hints == "seconds" else -1.0, f"tool-{tool}")
            self._feed(events.Hinted(next(self._requests), "a", agent.id, given))
        self._after(truth, lambda: self._resume(agent))

    def _resume(self, agent: _Agent) -> None:
        """What the session had is there, or is asked for as any step does, most attended first."""
        pages = self.brain.state.pages
        missing = agent.had[pages.kind[agent.had] == Kind.NONE]
        if self.now >= self.plan.warm_seconds:
            self.tally.resumes += 1
            self.tally.ready += not len(missing)
            self.tally.present += 1 - len(missing) / len(agent.had)
        if self.hints != "none":
            self._feed(events.Hinted(next(self._requests), "a", agent.id, Resume()))
        if len(missing):
            asked = missing[np.argsort(-pages.mass[missing], kind="stable")]
            ids, masses = tuple(pages.id[asked].tolist()), tuple(pages.mass[asked].tolist())
            self._feed(events.Recalled(next(self._requests), "a", agent.id, ids, masses, 0.5))
        self._write(agent, [Region.TOOL_OUT], 0, lambda: self._decode(agent))

    def _slots(self, agent: _Agent) -> NDArray[np.int64]:
        return self.brain.state.sessions[agent.id].pages.view.copy()

    def _observe(self, agent: _Agent) -> None:
        """A tenth of the pages, always the same, has half of the attention; the rest is even."""
        count = agent.length // TOKENS
        weights = np.full(count, 0.5 / count)
        heavy = np.arange(agent.id % 10, count, 10)
        weights[heavy] += 0.5 / len(heavy)
        mass = np.repeat(weights / TOKENS, TOKENS).astype(np.float32)
        self._feed(events.Observed(next(self._requests), "a", agent.id, agent.step, mass))
