"""Has the brain's moves carried out, in one thread, and tells of each how it ended.

A move ends in exactly one `MoveDone` or `MoveFailed`; whatever goes wrong keeps the source and never leaves the thread.
How bytes go is the carrier's business (`carriers.py`). Moves for which a device works are in flight together: the
thread looks at their fences and begins others meanwhile.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from tierkv.daemon.carriers import Carried, Carrier, Damaged, Landed, Move
from tierkv.daemon.events import Copy, MoveDone, MoveFailed
from tierkv.fence import Fence
from tierkv.quant.contract import NonFiniteValues

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.0001
"""How often fences are looked at while moves are in flight: a page of an 8B model takes as long over the bus."""


class OnMove(Protocol):
    def __call__(self, src: str, dst: str, seconds: float, size: int) -> None:
        """A move is done: pools `src` and `dst` (`quantized` for a low-bit replica in HBM), bytes written."""


class _Flight(NamedTuple):
    """A move that has begun, and what it waits for."""

    move: Move
    carried: Carried
    began: float  # monotonic
    fence: Fence


class Mover:
    """One thread, one queue.

    Args:
        post: gets every result; called from the mover's thread.
    """

    def __init__(
        self, carrier: Carrier, post: Callable[[MoveDone | MoveFailed], None], on_move: OnMove | None = None
    ) -> None:
        self._carrier = carrier
        self._post = post
        self._on_move = on_move
        self._queue: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
        self._flying: list[_Flight] = []  # a thread that takes a dead one's place goes on with them
        self._thread: threading.Thread | None = None
        self._unfinished = 0
        self._lock = threading.Lock()
        self._started_at: float | None = None
        self._stopping = False
        self.restarts = 0
        self.warmed = threading.Event()
        """The codec's kernels and those of scores are compiled: seconds on a machine that has not run them, less from
        numba's cache."""

    def start(self) -> None:
        thread = threading.Thread(target=self._run, name="tierkv-mover", daemon=True)
        thread.start()
        self._thread = thread  # only now: `revive` would take one that has not started for a dead one

    def submit(self, move: Move) -> None:
        """Queue a move; revives a dead thread."""
        with self._lock:
            self._unfinished += 1
        self._queue.put(move)
        self.revive()

    def revive(self) -> None:
        """Start a new thread where the old one died, and count it."""
        if not self._stopping and self._thread is not None and not self._thread.is_alive():
            self.restarts += 1
            log.error("the mover's thread had died; restart %d", self.restarts)
            self.start()

    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def pending(self) -> int:
        """Moves submitted and not answered."""
        return self._unfinished

    def busy_seconds(self) -> float:
        """How long the oldest move that has begun has been running; 0 when idle."""
        started = self._started_at
        return 0.0 if started is None else time.monotonic() - started

    def stop(self, timeout: float = 5.0) -> None:
        """Finish what is queued, then end the thread."""
        self._stopping = True
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        if not self.warmed.is_set():
            try:
                self._carrier.warm_up()
            except Exception:
                log.exception("the kernels could not be warmed up")
            self.warmed.set()
        ending = False
        while not ending or self._flying:
            move, timeout = None, LOOK_SECONDS if self._flying else None
            try:
                move = self._queue.get(timeout=timeout)
                ending |= move is None
            except queue.Empty:
                pass
            if move is not None:
                self._begin(move)
            self._look()

    def _begin(self, move: Move) -> None:
        began = time.monotonic()
        if self._started_at is None:
            self._started_at = began
        self._go_on(move, self._carrier.carry(move), began)

    def _look(self) -> None:
        """Go on with moves whose fences are passed."""
        for flight in list(self._flying):
            broken: Exception | None = None
            try:
                if not flight.fence.query():
                    continue
            except Exception as error:  # the device's: nothing of the move will be done
                broken = error
            self._flying.remove(flight)
            self._go_on(flight.move, flight.carried, flight.began, broken)

    def _go_on(self, move: Move, carried: Carried, began: float, broken: Exception | None = None) -> None:
        result: MoveDone | MoveFailed | None = MoveFailed(move.move, "io")
        try:
            result = self._step(move, carried, began, broken)
        finally:  # even when this thread is dying, the brain gets its answer
            if result is not None:
                self._started_at = self._flying[0].began if self._flying else None
                with self._lock:
                    self._unfinished -= 1
                self._post(result)

    def _step(
        self, move: Move, carried: Carried, began: float, broken: Exception | None
    ) -> MoveDone | MoveFailed | None:
        """To the move's next fence, which gives None, or to its end."""
        try:
            fence = next(carried) if broken is None else carried.throw(broken)
        except StopIteration as end:
            return self._landed(end.value, began)
        except NonFiniteValues:
            return MoveFailed(move.move, "non-finite")
        except Damaged as error:
            log.warning("move %d: %s", move.move, error)
            return MoveFailed(move.move, "checksum")
        except Exception as error:
            reason = (
                "io"
                if isinstance(move, Copy) or isinstance(error, (OSError, KeyError, IndexError))
                else "codec"
            )
            log.exception("move %d failed (%s)", move.move, reason)
            return MoveFailed(move.move, reason)
        self._flying.append(_Flight(move, carried, began, fence))
        return None

    def _landed(self, landed: Landed, began: float) -> MoveDone:
        if self._on_move is not None:
            try:
                self._on_move(landed.src, landed.dst, time.monotonic() - began, landed.size)
            except Exception:
                log.exception("the metrics hook failed")
        return landed.done
