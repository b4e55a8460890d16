"""What the owner's loop needs of the brain, the mover and the metrics."""

from __future__ import annotations

from typing import Protocol

from tierkv.daemon import events
from tierkv.daemon.snapshot import Snapshot
from tierkv.figures import SessionFigures
from tierkv.protocol import Explained


class BrainLike(Protocol):
    """What the loop needs of `tierkv.daemon.brain.Brain`."""

    def handle(self, event: events.Event, now: float) -> list[events.Instruction]: ...

    def snapshot(self) -> Snapshot: ...

    def session_stats(self, session: int) -> dict[str, float]:
        """Raises `UnknownSession`."""
        ...

    def sessions(self) -> list[SessionFigures]: ...

    def explain(self, session: int, page: int = -1, token: int = -1) -> Explained:
        """Raises `RequestError`."""
        ...


class MoveSink(Protocol):
    """What the loop needs of the mover."""

    def submit(self, move: events.Quantize | events.Copy | events.Summarize | events.FitCodec) -> None: ...

    def revive(self) -> None: ...


class ServerMetrics(Protocol):
    """Called from the loop's thread; must not block."""

    def request(self, op: str, seconds: float) -> None:
        """A request was answered, `seconds` after it was read."""
        ...

    def refused(self, op: str, code: str) -> None: ...

    def malformed(self) -> None: ...

    def handler_error(self) -> None: ...

    def workers(self, count: int) -> None: ...

    def lease_expired(self) -> None: ...

    def tick(self) -> None: ...


class NoMetrics:
    """Counts nothing."""

    def request(self, op: str, seconds: float) -> None: ...

    def refused(self, op: str, code: str) -> None: ...

    def malformed(self) -> None: ...

    def handler_error(self) -> None: ...

    def workers(self, count: int) -> None: ...

    def lease_expired(self) -> None: ...

    def tick(self) -> None: ...
