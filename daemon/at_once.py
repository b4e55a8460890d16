"""Operations that are no event: answered by looking at the brain, for anyone who may open the socket."""

from __future__ import annotations

from tierkv.daemon.loop_contract import BrainLike
from tierkv.protocol import (
    Done,
    Drain,
    Explain,
    Operation,
    Ping,
    Result,
    Sessions,
    SessionsResult,
    Stats,
    StatsResult,
)

AT_ONCE = (Ping, Stats, Sessions, Explain, Drain)
"""`Drain` is an event, too; it has no answer of the brain's."""


def answer(brain: BrainLike, op: Operation) -> Result:
    """Asking twice does no harm, so these answers are not remembered. Raises `TierKVError`."""
    match op:
        case Stats(session):
            return StatsResult(brain.snapshot().flat() if session < 0 else brain.session_stats(session))
        case Sessions():
            return SessionsResult(brain.sessions())
        case Explain(session, page, token):
            return brain.explain(session, page, token)
    return Done()
