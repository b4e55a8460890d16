"""The arms: what is known of cold pages, and when."""

from __future__ import annotations

from typing import NamedTuple

from tierkv.benchmarks.recall.measure import Records
from tierkv.prefetch.estimators import Estimator
from tierkv.prefetch.summaries import Box, Centroid, Deviation
from tierkv.prefetch.transform import State, Transform
from tierkv.recall import RecallOptions

BUDGETS = (0.25, 0.10, 0.05)
"""Of the context's bytes in bfloat16."""

SMALL, DIGESTS = 0.10, 0.008
"""At budgets up to `SMALL`, digests of all pages may take `DIGESTS` of the context's bytes: an estimator with longer
records describes the last layers only, as many as fit."""

OFF, ORACLE, KEYS = "off", "oracle", "keys-resident"

READ = RecallOptions().read
"""Cold pages that a KV head reads in place in a decode step, as workers do by default."""


class Arm(NamedTuple):
    """`late`: placed by what the query before expected. The others are placed by the query itself, as a replay is.
    `aggregate` is of `measure.AGGREGATES`, or `learned`. `whole`: records of all layers at any budget; what a page
    keeps when it is cold is part of it when it is low-bit. `direct`: each KV head reads `READ` cold pages besides.
    """

    name: str
    estimator: str
    late: bool = False
    whole: bool = False
    aggregate: str = "mean"
    direct: bool = False


DEFAULT = "deviation-8-8"
"""What the daemon's digests hold (there with float32 scales)."""

SHORTEST, SHORT, LONG = "transform-8", "transform-12", "transform-32"
"""What a budget of a twentieth has room for, and what fits `DIGESTS` for all layers."""

LEARNED = (DEFAULT, SHORTEST, SHORT, LONG)
"""Estimators whose heads' weights are learned, too."""


def estimators(state: State) -> dict[str, Records]:
    """By name. The longest is keys in three bits a value, as low-bit pages hold them."""
    alone: tuple[Estimator, ...] = (
        Centroid(8), Centroid(4), Box("max", 8), Box("max", 4), Box("mean", 8), Deviation(8, 8), Deviation(4, 4),
        Deviation(4, 4, parts=2), *(Transform(state, size) for size in (8, 12, 16, 32, 64, 128, 256, 384)),
    )  # fmt: skip
    shared = Records(Box("max", 8), 4), Records(Deviation(8, 8), 4), Records(Centroid(8), 2)
    return {one.name: one for one in (*map(Records, alone), *shared)}


def arms(names: list[str]) -> list[Arm]:
    late = [Arm(f"{name}, a step late", name, late=True) for name in (DEFAULT, SHORT, LONG)]
    few = [Arm(f"{name}, top heads", name, aggregate="top") for name in (SHORT, LONG)]
    weighed = [Arm(f"{name}, learned", name, aggregate="learned") for name in LEARNED]
    direct = [Arm(f"{name}, direct", name, late=True, direct=True) for name in LEARNED]
    keys = Arm(KEYS, "transform-384", whole=True)
    return [*(Arm(name, name) for name in names), *late, *few, *weighed, *direct, keys]


def layers_within(limit: float, nbytes: float, layers: int, kv_heads: int, page_bytes: int) -> int:
    """How many layers' records of `nbytes` a head fit in `limit` of a page."""
    return min(layers, int(limit * page_bytes / (kv_heads * nbytes)))
