"""Whether packed pages may take a free frame of HBM to divide, or must leave it to those that need it more."""

from __future__ import annotations

import numpy as np

from tierkv.daemon.pages import Guard, Ladder
from tierkv.daemon.sessions import Model
from tierkv.daemon.state import State
from tierkv.table import Kind


def may_take_frame(state: State, model: Model, form: Kind) -> bool:
    """Always where the form has a free slot: then no frame is taken. Exact pages ask elsewhere (`Frames`)."""
    if form is Kind.EXACT or state.hbm.free_items(model.form(form)):
        return True
    return _middle_may(state, model) if form is Kind.MIDDLE else _low_bit_may(state, model)


def _low_bit_may(state: State, model: Model) -> bool:
    """Not the last one, if digests want it and too few exact pages are left that would soon give up theirs."""
    pages, kept = state.pages, state.kept_for_digests(model)
    if not kept or state.hbm.free_frames(model.exact.frame) > kept:
        return True
    giving = pages.live & pages.sealed & (pages.model == model.index) & (pages.kind == Kind.EXACT)
    giving &= (pages.ladder == Ladder.TIERED) & (pages.guard <= Guard.ATTENDABLE) & ~pages.refused
    return int(np.count_nonzero(giving)) > kept + 1


def _middle_may(state: State, model: Model) -> bool:
    """Not those that low-bit pages and digests wait for."""
    kept = state.kept_for_low_bit(model) + state.kept_for_digests(model)
    return state.hbm.free_frames(model.exact.frame) > kept
