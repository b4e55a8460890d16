"""What the best holder could reach that knows what callers tell and moves pages in no time."""

from __future__ import annotations

import math
from statistics import NormalDist

from tierkv.benchmarks.pauses.agents import HINT_SPREAD, TOOLS, Turn

_NORMAL = NormalDist()
EXPECTED = {tool.name: (tool.median, tool.spread) for tool in TOOLS}


def chance(arm: str, turn: Turn, elapsed: float) -> float:
    """Resumes a second that are to be expected of a session paused for `elapsed` (the hazard of what was told)."""
    median, spread = (turn.hint, HINT_SPREAD) if arm == "wrong" else EXPECTED[turn.tool]
    place = math.log(max(elapsed, 1e-3) / median) / spread
    left = 1 - _NORMAL.cdf(place)
    if left < 1e-12:
        return place / (spread * elapsed)
    return _NORMAL.pdf(place) / (spread * elapsed * left)


def ready(
    arm: str, pauses: list[tuple[float, Turn]], resumes: list[float], room: float, running: float
) -> float:
    """Share of `resumes` (times) whose session is among those with the best chances, as many as find room.

    Args:
        pauses: when each began, and the turn that ended with it; each resumes after `turn.pause`.
        room: working sets that HBM holds, those of sessions that run included.
        running: sessions that run on average.
    """
    held = max(0, int(room - running))
    found = 0
    for at in resumes:
        paused = [(start, turn) for start, turn in pauses if start < at <= start + turn.pause + 1e-6]
        chances = sorted((chance(arm, turn, at - start) for start, turn in paused), reverse=True)
        own = next(chance(arm, t, at - s) for s, t in paused if abs(s + t.pause - at) < 1e-6)
        found += len(chances) <= held or own >= chances[held - 1]
    return found / max(1, len(resumes))
