"""TOVA (arXiv 2401.06104): a token is worth what the latest query gave it.

s = A of the last observation, averaged over heads (and here over layers); 2 for tokens that no observation has seen

A token that the last observation could not attend, because it was cold, keeps what it had when it last could.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from tierkv.daemon.policy.contract import Policy, Thresholds
from tierkv.daemon.policy.exponential import Exponential, just
from tierkv.daemon.policy.tokens import Floats, Seen, TokenState

UNSEEN = 2.0
"""Above any mass."""


THRESHOLDS = Thresholds(quantize_below=1e-3, offload_below=1e-4, drop_below=0.0, promote_above=1e-2)
"""Shares of one query's attention: the uniform one among 1,000, 10,000 and 100 tokens. `drop_below` 0 means
never."""


@dataclass(frozen=True, kw_only=True)
class Tova(Policy):
    """Column: last mass."""

    name: ClassVar[str] = "tova"
    thresholds: Thresholds = THRESHOLDS

    def insert(self, step: float) -> tuple[float, ...]:
        return (UNSEEN,)

    def observe(self, tokens: TokenState, seen: Seen, step: float) -> None:
        tokens.columns[0][seen.where] = seen.mass

    def scores(self, tokens: TokenState, step: float, span: slice) -> Floats:
        return tokens.columns[0, span].copy()

    @cached_property
    def exponential(self) -> Exponential:
        return just(0)
