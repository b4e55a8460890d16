"""Codes of the codecs (`Codec.code`), as constants that kernels dispatch on. A number is never given to another format.

The exact codec's format depends on the page dtype: kernels know it as `EXACT` plus the dtype's `floats.KIND` (0, 1, 2).
"""

from __future__ import annotations

from typing import Final

K3V2: Final = 1
KIVI2: Final = 2
ROTATED2: Final = 3
INT8: Final = 4
NF4: Final = 5
KLT2: Final = 6
KLT25: Final = 7
EXACT: Final = 16
