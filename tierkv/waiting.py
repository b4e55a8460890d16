"""Waiting for the daemon: answers are futures that the line's thread fulfils, unless the caller has given up."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Protocol, TypeVar

from tierkv.errors import OwnerUnavailable, TierKVError, from_wire
from tierkv.protocol import Failure, Result

T = TypeVar("T")


class Excuse(Protocol):
    def unavailable(self, what: str) -> OwnerUnavailable:
        """The error for a wait that ended without an answer."""
        ...


def wait(answer: Future[T], deadline: float, daemon: Excuse, what: str) -> T:
    """The answer; `OwnerUnavailable` when the deadline passes first."""
    try:
        return answer.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        if answer.cancel():
            raise daemon.unavailable(what) from None
        return answer.result()  # it came in this very moment


def give(answer: Future[T], value: T) -> bool:
    """Set the answer, unless nobody waits any more."""
    if not answer.set_running_or_notify_cancel():
        return False
    answer.set_result(value)
    return True


def refuse(answer: Future[T], error: TierKVError) -> None:
    if answer.set_running_or_notify_cancel():
        answer.set_exception(error)


def failed(result: Result) -> TierKVError:
    """The error that an answer means."""
    if isinstance(result, Failure):
        return from_wire(result.code, result.message, result.retry_after)
    return TierKVError(f"the daemon answered with {type(result).__name__}, which was not asked for")
