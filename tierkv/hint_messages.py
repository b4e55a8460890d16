"""Hints of an orchestrator: what it knows of a session that attention cannot tell. None of them is needed.

They change which pages give way and which come back, never what a page holds: a wrong hint costs time, not tokens.
"""

from __future__ import annotations

import msgspec


class _Hint(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    pass


class Pause(_Hint, tag="pause"):
    """No step for about `seconds` (-1: not known, learned from earlier pauses for the same `tool`)."""

    seconds: float = -1.0
    tool: str = ""


class Resume(_Hint, tag="resume"):
    """The next step is about to come. Any step says so, too."""


class Prefetch(_Hint, tag="prefetch"):
    """Tokens `[start, stop)`, those of `region` only unless it is -1, come back in the background."""

    start: int
    stop: int
    region: int = -1


class Retain(_Hint, tag="retain"):
    """Pages that the session has now do not leave HBM for `seconds`; 0 lifts it."""

    seconds: float


class Supersede(_Hint, tag="supersede"):
    """Tokens `[start, stop)` are out of date: their pages give way before all others."""

    start: int
    stop: int


class DependsOn(_Hint, tag="depends_on"):
    """The present step reads tokens `[start, stop)`: they give way last and come back whenever it runs."""

    start: int
    stop: int


class AgentHint(msgspec.Struct, frozen=True, kw_only=True):
    """What an orchestrator's request says of a step, in its own words. Fields that are not known are ignored.

    Attributes:
        version: of this envelope.
        workflow_id, step_id: name the step that runs from now on; names of steps count within their workflow.
        parent_step_id: an earlier step of the session, whose tokens this step depends on.
        ttl: seconds after which a paused session is not expected back; 0: it is.
        expected_tool_duration_ms: of the tool that the step calls; where it is positive, the session pauses.
        reuse_hint: `unlikely`: the session is not expected back from its pause. Other words say nothing.
    """

    version: int = 1
    workflow_id: str = ""
    step_id: str = ""
    parent_step_id: str = ""
    ttl: float = 0.0
    expected_tool_duration_ms: float = 0.0
    reuse_hint: str = ""


HintKind = Pause | Resume | Prefetch | Retain | Supersede | DependsOn

__all__ = ["AgentHint", "DependsOn", "HintKind", "Pause", "Prefetch", "Resume", "Retain", "Supersede"]
