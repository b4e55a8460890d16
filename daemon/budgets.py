"""Sessions' own budgets of HBM: what is left of them, and what is on its way to be given back."""

from __future__ import annotations

import numpy as np

from tierkv.daemon.pages import Goal, Guard, Ladder
from tierkv.daemon.scoring import Slots
from tierkv.daemon.sessions import Session
from tierkv.daemon.state import State
from tierkv.table import Kind

DOWN = {Goal.MIDDLE: Kind.MIDDLE, Goal.QUANTIZED: Kind.QUANTIZED}
"""Goals of pages that stay in HBM in another form, and that form."""

TRANSIT_PAGES, TRANSIT_SHARE = 8, 64
"""Pages of a session that its own budget lets become low-bit at once: those of one part in so many, 8 at most."""


class Budgets:
    def __init__(self, state: State) -> None:
        self._state = state

    def room(self, session: Session) -> int:
        """Bytes that the session may still reserve under its own budget (a large number without one)."""
        budget = session.options.hbm_budget
        if not budget:
            return 1 << 62
        model = session.model
        # For pages in transit, whose packed replica lies beside the exact one for a while.
        packed = (model.middle or model.quant).item
        transit = max(1, min(TRANSIT_PAGES, budget // (TRANSIT_SHARE * packed)))
        spare = transit * packed + model.digest.item if session.ladder is Ladder.TIERED else 0
        return budget - spare - self._state.hbm_bytes_of(session)

    def may_encode(self, slot: int, form: Kind = Kind.QUANTIZED) -> bool:
        """Whether a session's budget leaves room for a packed replica beside the one that it will replace."""
        session = self._state.sessions[int(self._state.pages.owner[slot])]
        budget = session.options.hbm_budget
        return not budget or budget - self._state.hbm_bytes_of(session) >= session.model.form(form).item

    def lacking(self, session: Session, wanted: int) -> int:
        """Bytes the session must give back to reserve `wanted` more, beyond what is already on its way."""
        slots, pages, model = session.pages.view, self._state.pages, session.model
        coming = session.retiring_bytes
        for form in model.forms:
            own = slots[pages.kind[slots] == form]
            coming += int((pages.goal[own] == Goal.HOST).sum()) * model.form(form).item
            for goal, lower in DOWN.items():
                going = own[pages.goal[own] == goal]
                if lower in model.forms and lower is not form:
                    coming += len(going) * (model.form(form).item - model.form(lower).item)
                    coming += int(pages.coming[going].sum())
        return wanted - self.room(session) - coming

    def coming_down(self, session: Session) -> bool:
        """Pages of the session are on their way to less room, or memory that they left retires."""
        goals = self._state.pages.goal[session.pages.view]
        down = (goals == Goal.QUANTIZED) | (goals == Goal.MIDDLE) | (goals == Goal.HOST)
        return session.retiring_bytes > 0 or bool(np.any(down))

    def may_pack(self, among: Slots, guard: Guard) -> bool:
        """Some exact page may become low-bit, or is about to."""
        pages = self._state.pages
        exact = among[(pages.kind[among] == Kind.EXACT) & (pages.ladder[among] == Ladder.TIERED)]
        return bool(np.any(pages.sealed[exact] & (pages.guard[exact] <= guard) & ~pages.refused[exact]))
