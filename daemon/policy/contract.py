"""What a score policy is: a formula over per-token columns (tests: `tests/contract/test_policy.py`).

A policy is a frozen dataclass named after its paper. It says which columns of memory a token has (`insert`), what an
observation does to them (`observe`) and what the token is worth now (`scores`); `TokenState` (tokens.py) keeps the
columns of one session. A policy sees region, position, decode step and attention (never a bare "touch").

Scores are finite float32 and larger means "keep". Scores of different policies do not compare, so each policy names
default thresholds on its own scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec

from tierkv.daemon.policy.exponential import Exponential
from tierkv.daemon.policy.tokens import Floats, Seen, TokenState

Aggregate = Literal["mean", "max", "top2", "relief"]
"""A page's score from its tokens': their mean, the largest, the mean of the two largest; or their mean, of which the
least of their importance is taken off (`Policy.importance`).
"""

NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
HalfLife = Annotated[float, msgspec.Meta(ge=1e-3)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Window = Annotated[int, msgspec.Meta(ge=1, le=4096)]
"""Settings, checked where they come from outside (`get`, `load`); within these bounds scores are finite, and a token's
memory is kilobytes at most.
"""


class Thresholds(NamedTuple):
    """Scores below which a page may be prepared as low-bit, leave HBM, be dropped; above which it is promoted."""

    quantize_below: float
    offload_below: float
    drop_below: float
    promote_above: float


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Base of all policies; the subclass is the formula."""

    name: ClassVar[str]
    aggregate: Aggregate = "mean"
    thresholds: Thresholds

    def new_state(self) -> TokenState:
        """The memory of one session."""
        return TokenState(self)

    def insert(self, step: float) -> tuple[float, ...]:
        """Columns of a token inserted at decode step `step`; how many there are is the policy's memory a token."""
        return ()

    def observe(self, tokens: TokenState, seen: Seen, step: float) -> None:
        """Take in one observation: write into `tokens.columns`."""
        return

    @abstractmethod
    def scores(self, tokens: TokenState, step: float, span: slice) -> Floats:
        """Scores of the tokens `span` (start and stop given, no stride) at decode step `step`."""

    def importance(self, tokens: TokenState, step: float, span: slice) -> Floats:
        """The part of each score that attention gave: all of it, unless a policy knows better."""
        return self.scores(tokens, step, span)

    @property
    def exponential(self) -> Exponential | None:
        """The same score as constants of one form, if it has that form: scored for thousands of sessions at once."""
        return None

    def terms(self, tokens: TokenState, step: float, span: slice) -> dict[str, float]:
        """What the score of a page of the tokens `span` is made of: means over them, unless said otherwise."""
        return {}

    def verdict(self, terms: dict[str, float]) -> str:
        """What the method's own rule would do with a page of these `terms`, in words; empty where it has none."""
        return ""
