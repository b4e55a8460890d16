"""H2O (arXiv 2306.14048): heavy hitters are the tokens with the most accumulated attention.

s = sum of A over observations

The paper gives half of its budget to the most recent tokens. That is the caller's part: the study keeps a recent
window of its own, and the daemon has `recent_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from tierkv.daemon.policy.contract import Policy, Thresholds
from tierkv.daemon.policy.exponential import Exponential, just
from tierkv.daemon.policy.tokens import Floats, Seen, TokenState

THRESHOLDS = Thresholds(quantize_below=0.1, offload_below=0.01, drop_below=0.0, promote_above=1.0)
"""In units of one observation's whole mass. A token of 1,000 that gets the uniform share passes .01 after 10
observations and .1 after 100. `drop_below` 0 means never."""


@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Column: accumulated mass."""

    name: ClassVar[str] = "h2o"
    thresholds: Thresholds = THRESHOLDS

    def insert(self, step: float) -> tuple[float, ...]:
        return (0.0,)

    def observe(self, tokens: TokenState, seen: Seen, step: float) -> None:
        tokens.columns[0][seen.where] += seen.mass

    def scores(self, tokens: TokenState, step: float, span: slice) -> Floats:
        return tokens.columns[0, span].copy()

    @cached_property
    def exponential(self) -> Exponential:
        return just(0)
