"""Hints from the wire: every number is checked; what only the brain knows (how long a session is) it checks itself."""

from __future__ import annotations

from tierkv.errors import RequestError
from tierkv.hint_messages import AgentHint, HintKind, Pause, Prefetch, Retain
from tierkv.regions import parse_region

MOST_SECONDS = 30 * 24 * 3600.0
"""Beyond a month a duration is a mistake, of units most likely."""

MOST_NAME = 256
"""Characters of a tool's, workflow's or step's name."""


def hint(given: HintKind | None) -> HintKind | None:
    """The hint; raises `RequestError` for a number or name that cannot be."""
    match given:
        case Pause(seconds, tool):
            if seconds != -1.0:
                _seconds(seconds, "the expected seconds of a pause")
            _name(tool, "a tool")
        case Retain(seconds):
            _seconds(seconds, "the seconds to retain")
        case Prefetch(region=region) if region != -1:
            parse_region(region)
    return given


def agent_hint(given: AgentHint | None) -> AgentHint | None:
    """The envelope; raises `RequestError` for a number or name that cannot be."""
    if given is not None:
        _seconds(given.ttl, "ttl")
        _seconds(given.expected_tool_duration_ms / 1000, "expected_tool_duration_ms, in seconds,")
        for name in ("workflow_id", "step_id", "parent_step_id", "reuse_hint"):
            _name(getattr(given, name), name)
    return given


def _seconds(value: float, what: str) -> None:
    if not 0.0 <= value <= MOST_SECONDS:  # False for NaN, too
        raise RequestError(f"{what} cannot be {value:g}; a number from 0 to {MOST_SECONDS:,.0f} (30 days) is")


def _name(value: str, what: str) -> None:
    if len(value) > MOST_NAME:
        raise RequestError(f"the name of {what} has {len(value):,} characters; at most {MOST_NAME}")
