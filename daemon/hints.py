"""What hints change: who is paused and until when, what is out of date, kept, wanted and depended upon.

A *pause* lets a session's pages give way before those of sessions that run, farthest expected resume first (after
Belady), and `Returns` brings back what it had before it resumes. A session that does anything has resumed. Hints say
nothing that only a dying owner knows: a new one starts without them.
"""

from __future__ import annotations

import numpy as np

from tierkv.daemon.absence import Absence
from tierkv.daemon.durations import Duration, Durations
from tierkv.daemon.events import Hinted
from tierkv.daemon.pages import Guard
from tierkv.daemon.pins import Pins
from tierkv.daemon.prediction import SILENT_SECONDS, Silences
from tierkv.daemon.returns import Returns
from tierkv.daemon.scoring import Slots
from tierkv.daemon.sessions import Session
from tierkv.daemon.state import State
from tierkv.daemon.working import RETURN_MASS, WORKING_MASS, most_attended
from tierkv.errors import OutOfCapacity, RequestError
from tierkv.hint_messages import AgentHint, DependsOn, Pause, Prefetch, Resume, Retain, Supersede
from tierkv.table import Kind

UNLIKELY = "unlikely"
"""A `reuse_hint`: the session is not expected back."""


class Hints:
    def __init__(self, state: State, pins: Pins, returns: Returns) -> None:
        self._state = state
        self._pins = pins
        self._returns = returns
        self.durations = Durations()
        self.silences = Silences()

    def tick(self) -> None:
        """Time passed: silent sessions are taken for paused, where that is predicted, and some are about to resume."""
        state = self._state
        if state.config.predict:
            for session in state.sessions.values():
                if session.id not in state.absent and state.now - session.active_at > SILENT_SECONDS:
                    self._leave(session, "", -1.0, "predicted", self.silences.expect(session.id), np.inf)
        self._returns.tick()

    def take(self, event: Hinted) -> None:
        """Raises `RequestError` for tokens that the session does not have, `OutOfCapacity` past the quota of pins;
        nothing has changed then.
        """
        session = self._state.session(event.session, event.client)
        self._check(session, event)
        if event.agent is not None:
            self._enter(session, event.agent)
        match event.hint:
            case Pause(seconds, tool):
                self._pause(session, seconds, tool, event.agent)
            case Resume():
                self.stepped(session)
            case Prefetch(start, stop, region):
                slots = self._slots(session, start, stop)
                chosen = slots if region < 0 else slots[self._state.pages.region[slots] == region]
                self._returns.want(session, chosen)
            case Retain(seconds):
                self._retain(session, seconds)
            case Supersede(start, stop):
                self._supersede(session, start, stop)
            case DependsOn(start, stop):
                session.links.add((start, stop))
                self._link(session)
            case None:
                if event.agent is not None and event.agent.expected_tool_duration_ms > 0:
                    self._pause(session, -1.0, "", event.agent)

    def _check(self, session: Session, event: Hinted) -> None:
        match event.hint:
            case Prefetch(start, stop) | Supersede(start, stop) | DependsOn(start, stop):
                if not 0 <= start < stop <= session.length:
                    raise RequestError(
                        f"tokens [{start}, {stop}) of {session.length} are not there: "
                        "a hint names committed tokens, at least one"
                    )

    def _slots(self, session: Session, start: int, stop: int) -> Slots:
        """Pages that hold any of the tokens."""
        rows = slice(session.row_of(start), session.row_of(stop - 1) + 1)
        return session.pages.view[rows].copy()

    # Pauses --------------------------------------------------------------------------------------------------

    def _pause(self, session: Session, seconds: float, tool: str, agent: AgentHint | None) -> None:
        state, until = self._state, np.inf
        if agent is not None:
            if seconds < 0 and agent.expected_tool_duration_ms > 0:
                seconds = agent.expected_tool_duration_ms / 1000
            if agent.ttl > 0:
                until = state.now + agent.ttl
            if agent.reuse_hint == UNLIKELY:
                until = state.now
        known = "hinted" if seconds >= 0 else "learned" if self.durations.knows(tool) else "unknown"
        self._leave(session, tool, seconds, known, self.durations.expect(tool, seconds), until)

    def _leave(
        self, session: Session, tool: str, seconds: float, known: str, duration: Duration, until: float
    ) -> None:
        """The session is paused from now on, or, where only its silence tells so, since its last step."""
        state = self._state
        before = state.absent.get(session.id)
        if before is not None:  # told anew: what it had when it stopped is what it needs
            slots, working = before.pages, before.working
        else:
            slots, working = self._working(session)
        since = session.active_at if known == "predicted" else state.now
        absence = Absence(since, tool, seconds, known, duration, slots, working, until)
        state.absent[session.id] = absence
        absence.look(state.now)
        session.stale = True
        state.mark_absence(session)

    def _working(self, session: Session) -> tuple[Slots, int]:
        """Pages that come back before the session resumes, and how many of them are its working set. Of a session that
        was never observed, what is attendable.
        """
        pages = self._state.pages
        slots = session.pages.view[~self._state.is_lost(session.pages.view)]
        found = slots[most_attended(pages.mass[slots], RETURN_MASS)]
        if len(found):
            return found, len(most_attended(pages.mass[slots], WORKING_MASS))
        there = slots[pages.kind[slots] != Kind.NONE]
        return there[np.argsort(-pages.score[there], kind="stable")], len(there)

    def stepped(self, session: Session) -> None:
        """The session runs (again)."""
        state, pages = self._state, self._state.pages
        absence = state.absent.pop(session.id, None)
        if absence is None:
            return
        if absence.known == "predicted":
            self.silences.saw(session.id, state.now - absence.since)
        else:
            self.durations.saw(absence.tool, absence.hinted, state.now - absence.since)
        late = bool(np.any(pages.kind[absence.pages[: absence.working]] == Kind.NONE))
        session.resumes["late" if late else "ready"] += 1
        state.counters.resumes["late" if late else "ready", absence.known] += 1
        session.stale, session.active_at = True, state.now
        state.mark_absence(session)
        self._returns.resumed(session, absence.pages)
        self._link(session)

    # Steps ---------------------------------------------------------------------------------------------------

    def _enter(self, session: Session, agent: AgentHint) -> None:
        if not agent.step_id:
            return
        session.links.enter((agent.workflow_id, agent.step_id), session.length)
        written = session.links.written_by((agent.workflow_id, agent.parent_step_id))
        if agent.parent_step_id and written is not None:
            session.links.add(written)
        self._link(session)

    def _link(self, session: Session) -> None:
        """Pages that the present step depends on give way last, and come back."""
        linked = self._state.pages.linked
        linked[session.pages.view] = False
        wanted = [self._slots(session, start, stop) for start, stop in session.links.wanted]
        if wanted:
            slots = np.concatenate(wanted)
            linked[slots] = True
            self._returns.want(session, slots)

    def cropped(self, session: Session) -> None:
        """Tokens were forgotten."""
        session.links.cut(session.length)
        self._link(session)

    # Worth ---------------------------------------------------------------------------------------------------

    def _retain(self, session: Session, seconds: float) -> None:
        state, pages, slots = self._state, self._state.pages, session.pages.view
        now, most = state.now, state.config.retain_most
        if seconds > 0:
            size, room = session.model.quant.item, session.options.hbm_budget or state.config.hbm_bytes
            among = slots if session.options.hbm_budget else pages.slots()
            held = among[(pages.retained_until[among] > now) & (pages.pin[among] == Guard.NONE)]
            fresh = np.setdiff1d(slots[pages.pin[slots] == Guard.NONE], held)
            wanted = self._pins.bytes_of(session) + (len(held) + len(fresh)) * size
            if wanted > state.config.pin_quota * room:
                raise OutOfCapacity(
                    f"retaining {len(slots)} pages would hold {wanted:,} of {room:,} bytes of HBM, more than "
                    f"{state.config.pin_quota:.0%}: retain fewer sessions, lift pins, or raise pin_quota"
                )
        pages.retained_until[slots] = now + min(seconds, most)
        session.stale = True

    def _supersede(self, session: Session, start: int, stop: int) -> None:
        """Pages that hold other tokens, too, or that another session reads, keep their worth."""
        pages, slots = self._state.pages, session.pages.view
        starts = session.starts.view
        inside = (starts >= start) & (starts + session.counts.view <= stop)
        chosen = slots[inside & pages.sealed[slots] & (pages.refs[slots] == 1)]
        pages.stale[chosen] = True
        session.stale = True
