"""One run: every shape, all arms of it in turn."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from tierkv.benchmarks.attention import SDPA
from tierkv.benchmarks.attention.sides import MODELS, NAMES, Shape, Side, side
from tierkv.benchmarks.pairs import compare
from tierkv.benchmarks.parts import Parts
from tierkv.errors import ConfigError
from tierkv.geometry import PAGE_TOKENS

CONTEXTS, QUICK_CONTEXTS = (512, 1024, 2048, 4096, 8192), (512,)
BATCHES, QUICK_BATCHES = (1, 4), (1,)
PASSES, QUICK_PASSES = 15, 3
WARM_UP = 1


class Record(msgspec.Struct):
    """See the package."""

    model: str
    context: int
    batch: int
    arm: str
    ms_per_layer: float
    ratio_to_sdpa: float
    ratio_low: float
    ratio_high: float
    pairs: int
    attended_bytes: int
    gbps: float
    layers: int


class Plan(NamedTuple):
    shapes: tuple[Shape, ...]
    arms: tuple[str, ...]
    passes: int


class Made(NamedTuple):
    records: list[Record]
    skipped: dict[str, str]


def plan(
    contexts: Sequence[int] = (), batches: Sequence[int] = (), arms: Sequence[str] = (), steps: int | None = None,
    quick: bool = False,
) -> Plan:  # fmt: skip
    """What is not named is the default's. `sdpa` always runs.

    Raises:
        ConfigError: no such arm, or a context that is not whole pages.
    """
    if unknown := [arm for arm in arms if arm not in NAMES]:
        raise ConfigError(f"there is no arm {unknown[0]!r}; there are {', '.join(NAMES)}")
    if cut := [context for context in contexts if context % PAGE_TOKENS]:
        raise ConfigError(f"a context of {cut[0]} tokens is not whole pages of {PAGE_TOKENS}")
    shapes = [
        Shape(model, context, batch)
        for model in MODELS
        for batch in sorted(set(batches or (QUICK_BATCHES if quick else BATCHES)))
        for context in sorted(set(contexts or (QUICK_CONTEXTS if quick else CONTEXTS)))
    ]
    chosen = tuple(name for name in NAMES if not arms or name in arms or name == SDPA)
    return Plan(tuple(shapes), chosen, steps or (QUICK_PASSES if quick else PASSES))


def run(plan: Plan, kept: Parts[Record], told: Callable[[int, int, str], None]) -> Made:
    """What `kept` holds is taken from there."""
    records: list[Record] = []
    skipped: dict[str, str] = {}
    for done, shape in enumerate(plan.shapes):
        title = f"{shape.model.name}, {shape.context} tokens x {shape.batch}"
        told(done, len(plan.shapes), title)
        known = kept.under(f"{title}, {plan.passes} passes, {' '.join(plan.arms)}")
        if not known:
            sides = []
            for name in plan.arms:
                try:
                    sides.append(side(name, shape))
                except (ConfigError, ImportError) as error:
                    skipped[name] = str(error)
            known.update({one.arm: one for one in _measure(sides, shape, plan.passes)})
            kept.keep()
            del sides
            gc.collect()
        records += known.values()
    return Made(records, skipped)


def _measure(sides: Sequence[Side], shape: Shape, passes: int) -> list[Record]:
    drawn = random.Random(0)
    timed: dict[str, list[float]] = {one.name: [] for one in sides}
    for index in range(WARM_UP + passes):
        for one in drawn.sample(sides, len(sides)):
            start = time.perf_counter()
            for layer in range(shape.layers):
                one.attend(layer)
            seconds = time.perf_counter() - start
            if index >= WARM_UP:
                timed[one.name].append(1e3 * seconds / shape.layers)
    records = []
    for one in sides:
        figures = compare(zip(timed[one.name], timed[SDPA], strict=True))
        records.append(
            Record(
                shape.model.name, shape.context, shape.batch, one.name, figures["ours"],
                figures["ratio"], figures["ratio_low"], figures["ratio_high"], int(figures["pairs"]),
                one.attended_bytes, one.attended_bytes / figures["ours"] / 1e6, shape.layers,
            )
        )  # fmt: skip
    return records
