"""The order in which pages come back: what a step waits for first, then by what each byte moved is expected to bring.

One rule for every promotion of a cold page, whoever asked for it: `Recall` ranks what steps wait for, over all
sessions at once, `Promotion` what estimates and scores name. The queue is ranked anew whenever it is gone through, so a
page that is not wanted any more (its mass has decayed, its session is closed, another request has taken the place of
its own) is not in it. What has begun is finished: it is two batches of bytes at most (`moves.BATCHES`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.state import State
from tierkv.table import Kind

NOBODY_WAITS = np.inf
"""Deadline of a page that no step waits for."""


def ranked(
    mass: NDArray[np.float32], size: NDArray[np.int64], deadline: NDArray[np.float64], now: float
) -> NDArray[np.intp]:
    """Places of the wants, first the one to begin with. Equal ones keep their order.

    Before anything else come pages that a step still waits for; a deadline that is over is none. Among either, the
    most mass for a byte comes first, and of equals what is due sooner.

    Args:
        mass: `[wants]` share of attention that the page is expected to get.
        size: `[wants]` bytes that are read to bring it back.
        deadline: `[wants]` seconds; `NOBODY_WAITS` where no step does.
    """
    due = np.where(deadline >= now, deadline, NOBODY_WAITS)
    return np.lexsort((due, -(mass / size), due == NOBODY_WAITS))


def sizes(state: State, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes of the host replicas of cold pages: what is read of each to bring it back."""
    pages = state.pages
    found = np.ones(len(slots), np.int64)
    for model in np.unique(pages.model[slots]).tolist():
        for form in (Kind.EXACT, Kind.MIDDLE, Kind.QUANTIZED):
            of = (pages.model[slots] == model) & (pages.host_kind[slots] == form)
            if of.any():
                found[of] = state.page_bytes(state.models_by_index[model], form)
    return found
