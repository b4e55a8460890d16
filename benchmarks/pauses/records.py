"""The figures: what `out/pauses.json` holds a list of."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True):
    """An arm in a room.

    Attributes:
        arm: what callers tell: `off` nothing, `exact` how long a pause takes, `wrong` that times a log-normal factor,
            `tool` what runs, `predicted` nothing, and silence is taken for a pause.
        room: `exact` or `low-bit`: how HBM would hold 16 sessions whole.
        ready, whole: shares of resumes that found .95 of their working set's attention attendable, and all its pages.
        bound: the most `ready` that holding sets by their chance to resume could give; `None` without a distribution.
        found, mass: shares of the working set's attention and of all that was attendable at a resume, mean.
        late_seconds: from a resume that was not ready until it was, mean over those.
        running_mass: share of attention on attendable pages while sessions run.
        held: share of HBM that paused sessions hold, mean.
        returned: bytes read from host memory a second to bring pages back.
        set_share: of a session's pages that its working set takes, mean.
        daemon_ready: share of the pauses known to the brain that it counted as `ready`, all of the run.
    """

    arm: str
    room: str
    resumes: int
    ready: float
    whole: float
    bound: float | None
    found: float
    mass: float
    late_seconds: float
    running_mass: float
    held: float
    returned: float
    set_share: float
    running: float
    daemon_ready: float | None
    by_tool: dict[str, float]
