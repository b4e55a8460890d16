"""Pins: pages that stay exact, or at least attendable. Soft: bounded by a quota of the pool, or of the budget."""

from __future__ import annotations

import numpy as np

from tierkv.daemon.pages import Guard
from tierkv.daemon.sessions import Session
from tierkv.daemon.state import State

PIN_LEVELS = {"none": Guard.NONE, "attendable": Guard.ATTENDABLE, "exact": Guard.EXACT}


class Pins:
    def __init__(self, state: State) -> None:
        self._state = state

    def pin(self, slot: int, level: Guard, session: Session) -> bool:
        """Pins are soft: past the quota a page is not pinned (counted), so pinned sessions cannot fill the pool."""
        pages, model = self._state.pages, session.model
        if level > pages.pin[slot]:
            size = {Guard.ATTENDABLE: model.quant.item, Guard.EXACT: model.exact.item}[level]
            room = session.options.hbm_budget or self._state.config.hbm_bytes
            if self.bytes_of(session) + size > self._state.config.pin_quota * room:
                self._state.counters.pins_refused += 1
                return False
        pages.pin[slot] = level
        return True

    def bytes_of(self, session: Session) -> int:
        """HBM that pins may hold, of the session if it has a budget of its own, else of all."""
        pages, model = self._state.pages, session.model
        among = session.pages.view if session.options.hbm_budget else pages.slots()
        attendable = int(np.count_nonzero(pages.pin[among] == Guard.ATTENDABLE))
        exact = int(np.count_nonzero(pages.pin[among] == Guard.EXACT))
        return attendable * model.quant.item + exact * model.exact.item
