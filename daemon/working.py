"""Working sets: the fewest pages of a session that most of its attention was on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WORKING_MASS = 0.9
"""Share of attention that a working set holds: what a resume must find to be ready."""

RETURN_MASS = 0.92
"""Share that what comes back before a resume holds: observations vary, and which pages are the last ones with them."""


def most_attended(mass: NDArray[np.float32], share: float) -> NDArray[np.intp]:
    """Places of the fewest pages that hold `share` of all mass, those with most first; none of no mass."""
    order = np.argsort(-mass, kind="stable")
    held = np.cumsum(mass[order], dtype=np.float64)
    if not len(held) or held[-1] <= 0:
        return order[:0]
    return order[: int(np.searchsorted(held, share * held[-1] * (1 - 1e-9))) + 1]
