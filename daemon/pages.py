"""Every page the daemon knows, as a struct of arrays: scanning 60,000 pages for the coldest is a few numpy calls."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tierkv.table import NOWHERE, Kind


class Guard(IntEnum):
    """How far a page may be demoted, weakest first. Recomputed with the scores."""

    NONE = 0
    ATTENDABLE = 1  # may become low-bit, may not leave HBM
    RECENT = 2  # stays exact unless nothing else can give way
    EXACT = 3  # pins, attention sinks, pages of a stopped worker


class Ladder(IntEnum):
    """What may happen to a page under pressure (`SessionOptions.ladder`)."""

    EXACT = 0
    DROP = 1
    TIERED = 2


class Goal(IntEnum):
    """Where a page is on its way to; set while its moves run."""

    NONE = 0
    QUANTIZED = 1
    HOST = 2
    EXACT = 3  # promotion
    LOWBIT = 4  # promotion of a host page to a low-bit replica
    RELOCATE = 5  # a packed replica changes slots to empty a frame
    MIDDLE = 6


class Outcome(IntEnum):
    """What became of a page that was brought back at another's expense."""

    NONE = 0
    PENDING = 1  # it is there and was not attended much yet
    USED = 2
    COMING = 3  # it is on its way, into the place that another has left for it


Reason = Literal[
    "pressure",
    "budget",
    "threshold",
    "recall",
    "room",
    "pin",
    "hot",
    "compaction",
    "host-full",
    "checksum",
    "pause",
    "resume",
    "hint",
]
"""Why a page changes its tier."""

REASONS = ("", *get_args(Reason))
"""`PageStore.moved_why` is an index into it; 0: the page never moved."""

FORMS = (Kind.EXACT, Kind.MIDDLE, Kind.QUANTIZED)
"""Forms of a replica, best first; the middle one only where it is configured."""

TIER = {Kind.EXACT: "hbm", Kind.MIDDLE: "middle", Kind.QUANTIZED: "quantized", Kind.NONE: "host"}
"""Tier of a page that is not dropped, by its kind."""

NEVER = -np.inf
"""`PageStore.moved_step` of a page that never moved, `promoted_step` of one that never came back."""


class PageStore:
    """Arrays indexed by a page's slot. `index[id]` finds the slot; slots are reused, ids never."""

    def __init__(self) -> None:
        self.index: dict[int, int] = {}
        self._free: list[int] = []
        self._top = 0
        self.id = np.zeros(0, np.int64)
        self.model = np.zeros(0, np.int32)
        self.region = np.zeros(0, np.int8)
        self.count = np.zeros(0, np.int32)  # committed tokens; 0: blank
        self.live = np.zeros(0, bool)
        self.sealed = np.zeros(0, bool)
        self.refs = np.zeros(0, np.int32)  # sessions that name the page
        self.owner = np.zeros(0, np.int64)  # a session that names it
        self.kind = np.zeros(0, np.int8)  # what attention reads: table.Kind
        self.exact = np.zeros(0, np.int64)  # HBM offset of the exact replica
        self.middle = np.zeros(0, np.int64)  # HBM offset of the replica of the middle form
        self.quant = np.zeros(0, np.int64)  # HBM offset of the low-bit replica
        self.host = np.zeros(0, np.int64)  # host offset
        self.host_kind = np.zeros(0, np.int8)
        self.checksum = np.zeros(0, np.uint64)  # of the host replica
        self.digest = np.zeros(0, np.int64)  # HBM offset of the digest that a cold page leaves
        self.summarizing = np.zeros(0, bool)  # a move is making its digest
        self.moving = np.zeros(0, np.int16)  # moves in flight that read or write the page
        self.coming = np.zeros(0, np.int64)  # HBM bytes that they will have written for it
        self.doomed = np.zeros(0, bool)  # released while moving
        self.goal = np.zeros(0, np.int8)
        self.guard = np.zeros(0, np.int8)
        self.pin = np.zeros(0, np.int8)  # Guard that was asked for
        self.ladder = np.zeros(0, np.int8)
        self.score = np.zeros(0, np.float32)
        self.mass = np.zeros(
            0, np.float32
        )  # attention the page gets: observed, or estimated while it is cold
        self.recalled = np.zeros(0, np.int8)  # Outcome of its last recall
        self.wanted_until = np.zeros(0, np.float32)  # decode step up to which a recalled page should stay
        self.back_at = np.zeros(
            0, np.float64
        )  # when its paused sessions resume (seconds); 0: one is not paused
        self.held = np.zeros(0, bool)  # ... one of which is near, and attends to the page when it does
        self.retained_until = np.zeros(0, np.float64)  # it does not leave HBM before
        self.stale = np.zeros(0, bool)  # its tokens were superseded
        self.linked = np.zeros(0, bool)  # the present step depends on it
        self.moved_step = np.zeros(0, np.float32)  # decode step of the last tier change
        self.promoted_step = np.zeros(0, np.float32)  # decode step of the last promotion
        self.moved_why = np.zeros(0, np.int8)  # index into REASONS: why it did
        self.retry_at = np.zeros(0, np.float64)
        self.refused = np.zeros(0, bool)  # the codec refused it: stays exact
        self.lossy = np.zeros(0, bool)  # no exact replica is left
        self._arrays = [name for name, value in vars(self).items() if isinstance(value, np.ndarray)]

    def __len__(self) -> int:
        return len(self.index)

    @property
    def top(self) -> int:
        """Slots ever used; arrays are read as `field[:top]`."""
        return self._top

    def add(self, page: int, model: int, session: int, exact: int, ladder: int) -> int:
        """A new page with one reference; returns its slot. `exact` is its HBM offset (or `NOWHERE`)."""
        if not self._free:
            if self._top == len(self.id):
                self._grow()
            self._free.append(self._top)
            self._top += 1
        slot = self._free.pop()
        for name in self._arrays:
            getattr(self, name)[slot] = 0
        self.id[slot], self.model[slot], self.owner[slot] = page, model, session
        self.refs[slot], self.live[slot], self.ladder[slot] = 1, True, ladder
        self.exact[slot] = exact
        self.middle[slot] = self.quant[slot] = self.host[slot] = self.digest[slot] = NOWHERE
        self.moved_step[slot] = self.promoted_step[slot] = NEVER
        self.kind[slot] = Kind.EXACT if exact != NOWHERE else Kind.NONE
        self.index[page] = slot
        return slot

    def remove(self, slot: int) -> None:
        del self.index[int(self.id[slot])]
        self.live[slot] = False
        self._free.append(slot)

    def replica(self, form: Kind) -> NDArray[np.int64]:
        """HBM offsets of the replicas of a form, by slot."""
        offsets: NDArray[np.int64] = {
            Kind.EXACT: self.exact, Kind.MIDDLE: self.middle, Kind.QUANTIZED: self.quant,
        }[form]  # fmt: skip
        return offsets

    def slots(self) -> NDArray[np.int64]:
        """Slots of all live pages."""
        return np.flatnonzero(self.live[: self._top])

    def _grow(self) -> None:
        size = max(64, 2 * len(self.id))
        for name in self._arrays:
            old = getattr(self, name)
            new = np.zeros(size, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
