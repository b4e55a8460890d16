"""StreamingLLM (arXiv 2309.17453): the first tokens are attention sinks and stay; of the rest the latest stay.

s = 2 for the first 4 tokens, else 1 / (1 + tokens that came after it)

The reciprocal keeps the order of positions and lets sessions of different lengths compare (exact to 16 million).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tierkv.daemon.policy.contract import Count, Policy, Thresholds
from tierkv.daemon.policy.tokens import Floats, TokenState

SINK_SCORE = 2.0


THRESHOLDS = Thresholds(quantize_below=1 / 256, offload_below=1 / 4096, drop_below=0.0, promote_above=1 / 128)
"""1 over a distance from the end, in tokens: pages more than 256 tokens back may be low-bit, more than 4,096 back
may leave. `drop_below` 0 means never."""


@dataclass(frozen=True, kw_only=True)
class Streaming(Policy):
    """Needs no memory."""

    name: ClassVar[str] = "streaming"
    sink_tokens: Count = 4
    thresholds: Thresholds = THRESHOLDS

    def scores(self, tokens: TokenState, step: float, span: slice) -> Floats:
        position = np.arange(span.start, span.stop)
        scores = (1.0 / (len(tokens) - position)).astype(np.float32)
        scores[position < self.sink_tokens] = SINK_SCORE
        return scores
