"""Sessions, their page tables and the models whose pages they hold: data, and the few verbs that keep it coherent."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.addresses import address_of
from tierkv.daemon.allocator import SizeClass
from tierkv.daemon.ledger import Ledger
from tierkv.daemon.links import Links
from tierkv.daemon.pages import FORMS, Guard, Ladder
from tierkv.daemon.policy import TokenState
from tierkv.geometry import Geometry
from tierkv.prefetch.digests import DigestForm
from tierkv.protocol import SessionOptions
from tierkv.regions import Region
from tierkv.table import NOWHERE, Kind

RATED_SECONDS = 0.05
"""Least time over which decode steps are counted: a worker sends those of several commits at once."""

IDLE_SECONDS = 1.0
"""A session that has not stepped for this long is paused; its clock then runs by the wall."""

RATE_SMOOTHING = 0.2
"""Weight of the newest interval in a session's usual step rate."""


@dataclass
class Model:
    """One (model, geometry, codec, digest form): what its pages measure, and the state of codec and digests in HBM."""

    key: str
    index: int
    model_id: str
    geometry: Geometry
    exact: SizeClass
    quant: SizeClass
    digest: SizeClass
    state_bytes: int  # of the codec's state, and behind it the digests'
    digest_form: DigestForm
    middle: SizeClass | None = None
    state_offset: int = NOWHERE  # reserved block
    state: int = NOWHERE  # the same once fitted: what plans name
    fitting: bool = False
    fit_after: float = 0.0  # a fit that failed is not tried again before
    sessions: set[int] = field(default_factory=set)

    def form(self, form: int) -> SizeClass:
        """What a replica of this form takes."""
        found = {Kind.EXACT: self.exact, Kind.MIDDLE: self.middle, Kind.QUANTIZED: self.quant}[Kind(form)]
        assert found is not None, "a page of the middle form, which is not configured"
        return found

    @property
    def forms(self) -> tuple[Kind, ...]:
        """Forms of its replicas in HBM, best first."""
        return tuple(form for form in FORMS if form is not Kind.MIDDLE or self.middle is not None)

    @property
    def ready(self) -> bool:
        """Pages of this model can be encoded, and digests that need a state written."""
        return self.state_bytes == 0 or self.state != NOWHERE


@dataclass
class Client:
    name: str
    sessions: set[int] = field(default_factory=set)
    quarantined: bool = False


class Column:
    """A growable int array: append at the end, cut at the end, read as a view."""

    def __init__(self) -> None:
        self.length = 0
        self._hold(np.zeros(16, np.int64))

    def _hold(self, data: NDArray[np.int64]) -> None:
        self._data = data
        self.address = address_of(data)
        """Of the first value; good until the next append."""

    def __len__(self) -> int:
        return self.length

    def append(self, value: int) -> None:
        if self.length == len(self._data):
            self._hold(np.concatenate([self._data, np.zeros_like(self._data)]))
        self._data[self.length] = value
        self.length += 1

    def cut(self, length: int) -> None:
        self.length = length

    def set_last(self, value: int) -> None:
        self._data[self.length - 1] = value

    @property
    def view(self) -> NDArray[np.int64]:
        return self._data[: self.length]

    def copy(self) -> Column:
        twin = Column()
        if self.length:
            twin._hold(self.view.copy())
        twin.length = self.length
        return twin


@dataclass
class Session:
    """One sequence of one worker. `pages`, `starts` and `counts` are the committed table, in token order."""

    id: int
    client: str
    model: Model
    options: SessionOptions
    ladder: Ladder
    region_pins: dict[Region, Guard]
    tokens: TokenState
    family: set[int]
    pages: Column = field(default_factory=Column)  # slots in the page store
    starts: Column = field(default_factory=Column)
    counts: Column = field(default_factory=Column)  # tokens of the page that this session reads
    tail_open: bool = False
    blanks: deque[int] = field(default_factory=deque)
    length: int = 0
    step: int = 0
    version: int = 0
    acked: int = 0
    changed: set[int] = field(default_factory=set)  # slots whose replicas the worker does not know yet
    retiring: deque[tuple[int, int]] = field(default_factory=deque)  # (version, retirement)
    retiring_bytes: int = 0  # HBM only
    scored_at: float = 0.0
    stale: bool = True  # scores are older than the tokens, step or observations
    observed: tuple[int, int] = (-1, -1)  # (step, tokens) of the last observation
    active_at: float = 0.0
    stepped_at: float = 0.0
    step_rate: float = 0.0  # decode steps a second
    unrated: int = 0  # decode steps since `stepped_at`
    token_ids: list[NDArray[np.int32]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    links: Links = field(default_factory=Links)
    resumes: Counter[str] = field(default_factory=Counter)  # pauses that ended, `ready` or `late`

    def row_of(self, token: int) -> int:
        """Row of the page that holds `token`."""
        return int(np.searchsorted(self.starts.view, token, side="right")) - 1

    def clock(self, now: float) -> float:
        """Decode steps, advanced by idle time at the usual rate while paused: else idle sessions outrank busy ones."""
        idle = now - self.active_at
        return self.step + (idle * self.step_rate if idle > IDLE_SECONDS else 0.0)

    def stepped(self, steps: int, now: float) -> None:
        interval = now - self.stepped_at
        self.unrated += steps
        if steps and RATED_SECONDS <= interval <= IDLE_SECONDS:
            rate = self.unrated / interval
            self.step_rate = (
                rate if not self.step_rate else self.step_rate + RATE_SMOOTHING * (rate - self.step_rate)
            )
        if not steps or interval >= RATED_SECONDS:
            self.stepped_at, self.unrated = now, 0
        self.step += steps
        self.active_at = now
        self.stale = True
