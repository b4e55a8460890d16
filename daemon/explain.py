"""Why a page is where it is: facts of one page, without changing anything.

An explanation is no event: it is not in the brain's log, so it may not leave a trace in the state. Scores and guards
are therefore worked out here anew, by the rules of `scoring.py`, instead of being refreshed.
"""

from __future__ import annotations

import numpy as np

from tierkv.daemon import outlook
from tierkv.daemon.outlook import Facts
from tierkv.daemon.pages import NEVER, REASONS, Goal, Guard, Ladder
from tierkv.daemon.scoring import STALE_SCORE, Floats
from tierkv.daemon.sessions import Session
from tierkv.daemon.snapshot import TIERS, tiers_of
from tierkv.daemon.state import State
from tierkv.errors import RequestError
from tierkv.protocol import Explained, Replica, Threshold
from tierkv.table import NOWHERE, Kind

FORM_NAMES = {Kind.EXACT: "exact", Kind.MIDDLE: "middle", Kind.QUANTIZED: "low-bit"}


def explain(state: State, session_id: int, page: int = -1, token: int = -1) -> Explained:
    """Of row `page` of the session's table, or of the page that holds `token`; the other one is -1.

    Raises:
        UnknownSession: no session of that id is open, whoever's.
        RequestError: there is no such page or token, or not exactly one of them is given.
    """
    session = state.any_session(session_id)
    row = _row(session, page, token)
    pages, slot = state.pages, int(session.pages.view[row])
    family = [state.sessions[number] for number in sorted(session.family)]
    scores = _scores(state, session, family)
    scorer, terms = _scored(state, slot, family)
    guards = _guards(state, slot, family)
    facts = Facts(slot, row, session, TIERS[tiers_of(state, np.array([slot]))[0]], guards, float(scores[row]))
    ago = outlook.moved_ago(state, slot)
    return Explained(
        session=session.id,
        step=session.step,
        clock=session.clock(state.now),
        page=row,
        pages=len(session.pages),
        id=int(pages.id[slot]),
        start=int(session.starts.view[row]),
        tokens=int(session.counts.view[row]),
        region=state.region_label(slot),
        open=not pages.sealed[slot],
        shared_by=int(pages.refs[slot]),
        tier=facts.tier,
        replicas=_replicas(state, slot),
        goal="" if pages.goal[slot] == Goal.NONE else Goal(int(pages.goal[slot])).name.lower(),
        moved_ago=None if ago == -NEVER else ago,
        moved_why=REASONS[pages.moved_why[slot]],
        ladder=Ladder(int(pages.ladder[slot])).name.lower(),
        guards={reason: guard.name.lower() for reason, guard in guards.items()},
        policy=state.policy.name,
        score=facts.score,
        scored_by=scorer.id,
        terms=terms,
        verdict=state.policy.verdict(terms),
        rank=1 + int(np.count_nonzero(scores < scores[row])),
        thresholds={
            name: Threshold(
                value, bool(facts.score >= value if name == "promote_above" else facts.score < value)
            )
            for name, value in _thresholds(state).items()
        },
        mass=float(pages.mass[slot]),
        why=outlook.why(state, facts),
        next=outlook.what_next(state, facts),
    )


def _thresholds(state: State) -> dict[str, float]:
    own = state.thresholds._asdict()
    return {"middle_below": state.middle_below, **own} if state.middle else own


def _row(session: Session, page: int, token: int) -> int:
    if (page < 0) == (token < 0):
        raise RequestError("name either a page or a token, by a number from 0 on")
    if page >= len(session.pages):
        raise RequestError(f"session {session.id} has {len(session.pages)} pages, from 0 on; not page {page}")
    if token >= session.length:
        raise RequestError(f"session {session.id} has {session.length} tokens, from 0 on; not token {token}")
    return page if page >= 0 else session.row_of(token)


def _scores(state: State, session: Session, family: list[Session]) -> Floats:
    """`[pages of the session]`: of a shared page the highest score that a session of the family gives it."""
    best = np.full(state.pages.top, -np.inf, np.float32)
    for member in family:
        slots = member.pages.view
        own = member.tokens.page_scores(
            member.starts.view, member.counts.view.astype(np.int32), member.clock(state.now)
        )
        best[slots] = np.maximum(best[slots], own)
    slots = session.pages.view
    scores: Floats = np.where(state.pages.stale[slots], np.minimum(best[slots], STALE_SCORE), best[slots])
    return scores


def _scored(state: State, slot: int, family: list[Session]) -> tuple[Session, dict[str, float]]:
    """The session whose score of the page counts, and what that score is made of."""
    told = []
    for member, row in _naming(slot, family):
        start, count = int(member.starts.view[row]), int(member.counts.view[row])
        told.append((member, member.tokens.explain(start, count, member.clock(state.now))))
    scorer, terms = max(told, key=lambda pair: pair[1]["score"])
    del terms["score"]
    return scorer, terms


def _guards(state: State, slot: int, family: list[Session]) -> dict[str, Guard]:
    """What holds the page, as `scoring_kernels.settle` decides it; the strictest counts."""
    config, found = state.config, dict[str, Guard]()
    if state.pages.pin[slot]:
        found["pin"] = Guard(int(state.pages.pin[slot]))
    if state.pages.retained_until[slot] > state.now:
        found["retained"] = Guard.ATTENDABLE
    for member, row in _naming(slot, family):
        starts = member.starts.view
        stop = int(starts[row + 1]) if row + 1 < len(starts) else member.length
        if state.clients[member.client].quarantined:
            found["stopped"] = Guard.EXACT
        elif member.ladder is not Ladder.TIERED or member.id in state.absent:
            continue
        elif starts[row] < config.sink_tokens:
            found["sink"] = Guard.EXACT
        elif stop > member.length - config.recent_tokens:
            found["recent"] = Guard.RECENT
    return found


def _naming(slot: int, family: list[Session]) -> list[tuple[Session, int]]:
    """Sessions that name the page, and its row in each."""
    rows = [(member, np.flatnonzero(member.pages.view == slot)) for member in family]
    return [(member, int(found[0])) for member, found in rows if len(found)]


def _replicas(state: State, slot: int) -> list[Replica]:
    pages, model = state.pages, state.model_of(slot)
    found = []
    for form in model.forms:
        if pages.replica(form)[slot] != NOWHERE:
            found.append(Replica(FORM_NAMES[form], "hbm", model.form(form).item))
    if pages.digest[slot] != NOWHERE:
        found.append(Replica("digest", "hbm", model.digest.item))
    if pages.host[slot] != NOWHERE:
        host_form = FORM_NAMES[Kind(int(pages.host_kind[slot]))]
        found.append(Replica(host_form, "host", state.host_class(slot).item))
    return found
