"""A world for the brain: workers, a mover and two pools whose bytes are stamps.

Every written token gets a stamp that exists once. A page's bytes are the list of its stamps, so "the worker reads the
right bytes" is list equality: any slot that was reused too early, any copy from the wrong place, any table that points
astray shows up as foreign stamps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from tierkv.daemon import events
from tierkv.daemon.brain import Brain
from tierkv.daemon.brain_config import BrainConfig
from tierkv.daemon.events import Answer, Copy, FitCodec, Instruction, Quantize, SendPlan, Summarize
from tierkv.geometry import Geometry
from tierkv.protocol import (
    GeometryFields,
    PageEntry,
    Plan,
    Reserved,
    Result,
    SessionOptions,
    SessionState,
    Table,
    TableState,
)
from tierkv.regions import Region, Run
from tierkv.table import Kind, lay_out, pages_needed

SMALL = Geometry(num_layers=2, num_kv_heads=1, head_dim=64, dtype="float32", page_tokens=4)
LARGE = Geometry(num_layers=3, num_kv_heads=2, head_dim=64, dtype="float32", page_tokens=4)

FORM = {Kind.EXACT: "exact", Kind.MIDDLE: "middle", Kind.QUANTIZED: "low"}


@dataclass
class Row:
    page: int
    region: int
    kind: int
    offset: int
    host_kind: int
    host_offset: int
    checksum: int
    stamps: list[int]
    digest: int = -1


@dataclass
class WorkerSession:
    """A session as its worker sees it."""

    id: int
    client: str
    model_id: str
    geometry: Geometry
    options: SessionOptions
    rows: list[Row] = field(default_factory=list)
    blanks: list[tuple[int, int]] = field(default_factory=list)
    tail_open: bool = False
    version: int = 0
    codec_state: int = -1
    digest: str = ""
    plans: list[Plan] = field(default_factory=list)
    step: int = 0

    @property
    def length(self) -> int:
        return sum(len(row.stamps) for row in self.rows)


class World:
    def __init__(self, config: BrainConfig) -> None:
        self.config = config
        self.brain = Brain(config, validate=True)
        self.now = 0.0
        self.memory: dict[str, dict[int, tuple[str, list[int]]]] = {"hbm": {}, "host": {}}
        self.moves: dict[int, Copy | Quantize | Summarize | FitCodec] = {}
        self.sessions: dict[int, WorkerSession] = {}
        self.clients: set[str] = set()
        self.answers: dict[int, Result] = {}
        self._forking: dict[int, WorkerSession] = {}
        self._requests = itertools.count(1)
        self._stamps = itertools.count(1)
        self.writes_poison = False
        """Whether tokens that are written now are not finite; a page with one is refused for quantization."""
        self._poison: set[int] = set()
        self.feed(events.AdoptionEnded())

    # The shell -----------------------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        for instruction in self.brain.handle(event, self.now):
            self._carry_out(instruction)
        self.check_reads()

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Answer):
            assert instruction.request not in self.answers, "a request was answered twice"
            if (child := self._forking.pop(instruction.request, None)) is not None:
                self._forked(child, instruction.result)
            else:
                self.answers[instruction.request] = instruction.result
        elif isinstance(instruction, events.Adopted):
            assert instruction.lost == (), "an adoption lost pages that every worker still holds"
        elif isinstance(instruction, SendPlan):
            session = self.sessions.get(instruction.plan.session)
            if session is not None:
                session.plans.append(instruction.plan)
        else:
            self.moves[instruction.move] = instruction

    def ask(self, make: type, client: str, *args: object) -> Result | None:
        """One request; None when the answer is still to come."""
        request = next(self._requests)
        self._last_request = request
        self.feed(make(request, client, *args))
        return self.answers.pop(request, None)

    def finish_move(self, number: int) -> None:
        if self._refuses(self.moves[number]):
            return self.fail_move(number, "non-finite")
        move = self.moves.pop(number)
        if isinstance(move, Summarize):
            form, stamps = self.memory["host"][move.src]
            assert form == FORM[move.src_kind]
            self.memory["hbm"][move.dst] = ("digest", stamps[: move.count])
        elif not isinstance(move, FitCodec):
            form, stamps = self.memory[move.src_pool][move.src]
            if isinstance(move, Quantize):
                assert form == "exact", "a packed page was encoded again"
                stamps, form = stamps[: move.count], FORM[move.form]
            self.memory[move.dst_pool][move.dst] = (form, list(stamps))
        self.feed(events.MoveDone(number, checksum=number))

    def _refuses(self, move: Copy | Quantize | Summarize | FitCodec) -> bool:
        """What the mover says to pages with poison: no to encode one, no to fit from nothing else."""
        if isinstance(move, Quantize):
            return self._is_poisoned(move.src_pool, move.src)
        if isinstance(move, FitCodec):
            return all(self._is_poisoned("hbm", offset) for offset in move.pages)
        return False

    def _is_poisoned(self, pool: str, offset: int) -> bool:
        return not self._poison.isdisjoint(self.memory[pool][offset][1])

    def fail_move(self, number: int, reason: str) -> None:
        self.moves.pop(number)
        self.feed(events.MoveFailed(number, reason))

    # Workers -------------------------------------------------------------------------------------------------

    def attach(self, client: str) -> None:
        self.clients.add(client)
        self.feed(events.Attached(client))

    def open(self, client: str, geometry: Geometry, options: SessionOptions) -> WorkerSession | None:
        model_id = f"model-{geometry.num_layers}"
        result = self.ask(events.Opened, client, model_id, geometry, options)
        if not isinstance(result, Table):
            return None
        session = WorkerSession(result.table.session, client, model_id, geometry, options)
        self._receive_table(session, result.table, [])
        self.sessions[session.id] = session
        return session

    def _receive_table(self, session: WorkerSession, table: TableState, old: list[Row]) -> None:
        stamps = [stamp for row in old for stamp in row.stamps][: table.length]
        session.id, session.rows, start = table.session, [], 0
        for entry in table.pages:
            session.rows.append(
                Row(
                    entry.page,
                    entry.region,
                    entry.kind,
                    entry.offset,
                    entry.host_kind,
                    entry.host_offset,
                    entry.host_checksum,
                    stamps[start : start + entry.count],
                    entry.digest,
                )
            )
            start += entry.count
        assert start == table.length == len(stamps)
        session.blanks = [(blank.page, blank.offset) for blank in table.blanks]
        session.tail_open, session.version = table.tail_open, table.version
        session.codec_state, session.digest = table.codec_state, table.digest
        session.plans.clear()
        self.check_reads()

    def reserve(self, session: WorkerSession, pages: int) -> Result | None:
        result = self.ask(events.Reserved, session.client, session.id, pages)
        if isinstance(result, Reserved):
            session.blanks += [(blank.page, blank.offset) for blank in result.blanks]
        return result

    def write(self, session: WorkerSession, runs: list[Run], steps: int) -> Result | None:
        """Write tokens into the open page and reserved pages, then commit them."""
        page_tokens = session.geometry.page_tokens
        tail = session.rows[-1] if session.tail_open else None
        layout = (
            Region(tail.region) if tail else None, len(tail.stamps) if tail else 0, runs, page_tokens,
            self.config.straddle,
        )  # fmt: skip
        if pages_needed(*layout) > len(session.blanks):
            return None
        for placement in lay_out(*layout):
            if placement.fresh:
                page, offset = session.blanks.pop(0)
                session.rows.append(Row(page, int(placement.region), Kind.EXACT, offset, 0, -1, 0, []))
                self.memory["hbm"][offset] = ("exact", [])
            row = session.rows[-1]
            stamps = [next(self._stamps) for _ in range(placement.tokens)]
            self._poison |= set(stamps) if self.writes_poison else set()
            row.stamps += stamps
            self.memory["hbm"][row.offset] = ("exact", list(row.stamps))
            session.tail_open = len(row.stamps) < page_tokens
        session.step += steps
        result = self.ask(
            events.Committed,
            session.client,
            session.id,
            session.length,
            tuple(runs),
            steps,
            np.zeros(0, np.int32),
        )
        return result

    def crop(self, session: WorkerSession, length: int) -> None:
        result = self.ask(events.Cropped, session.client, session.id, length)
        assert isinstance(result, Table), result
        old = session.rows
        self._receive_table(session, result.table, old)
        self.feed(events.Acked(session.client, session.id, session.version))

    def fork(self, session: WorkerSession) -> None:
        """The child is there from the answer on: a plan may follow that at once."""
        child = WorkerSession(0, session.client, session.model_id, session.geometry, session.options)
        child.rows, child.step = [Row(**vars(row)) for row in session.rows], session.step
        request = next(self._requests)
        self._forking[request] = child
        self.feed(events.Forked(request, session.client, session.id))

    def _forked(self, child: WorkerSession, result: Result) -> None:
        if isinstance(result, Table):
            self._receive_table(child, result.table, child.rows)
            self.sessions[child.id] = child

    def adopt_plans(self, session: WorkerSession, acknowledge: bool) -> None:
        for plan in session.plans:
            assert plan.version > session.version
            by_page = {row.page: row for row in session.rows}
            for change in plan.changes:
                row = by_page.get(change.page)
                if row is not None:
                    row.kind, row.offset = change.kind, change.offset
                    row.host_kind, row.host_offset = change.host_kind, change.host_offset
                    row.checksum, row.digest = change.host_checksum, change.digest
            session.version, session.codec_state, session.digest = plan.version, plan.codec_state, plan.digest
        session.plans.clear()
        if acknowledge:
            self.feed(events.Acked(session.client, session.id, session.version))

    def recall(self, session: WorkerSession, pages: list[int], mass: float, seconds: float = 1.0) -> int:
        """Ask for pages to come back; the answer will lie in `answers` under the number that this returns."""
        masses = (mass,) * len(pages)
        result = self.ask(events.Recalled, session.client, session.id, tuple(pages), masses, seconds)
        if result is not None:
            self.answers[self._last_request] = result
        return self._last_request

    def close(self, session: WorkerSession) -> None:
        del self.sessions[session.id]
        self.ask(events.Closed, session.client, session.id)

    def kill(self, client: str) -> None:
        self.clients.discard(client)
        self.sessions = {s.id: s for s in self.sessions.values() if s.client != client}
        self._forking = {r: s for r, s in self._forking.items() if s.client != client}
        self.feed(events.WorkerDied(client))

    def restart_owner(self) -> None:
        """The owner dies; a new one adopts what the workers hand back."""
        self.config = BrainConfig(**{**vars(self.config), "epoch": self.config.epoch + 1})
        self.brain = Brain(self.config, validate=True)
        self.moves.clear()
        self.answers.clear()
        self._forking.clear()
        for client in sorted(self.clients):
            own = [s for s in self.sessions.values() if s.client == client]
            for session in own:
                session.plans.clear()
            self.feed(events.Attached(client, tuple(self._state(s) for s in own)))
        assert self.brain.snapshot().sessions == len(self.sessions)
        self.feed(events.AdoptionEnded())

    def _state(self, session: WorkerSession) -> SessionState:
        from tierkv.protocol import BlankPage

        rows = [
            PageEntry(
                r.page,
                r.region,
                len(r.stamps),
                r.kind,
                r.offset,
                r.host_kind,
                r.host_offset,
                r.checksum,
                r.digest,
            )
            for r in session.rows
        ]
        table = TableState(
            session.id, session.version, session.length, rows, [BlankPage(*b) for b in session.blanks],
            session.codec_state, session.tail_open, session.digest,
        )  # fmt: skip
        g = session.geometry
        fields = GeometryFields(g.num_layers, g.num_kv_heads, g.head_dim, g.dtype, g.page_tokens)
        return SessionState(table, session.model_id, fields, session.options, session.step)

    # The promise ---------------------------------------------------------------------------------------------

    def check_reads(self) -> None:
        """Whatever a worker can read under the table it has adopted is what was written."""
        for session in self.sessions.values():
            for row in session.rows:
                if row.kind != Kind.NONE:
                    form, stamps = self.memory["hbm"][row.offset]
                    assert form == FORM[row.kind]
                    assert stamps[: len(row.stamps)] == row.stamps, "a worker reads foreign bytes in HBM"
                if row.host_kind != Kind.NONE:
                    form, stamps = self.memory["host"][row.host_offset]
                    assert form == FORM[row.host_kind]
                    assert stamps[: len(row.stamps)] == row.stamps, "a worker reads foreign bytes in host"
                if row.kind == Kind.NONE and row.digest != -1:
                    form, stamps = self.memory["hbm"][row.digest]
                    assert form == "digest"
                    assert stamps[: len(row.stamps)] == row.stamps, "a digest describes another page"
                if row.kind == Kind.NONE and row.host_kind == Kind.NONE:
                    assert self.may_lose(session), "a page has no replica left"

    def may_lose(self, session: WorkerSession) -> bool:
        """Drop ladders may lose pages; so may a host replica whose checksum failed (counted)."""
        counters = self.brain.state.counters
        return session.options.ladder == "drop" or self.lost_before + counters.lost_pages > 0

    lost_before = 0

    def settle(self) -> None:
        """Let everything finish: moves end, workers adopt and acknowledge."""
        for _ in range(200):
            for number in list(self.moves):
                self.finish_move(number)
            for session in list(self.sessions.values()):
                self.adopt_plans(session, acknowledge=True)
            if not self.moves and not self.brain.state.retirements:
                return
        raise AssertionError("moves and retirements do not come to an end")
