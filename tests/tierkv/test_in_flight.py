"""Reservations that nobody waits for yet."""

from __future__ import annotations

import threading
import time

import pytest

from tierkv.calls import Call
from tierkv.errors import OutOfCapacity, OwnerUnavailable
from tierkv.in_flight import UNTOLD_RETRY_SECONDS, InFlight
from tierkv.protocol import BlankPage, Failure, Reserve, Reserved


class Daemon:
    """Keeps what it is sent, and answers when it is told to."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def submit(self, call: Call, wake: bool = True) -> None:
        self.calls.append(call)

    def flush(self) -> None: ...

    def unavailable(self, what: str) -> OwnerUnavailable:
        return OwnerUnavailable(what)


def test_a_refusal_of_what_was_asked_ahead_makes_the_waiting_step_ask_for_itself() -> None:
    daemon, lock, blanks = Daemon(), threading.Condition(threading.RLock()), list[BlankPage]()
    flying = InFlight(daemon, 7, lock, blanks.extend)
    with lock:
        flying.reserve_ahead(4)
        assert [call.op for call in daemon.calls] == [Reserve(7, 4)]
        daemon.calls[0].done(Failure(OutOfCapacity.code, "only one can be had"))
        end = time.monotonic() + 2.0
        while len(daemon.calls) < 2:
            flying.wait_for_pages(1, end)  # raises what it was refused, were that its own
        assert daemon.calls[1].op == Reserve(7, 1)
        daemon.calls[1].done(Reserved([BlankPage(5, 4096)]))
    assert blanks == [BlankPage(5, 4096)]


def test_what_was_asked_ahead_and_refused_is_not_asked_for_at_once_again() -> None:
    daemon, lock = Daemon(), threading.Condition(threading.RLock())
    flying = InFlight(daemon, 7, lock, list[BlankPage]().extend)
    with lock:
        flying.reserve_ahead(4)
        flying.reserve_ahead(4)  # still in flight
        daemon.calls[0].done(Failure(OutOfCapacity.code, "none"))
        flying.reserve_ahead(4)
        assert len(daemon.calls) == 1
        time.sleep(UNTOLD_RETRY_SECONDS)
        flying.reserve_ahead(4)
    assert len(daemon.calls) == 2


def test_time_that_a_step_waits_for_pages_is_added_up() -> None:
    lock = threading.Condition(threading.RLock())
    flying = InFlight(Daemon(), 7, lock, list[BlankPage]().extend)
    began = time.monotonic()
    with lock, pytest.raises(OwnerUnavailable):
        while True:
            flying.wait_for_pages(1, began + 0.05)
    assert 0.05 <= flying.blocked_seconds <= time.monotonic() - began
