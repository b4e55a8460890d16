"""Exact frames for new pages: given out, or refused with the reason and with room being asked for."""

from __future__ import annotations

from tierkv.daemon.allocator import PoolAllocator
from tierkv.daemon.pages import Ladder
from tierkv.daemon.pressure import Pressure
from tierkv.daemon.sessions import Session
from tierkv.daemon.state import State
from tierkv.errors import Backpressure, OutOfCapacity, TierKVError

RETRY_AFTER_SECONDS = 0.002
"""What a caller that must wait is told; a move of one page takes about this long."""


class Frames:
    def __init__(self, state: State, pressure: Pressure) -> None:
        self._state = state
        self._pressure = pressure

    def take(self, session: Session, count: int) -> list[int]:
        """HBM offsets of `count` frames.

        Raises:
            OutOfCapacity: more than there can ever be, or nothing may give way any more.
            Backpressure: room is being made.
        """
        wanted = count * session.model.exact.frame
        self._check_size(session, count, wanted)
        frames = self._free(session, count)
        if not frames:
            self._pressure.ask(session, wanted)
            full = self.full()
            if isinstance(full, OutOfCapacity):
                frames = self._free(session, count, kept=0)
            if not frames:
                raise _of_a_ladder(full, session) if isinstance(full, OutOfCapacity) else full
        self._pressure.satisfied(session.id)
        return frames

    def full(self) -> TierKVError:
        """Backpressure while room is on its way; `OutOfCapacity` when nothing can give way any more."""
        state = self._state
        if self._pressure.relieve() or any(c.quarantined for c in state.clients.values()):
            state.counters.backpressure += 1
            return Backpressure("HBM is full for the moment; room is being made", RETRY_AFTER_SECONDS)
        return OutOfCapacity(
            f"no room for a page and none may give way: {_use(state.hbm)} bytes of HBM and {_use(state.host)} of host "
            "are in use; close sessions, lift pins or budgets, or give the daemon more"
        )

    def _check_size(self, session: Session, count: int, wanted: int) -> None:
        size, budget = self._state.hbm.size, session.options.hbm_budget
        if wanted > size or (budget and wanted > budget):
            raise OutOfCapacity(
                f"{count} pages are {wanted:,} bytes of exact K/V; the pool has {size:,}"
                + (f" and the session's budget is {budget:,}" if budget else "")
                + ": prefill in smaller chunks"
            )

    def _free(self, session: Session, count: int, kept: int | None = None) -> list[int]:
        """`count` frames or none. The last one of the pool is kept for low-bit pages while none has a free slot: until
        no page can become low-bit any more (`kept=0`).
        """
        state, model = self._state, session.model
        if self._pressure.budgets.room(session) < count * model.exact.frame:
            return []
        kept = self._pressure.kept_frames(model) if kept is None else kept
        if state.hbm.free_frames(model.exact.frame) < count + kept:
            return []
        frames = [state.hbm.allocate(model.exact) for _ in range(count)]
        return [frame for frame in frames if frame is not None]


def _of_a_ladder(full: OutOfCapacity, session: Session) -> OutOfCapacity:
    """Told of a session whose own pages never give way."""
    if session.ladder is not Ladder.EXACT:
        return full
    return OutOfCapacity(f'{full}. This session has the ladder "exact": none of its pages ever gives way')


def _use(pool: PoolAllocator) -> str:
    return f"{pool.used_bytes:,} of {pool.size:,}"
