"""What a session has asked of the daemon and not heard back of: commits and observations, and one reservation.

None of it is waited for by itself. A failed report is told to whoever made it; a refused reservation is asked again
when the daemon said, by whoever still needs the pages. One reservation at a time, so that blanks keep their order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from tierkv.calls import Call
from tierkv.errors import Backpressure, OwnerUnavailable, TierKVError, from_wire
from tierkv.protocol import BlankPage, Commit, Failure, Observe, Reserve, Reserved, Result
from tierkv.waiting import Excuse, failed

MAX_UNANSWERED = 256
"""Commits and observations in flight; a step waits beyond."""

LEAST_RETRY_SECONDS = 0.001
UNTOLD_RETRY_SECONDS = 0.05
"""Wait before asking again where the daemon named none."""

RETRYABLE = (Backpressure, OwnerUnavailable)


class Post(Excuse, Protocol):
    """The way to the daemon."""

    def submit(self, call: Call, wake: bool = True) -> None: ...

    def flush(self) -> None:
        """Send what was submitted without `wake`."""
        ...


class InFlight:
    """Call it with `changed` held. Answers come on the line's thread, which takes it and notifies.

    Args:
        session: its id.
        changed: the session's lock; waits give it up meanwhile.
        arrived: given reserved pages, with `changed` held.
    """

    def __init__(
        self,
        post: Post,
        session: int,
        changed: threading.Condition,
        arrived: Callable[[list[BlankPage]], None],
    ) -> None:
        self.told = 0
        """Number of the last commit or observation."""
        self.unanswered = 0
        """Of them."""
        self._post = post
        self._session = session
        self._changed = changed
        self._arrived = arrived
        self._reserving = False
        self._refusal: TierKVError | None = None
        self._retry_at = 0.0
        self.blocked_seconds = 0.0
        """That steps waited for the daemon and no observation has told."""

    @property
    def full(self) -> bool:
        """So many commits and observations are unanswered that a step should wait."""
        return self.unanswered >= MAX_UNANSWERED

    def tell(
        self, op: Commit | Observe, buffers: list[bytes], fell: Callable[[TierKVError], None], wake: bool
    ) -> None:
        """Send a report: now, or with `wake=False` when the line is woken for something else, or looks by itself.

        `fell` is called, with `changed` held, should the daemon not take it.
        """
        self.told += 1
        self.unanswered += 1
        call = Call(op, lambda result: self._answered(result, fell), self._session, self.told, buffers)
        self._post.submit(call, wake=wake)

    def forget_refusal(self) -> None:
        """Somebody else needs pages now: what an earlier one was refused is not theirs to raise."""
        self._refusal = None

    def wait_for_pages(self, missing: int, deadline: float) -> None:
        """Ask for `missing` pages, if any, or wait for what was asked; returns when something has changed.

        Raises:
            OutOfCapacity: and other refusals that no wait will change.
            Backpressure, OwnerUnavailable: the deadline is over.
        """
        now = time.monotonic()
        if self._refusal is not None and not isinstance(self._refusal, RETRYABLE):
            raise self._refusal
        if now >= deadline:
            raise self._refusal or self._post.unavailable(f"{missing} pages for session {self._session}")
        if missing > 0 and not self._reserving and now >= self._retry_at:
            self._reserve(missing)
        self._post.flush()
        wake = deadline if self._reserving or missing <= 0 else min(deadline, self._retry_at)
        self._changed.wait(max(LEAST_RETRY_SECONDS, wake - now))
        self.blocked_seconds += time.monotonic() - now

    def reserve_ahead(self, missing: int) -> None:
        """Ask for `missing` pages, if any, unless some are asked for or the daemon wants to be left alone.

        A refusal is nobody's: room may be there by the time that somebody needs the pages.
        """
        if missing > 0 and not self._reserving and time.monotonic() >= self._retry_at:
            self._reserve(missing, ahead=True)

    def settle(self, deadline: float) -> None:
        """Wait until everything is answered."""
        self._post.flush()
        while self._reserving or self.unanswered:
            if time.monotonic() >= deadline:
                raise self._post.unavailable(f"earlier requests of session {self._session}")
            self._changed.wait(max(LEAST_RETRY_SECONDS, deadline - time.monotonic()))

    def _answered(self, result: Result, fell: Callable[[TierKVError], None]) -> None:
        with self._changed:
            self.unanswered -= 1
            if isinstance(result, Failure):
                fell(from_wire(result.code, result.message, result.retry_after))
            self._changed.notify_all()

    def _reserve(self, pages: int, ahead: bool = False) -> None:
        self._reserving = True
        answered = partial(self._reserved, ahead)
        self._post.submit(Call(Reserve(self._session, pages), answered, self._session))

    def _reserved(self, ahead: bool, result: Result) -> None:
        with self._changed:
            self._reserving = False
            if isinstance(result, Reserved):
                self._arrived(result.blanks)
                self._refusal = None
            else:
                refusal = failed(result)
                told = refusal.retry_after if isinstance(refusal, Backpressure) else UNTOLD_RETRY_SECONDS
                self._retry_at = time.monotonic() + max(told, LEAST_RETRY_SECONDS)
                self._refusal = None if ahead else refusal
            self._changed.notify_all()
