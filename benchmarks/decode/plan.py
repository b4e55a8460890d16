"""Which arms are measured at which contexts and batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tierkv.benchmarks.decode import ARMS, DYNAMIC, MORE
from tierkv.errors import ConfigError
from tierkv.geometry import DTypeName

CONTEXTS, QUICK_CONTEXTS = (512, 1024, 2048, 4096, 8192), (128, 256)
BATCHES, QUICK_BATCHES = (1, 4), (1,)
STEPS, QUICK_STEPS = 64, 8
WARM_UP = 4
MOST_STEPS = 120
"""transformers' quantized caches pack everything anew once 128 tokens have followed: a step of minutes, left out."""

PREFILLS, QUICK_PREFILLS = 3, 1
PREFILL_CONTEXT = 4096
"""The prompt that is read through pages, if so long a context is measured; else the longest one."""

ARM_SECONDS, QUICK_ARM_SECONDS = 40.0, 5.0
"""An arm takes part until its steps at a context and batch have taken so long, and for 3 steps at least."""


class Point(NamedTuple):
    context: int
    batch: int
    arms: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.context} tokens x {self.batch}"


class Plan(NamedTuple):
    points: tuple[Point, ...]
    steps: int
    arm_seconds: float
    prefill: int | None
    """Tokens of the prompt that is read through pages."""
    prefills: int
    pages: DTypeName = "bfloat16"
    codec: str = "k3v2"

    @property
    def longest(self) -> int:
        return max(point.context for point in self.points)

    @property
    def conditions(self) -> str:
        """What measurements must share to stand in one run."""
        return f"{self.steps} steps, {self.pages}, {self.codec}"


def plan(
    contexts: Sequence[int] = (), batches: Sequence[int] = (), arms: Sequence[str] = (), steps: int | None = None,
    quick: bool = False, pages: DTypeName = "bfloat16", codec: str = "k3v2",
    prefills: int | None = None,
) -> Plan:  # fmt: skip
    """What is not named is the default's. `dynamic` always runs.

    Raises:
        ConfigError: no such arm, or steps that would make a quantized cache pack anew.
    """
    from tierkv import quant

    if unknown := [arm for arm in arms if arm not in (*ARMS, *MORE)]:
        raise ConfigError(f"there is no arm {unknown[0]!r}; there are {', '.join((*ARMS, *MORE))}")
    if codec not in quant.NAMES:
        raise ConfigError(f"there is no codec {codec!r}; there are {', '.join(quant.NAMES)}")
    if pages not in ("bfloat16", "float32"):
        raise ConfigError(f"pages of {pages} are not measured; choose bfloat16 or float32")
    steps = steps or (QUICK_STEPS if quick else STEPS)
    if WARM_UP + steps > MOST_STEPS:
        raise ConfigError(f"at most {MOST_STEPS - WARM_UP} steps, not {steps}: see MOST_STEPS")
    chosen = tuple(sorted(set(contexts or (QUICK_CONTEXTS if quick else CONTEXTS))))
    points = [
        Point(context, batch, _arms(arms, batch))
        for context in chosen
        for batch in sorted(set(batches or (QUICK_BATCHES if quick else BATCHES)))
    ]
    times = (QUICK_PREFILLS if quick else PREFILLS) if prefills is None else prefills
    paged = times > 0 and (not arms or any(arm.startswith("tierkv") for arm in arms))
    return Plan(
        tuple(points), steps, QUICK_ARM_SECONDS if quick else ARM_SECONDS,
        min(PREFILL_CONTEXT, chosen[-1]) if paged else None,
        times, pages, codec,
    )  # fmt: skip


def _arms(named: Sequence[str], batch: int) -> tuple[str, ...]:
    known = (*ARMS, *MORE) if batch == 1 else ARMS
    return tuple(arm for arm in known if not named or arm in named or arm == DYNAMIC)
