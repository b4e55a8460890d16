"""What the study compares: a policy, how it evicts, and whether system pages are pinned."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon import policy
from tierkv.daemon.policy import Policy
from tierkv.regions import Region
from tierkv.study.memdecay.evict import Unit, budget_tokens, choose
from tierkv.study.memdecay.protocol import PAPER, Protocol, run
from tierkv.study.memdecay.traces import Trace

RANDOM_SEEDS = (0, 1, 2)


class Arm(NamedTuple):
    """`name` is the policy's in reports; arms of one name are averaged (the seeds of chance)."""

    name: str
    policy: Policy
    unit: Unit = "tokens"
    pinned: bool = False  # pages with system tokens stay
    protocol: Protocol = PAPER
    page_tokens: int = 16

    @property
    def settings(self) -> str:
        """Everything that decides what stays, as text: results of other settings are not these."""
        return (
            f"{policy.dumps(self.policy)}{self.unit} {self.page_tokens} {self.pinned} {tuple(self.protocol)}"
        )

    def kept(self, trace: Trace, budget: float) -> NDArray[np.bool_]:
        """Which tokens are left, `[tokens]`, of `budget` (a share) of them."""
        scored = run(trace, self.policy, self.protocol)
        pinned = (trace.regions == Region.SYSTEM) & self.pinned
        return choose(
            scored.state,
            scored.step,
            trace,
            self.unit,
            budget_tokens(trace, budget),
            pinned,
            self.page_tokens,
        )


def compared() -> tuple[Arm, ...]:
    """The policies of Tables III and IV and their like, each evicting what its paper evicts.

    MemDecay and the moving average evict pages of 16 tokens that straddle regions, MemDecay with system pages pinned;
    the baselines evict tokens. Lift evicts the daemon's pages, which hold tokens of one region, and pins nothing.
    `-prompts`: the last queries of each prompt are observed as well, as the daemon does and the paper does not.
    """
    prompts = Protocol(prompt_window=8)
    return (
        Arm("full", policy.get("full")),
        *(Arm("random", policy.get("random", seed=seed)) for seed in RANDOM_SEEDS),
        Arm("streaming", policy.get("streaming")),
        Arm("h2o", policy.get("h2o")),
        Arm("tova", policy.get("tova")),
        Arm("snapkv", policy.get("snapkv")),
        Arm("ema", policy.get("ema"), "straddling"),
        Arm("memdecay", policy.get("memdecay"), "straddling", pinned=True),
        Arm("memdecay-lift", policy.get("memdecay-lift"), "aligned"),
        Arm("h2o-prompts", policy.get("h2o"), protocol=prompts),
        Arm("memdecay-lift-prompts", policy.get("memdecay-lift"), "aligned", protocol=prompts),
    )
