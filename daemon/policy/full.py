"""No eviction: every page is worth the same, so nothing is demoted before room is wanted.

s = 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tierkv.daemon.policy.contract import Policy, Thresholds
from tierkv.daemon.policy.tokens import Floats, TokenState

THRESHOLDS = Thresholds(quantize_below=0.0, offload_below=0.0, drop_below=0.0, promote_above=1.0)
"""Below none of the first three ever, and above the last always: what pressure took comes back as room allows."""


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Needs no memory."""

    name: ClassVar[str] = "full"
    thresholds: Thresholds = THRESHOLDS

    def scores(self, tokens: TokenState, step: float, span: slice) -> Floats:
        return np.ones(span.stop - span.start, np.float32)
