"""The least-square-error quantizers of a unit Gaussian (Max 1960, Lloyd 1982), and the 8-bit gains that scale them.

Levels are symmetric; a code is a magnitude index and a sign. Each boundary is the midpoint of its two levels, each
level the mean of the Gaussian between its boundaries. The distortion (mean squared error at unit variance) is what a
codec may lose on Gaussian data.
"""

from __future__ import annotations

from typing import Final

import numpy as np

LEVELS_8: Final = np.array([0.24509418, 0.75600528, 1.34390928, 2.15194570], np.float32)
BOUNDARIES_8: Final = np.array([0.50054973, 1.04995728, 1.74792749], np.float32)
DISTORTION_8: Final = 0.034548

LEVELS_4: Final = np.array([0.45278003, 1.51041761], np.float32)
BOUNDARIES_4: Final = np.array([0.98159882], np.float32)
DISTORTION_4: Final = 0.117482

NO_GAIN: Final = 255
"""The gain code of a token that decodes to zero."""

GAIN_STEPS: Final = 16
"""Gain codes an octave: a stored gain is off by at most 2.2%, which costs 0.016% of the energy on average."""

GAINS: Final = np.append(2.0 ** (-np.arange(NO_GAIN) / GAIN_STEPS), 0.0).astype(np.float32)
"""`GAINS[c]` is the gain of code `c` as a fraction of its block's largest."""

GAIN_FLOORS: Final = (2.0 ** (-(np.arange(NO_GAIN) + 0.5) / GAIN_STEPS)).astype(np.float32)
"""A fraction `r` has the code that is the number of floors above it (nearest in the logarithm)."""
