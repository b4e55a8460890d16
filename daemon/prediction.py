"""Pauses that nobody announces: a session that is silent is taken for paused, for as long as it usually is.

Training-free: the silences of a session, and those of all, are learned as log-normal distributions of what ended.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from tierkv.daemon.durations import Duration, Running, within

SILENT_SECONDS = 3.0
"""Without a step for so long, a session is paused: less is not worth moving pages for."""

USUAL = Duration(10.0, 1.0)
"""Before any silence has ended."""

LEAST_KNOWN = 4
"""Silences of a session without which those of all are asked."""

MOST_SESSIONS = 1024
"""That are remembered; the one not seen for longest is forgotten."""


class Silences:
    def __init__(self) -> None:
        self._all = Running(math.log(USUAL.median), USUAL.spread)
        self._sessions: OrderedDict[int, Running] = OrderedDict()

    def expect(self, session: int) -> Duration:
        """How long a silence of the session lasts, from its last step on."""
        own = self._sessions.get(session)
        known = self._all if own is None or own.count < LEAST_KNOWN else own
        return Duration(within(math.exp(known.mean)), known.spread)

    def saw(self, session: int, seconds: float) -> None:
        """A silence has ended."""
        value = math.log(within(seconds))
        self._all.add(value)
        if session not in self._sessions:
            self._sessions[session] = Running(self._all.mean, self._all.spread)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(session)
        self._sessions[session].add(value)
