"""The levels of klt2's codes, 1 to 5 bits, for a channel of unit variance.

A code is a sign and a magnitude index. Up to 3 bits the levels are Lloyd's and Max's for a Gaussian (`lloyd.py`). The
channels that get 4 or 5 bits are the largest of their head and have lighter tails than a Gaussian: theirs are the
best equally spaced ones (Max 1960, table II), `(index + 1/2) * step`. A distortion is the mean squared error on a
unit Gaussian.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tierkv.quant.lloyd import (
    BOUNDARIES_4,
    BOUNDARIES_8,
    DISTORTION_4,
    DISTORTION_8,
    LEVELS_4,
    LEVELS_8,
)

LEVELS_2: Final = np.array([0.79788456], np.float32)  # sqrt(2 / pi)

STEP_4_BITS: Final = np.float32(0.3352)
STEP_5_BITS: Final = np.float32(0.1881)

DISTORTIONS: Final = (1.0, 0.363380, DISTORTION_4, DISTORTION_8, 0.011543, 0.003490)
"""By bits, 0 to 5."""

_NONE: Final = np.zeros(0, np.float32)


def _equal(step: np.float32, count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return (np.arange(count, dtype=np.float32) + np.float32(0.5)) * step


LEVELS: Final = (
    np.zeros(1, np.float32), LEVELS_2, LEVELS_4, LEVELS_8, _equal(STEP_4_BITS, 8), _equal(STEP_5_BITS, 16),
)  # fmt: skip
"""Magnitudes by bits, ascending."""

BOUNDARIES: Final = (_NONE, _NONE, BOUNDARIES_4, BOUNDARIES_8)
"""Between the levels, for up to 3 bits."""

STEPS: Final = {4: STEP_4_BITS, 5: STEP_5_BITS}
