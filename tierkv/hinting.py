"""Hints that a session takes: what its orchestrator knows and attention cannot. A wrong one costs time, not tokens.

All are waited for (a tenth of a millisecond), name committed tokens, and end with the daemon that was told.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import msgspec

from tierkv.errors import RequestError
from tierkv.hint_messages import (
    AgentHint,
    DependsOn,
    HintKind,
    Pause,
    Prefetch,
    Resume,
    Retain,
    Supersede,
)
from tierkv.regions import Region, parse_region

Span = tuple[int, int]
"""Tokens `[start, stop)`."""


class Hinting(ABC):
    """The hints, over one way to tell the daemon.

    Every method raises `RequestError` for tokens, seconds or names that cannot be; nothing has changed then.
    """

    @property
    @abstractmethod
    def horizon(self) -> int:
        """Committed tokens."""

    @abstractmethod
    def _hint(self, hint: HintKind | None, agent: AgentHint | None = None) -> None:
        """Tell the daemon, and wait for it."""

    def pause(self, expected_seconds: float | None = None, *, tool: str = "") -> None:
        """No step for a while: others get the session's HBM if they need it, and it is back before the time is over.

        Args:
            expected_seconds: None: as long as earlier pauses for the same tool took.
            tool: name by which durations are learned.
        """
        if expected_seconds is not None and not expected_seconds >= 0:
            raise RequestError(
                f"expected_seconds is {expected_seconds:g}; it must be 0 or more, or None where it is not known"
            )
        self._hint(Pause(-1.0 if expected_seconds is None else float(expected_seconds), tool))

    def resume(self) -> None:
        """The next step is about to come; any step says so, too. What is not back yet comes at once."""
        self._hint(Resume())

    def prefetch(self, span: Span | None = None, *, region: str | Region | None = None) -> None:
        """Bring tokens of a span (default: all), of a region if one is named, back in the background."""
        start, stop = span or (0, self.horizon)
        self._hint(Prefetch(start, stop, -1 if region is None else int(parse_region(region))))

    def retain(self, seconds: float) -> None:
        """What the session has now stays in HBM for so long, at most as the daemon allows; 0 lifts it.

        Raises:
            OutOfCapacity: it and what is pinned would take more of HBM than `pin_quota`.
        """
        self._hint(Retain(float(seconds)))

    def supersede(self, span: Span) -> None:
        """Tokens are out of date: pages of nothing else give way before all others. They stay in the table."""
        self._hint(Supersede(*span))

    def depends_on(self, span: Span) -> None:
        """The present step reads these tokens: they give way last, and come back whenever it runs."""
        self._hint(DependsOn(*span))

    def agent_hint(self, envelope: AgentHint | Mapping[str, object]) -> None:
        """An orchestrator's hint (see `AgentHint`), as a struct or as JSON's object; fields not known are ignored."""
        if isinstance(envelope, Mapping):
            try:
                envelope = msgspec.convert(dict(envelope), AgentHint)
            except msgspec.ValidationError as error:
                raise RequestError(f"the agent hint cannot be read: {error}") from None
        self._hint(None, envelope)


__all__ = ["Hinting", "Span"]
