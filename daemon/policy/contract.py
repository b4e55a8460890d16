"""What a score policy is: pure functions over per-token arrays (tests: `tests/contract/test_policy.py`).

A policy sees region, session age and step (never a bare "touch"). Larger scores mean "keep". Scores of different
policies do not compare, so each policy names its own default thresholds.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Thresholds(NamedTuple):
    """Scores below which a page may be prepared as low-bit, leave HBM, be dropped; above which it is promoted."""

    quantize_below: float
    offload_below: float
    drop_below: float
    promote_above: float


class TokenState(Protocol):
    """Per-token memory of one session; grows by `append`, shrinks by `truncate`, is copied by a fork."""

    def append(self, regions: NDArray[np.int8], step: float) -> None:
        """Add tokens inserted at decode step `step`."""

    def truncate(self, length: int) -> None: ...

    def copy(self) -> TokenState: ...

    def observe(self, mass: NDArray[np.float32], step: float) -> None:
        """One observation. mass: `[tokens]`, averaged over heads and layers; NaN where a token was not attended."""

    def page_scores(
        self, starts: NDArray[np.int64], counts: NDArray[np.int32], step: float
    ) -> NDArray[np.float32]:
        """Scores `[pages]` at decode step `step` of pages that hold tokens `[starts, starts + counts)`."""

    def __len__(self) -> int: ...


class Policy(Protocol):
    """A ten-line dataclass named after its paper; `new_state` makes the memory of one session."""

    name: ClassVar[str]

    @property
    def thresholds(self) -> Thresholds: ...

    def new_state(self) -> TokenState: ...
