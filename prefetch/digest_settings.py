"""What may be set of digests. Imports nothing, so that settings can be read without kernels."""

from __future__ import annotations

from typing import Literal

DigestSetting = Literal["auto", "transform", "deviation"]
"""`auto`: transform where a model's calibration is at hand, else deviation."""

LEAST_BYTES, MOST_BYTES = 4, 256
"""Of a transform's record."""

DEFAULT_BYTES = 32
"""Of it, where nothing else is set; whose opinion counts is learned for records of this length."""
