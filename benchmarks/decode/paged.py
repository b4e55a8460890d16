"""tierkv's arms: a session a row, filled with K/V that the model made already."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

import tierkv.attention
from tierkv import Client, Session
from tierkv.benchmarks.decode import AT_BASE, FIFTH, FIXED, OBSERVED, QUARTER, UNOBSERVED
from tierkv.benchmarks.decode.arm import Arm, Dense, Held
from tierkv.benchmarks.decode.plan import WARM_UP
from tierkv.benchmarks.decode.watch import STEP, Span, Watch
from tierkv.geometry import DTypeName, Geometry
from tierkv.model import AttachedModel
from tierkv.table import Kind
from tierkv.transformers_cache import TieredCache

BUDGET_SHARE = {QUARTER: 4, FIFTH: 5}
"""An arm holds one part in so many of its exact bytes."""

FIXED_TOKENS = 512
"""`tierkv-fixed` holds the exact bytes of so many tokens."""

LEAST_BUDGET_PAGES = 12
NEVER = 1 << 30
FORWARD_SECONDS = 0.3
"""Left to the daemon after each chunk, as the model's forward would leave it."""

SETTLE_SECONDS = 10.0
"""How long moves that the prompt caused may take before the clock runs."""


def budget_of(name: str, geometry: Geometry, tokens: int) -> int:
    """HBM bytes that a session of the arm may hold; 0: as many as it wants."""
    if share := BUDGET_SHARE.get(name.removesuffix(AT_BASE)):
        return max(LEAST_BUDGET_PAGES * geometry.page_bytes, tokens * geometry.token_bytes // share)
    if name == FIXED:
        return FIXED_TOKENS * geometry.token_bytes
    return 0


def pool_bytes(names: Sequence[str], geometry: Geometry, tokens: int, batch: int) -> int:
    """HBM that all arms take, with room for what moves: nothing but its budget makes a page leave."""
    each = (budget_of(name, geometry, tokens) or (tokens + 256) * geometry.token_bytes for name in names)
    return 2 * batch * sum(each) + 256 * geometry.page_bytes


def open_session(name: str, model: AttachedModel, client: Client, pages: DTypeName, tokens: int) -> Session:
    """A session as the arm wants it for so many tokens."""
    geometry = model.geometry(pages, client.page_tokens)
    budget = budget_of(name, geometry, tokens)
    session = model.open(client, pages, ladder="tiered" if budget else "exact", hbm_budget=budget)
    if every := {**OBSERVED, UNOBSERVED: NEVER}.get(name):
        session.observing = session.observing._replace(every=every)
    return session


class PagedArm(Arm):
    def __init__(
        self,
        name: str,
        model: AttachedModel,
        client: Client,
        sessions: Sequence[Session],
        fill_seconds: float,
    ) -> None:
        self.sessions, self.client = list(sessions), client
        super().__init__(name, model.model, TieredCache(self.sessions), fill_seconds)
        self.watch = Watch(self.sessions)
        self._step = self.watch.timed(STEP, super().step)

    def step(self, tokens: torch.Tensor) -> None:
        self._step(tokens)

    def measured_spans(self) -> list[Span]:
        """Of all steps after those that warm up, and of their calls."""
        ends = [index for index, span in enumerate(self.watch.spans) if span.name == STEP]
        return self.watch.spans[ends[WARM_UP - 1] + 1 : ends[-1] + 1]

    def held(self) -> Held:
        stats = [self.client.stats(session.id) for session in self.sessions]
        pages: dict[str, int] = {}
        attended = 0
        for session in self.sessions:
            read, kinds = _attended(session, self.cache.recall.read)
            attended += read
            for kind, count in kinds.items():
                pages[kind] = pages.get(kind, 0) + count
        hbm, host = (int(sum(one[key] for one in stats)) for key in ("hbm_bytes", "bytes_host"))
        return Held(hbm, host, attended, pages)

    def close(self) -> None:
        for session in self.sessions:
            session.close()


def paged(
    name: str, model: AttachedModel, client: Client, dense: Dense, batch: int, pages: DTypeName
) -> PagedArm:
    """An arm whose rows hold the same tokens, each in pages of its own."""
    start = time.perf_counter()
    sessions = []
    for _ in range(batch):
        session = open_session(name, model, client, pages, dense[0][0].shape[2])
        _fill(session, dense)
        sessions.append(session)
    for session in sessions:
        if session.hbm_budget:
            settle(session)
    return PagedArm(name, model, client, sessions, time.perf_counter() - start)


def _fill(session: Session, dense: Dense) -> None:
    """Write a prompt in the steps that its forwards would take.

    Written without a pause, more pages would leave HBM, and fewer be packed, than when a model reads the prompt.
    """
    attention, tokens = tierkv.attention.get("cpu"), dense[0][0].shape[2]
    for start, stop in TieredCache(session).slices(1, tokens):
        session.begin(stop - start)
        offsets, slots = session.slots(start, stop)
        for layer, pair in enumerate(dense):
            keys, values = (part[0, :, start:stop].transpose(0, 1) for part in pair)
            attention.write(session.pool, layer, offsets, slots, keys, values)
        session.commit()
        session.end()
        if session.hbm_budget:
            time.sleep(FORWARD_SECONDS)


def settle(session: Session) -> None:
    """Wait until the table has stood still for a while: what the prompt set moving has arrived."""
    deadline, version = time.monotonic() + SETTLE_SECONDS, -1
    while session.version != version and time.monotonic() < deadline:
        version = session.version
        time.sleep(0.3)


def _attended(session: Session, cold_read: int) -> tuple[int, dict[str, int]]:
    """Bytes that a step reads, and pages by kind; of cold ones as many as a head reads in place, exact."""
    session.begin(0)
    rows, cold = session.rows(session.length), session.cold_pages
    session.end()
    geometry = session.geometry
    exact = rows.kinds == Kind.EXACT
    low = int(np.count_nonzero(~exact))
    read = int(rows.counts[exact].sum()) * geometry.token_bytes + min(cold, cold_read) * geometry.page_bytes
    if low:
        read += low * session.pool.codec.page_bytes(geometry)
    return read, {"exact": int(np.count_nonzero(exact)), "low_bit": low, "cold": cold}
