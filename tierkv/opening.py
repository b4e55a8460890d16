"""Asking the daemon for a session, again and again, until there is room for it or the client's time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from tierkv.calls import Call
from tierkv.errors import Backpressure
from tierkv.in_flight import LEAST_RETRY_SECONDS, Post
from tierkv.protocol import Fork, Open, Result, Table, TableState
from tierkv.waiting import failed, give, refuse, wait


class Opener(Post, Protocol):
    timeout: float
    """Seconds that a call waits at most."""


class Closing(Protocol):
    def close(self) -> None: ...


S = TypeVar("S", bound=Closing)


def make_session(daemon: Opener, op: Open | Fork, make: Callable[[TableState], S], parent: int = -1) -> S:
    """The session that `op` asks for.

    Args:
        make: makes it of the daemon's table and enrols it, on the line's thread.
        parent: id of the session that is forked.
    """
    deadline = time.monotonic() + daemon.timeout
    while True:
        answer: Future[S] = Future()

        def answered(result: Result, answer: Future[S] = answer) -> None:
            if not isinstance(result, Table):
                refuse(answer, failed(result))
                return
            session = make(result.table)
            if not give(answer, session):  # the caller has stopped waiting
                session.close()

        daemon.submit(Call(op, answered, parent, deadline=deadline))
        try:
            return wait(answer, deadline, daemon, "fork" if isinstance(op, Fork) else "open")
        except Backpressure as refusal:
            if time.monotonic() + refusal.retry_after >= deadline:
                raise
            time.sleep(max(refusal.retry_after, LEAST_RETRY_SECONDS))
