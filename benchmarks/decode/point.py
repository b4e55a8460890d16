"""One context and batch: all its arms, filled with the same K/V and stepped in turn."""

from __future__ import annotations

from typing import NamedTuple

import torch

import tierkv
from tierkv.benchmarks import processes
from tierkv.benchmarks.decode import ARMS, AT_BASE, BASE
from tierkv.benchmarks.decode.arm import Arm, Dense
from tierkv.benchmarks.decode.models import Models, first
from tierkv.benchmarks.decode.paged import PagedArm, paged, pool_bytes
from tierkv.benchmarks.decode.peers import peer
from tierkv.benchmarks.decode.plan import Plan, Point
from tierkv.benchmarks.decode.records import Measured
from tierkv.benchmarks.decode.timing import interleave
from tierkv.benchmarks.memory import peak_beyond
from tierkv.errors import ConfigError

HOST_SHARE = 2
"""Host memory is so many times what all pages take."""


class Measurement(NamedTuple):
    arms: dict[str, Measured]
    skipped: dict[str, str]


def measure(models: Models, dense: Dense, point: Point, plan: Plan) -> Measurement:
    """`dense` holds the point's context."""
    tierkvs = [name for name in point.arms if name.startswith("tierkv")]
    geometry = models.paged.geometry(plan.pages)
    hbm = pool_bytes(tierkvs, geometry, point.context, point.batch)
    arms: list[Arm] = []
    skipped: dict[str, str] = {}
    with (
        processes.service(hbm, HOST_SHARE * hbm, plan.codec) as state_dir,
        tierkv.connect(state_dir) as client,
    ):
        try:
            for name, kv in [*((name, dense) for name in point.arms), *_at_base(point, dense)]:
                try:
                    if name.startswith("tierkv"):
                        arms.append(paged(name, models.paged, client, kv, point.batch, plan.pages))
                    else:
                        arms.append(peer(name, models, kv, point.batch))
                except (ConfigError, ImportError) as error:
                    skipped[name.removesuffix(AT_BASE)] = str(error)
            vocabulary = int(models.plain.config.vocab_size)
            steps = interleave(arms, point.batch, vocabulary, plan.steps, plan.arm_seconds)
            return Measurement(
                {
                    arm.name: _measured(arm, steps[arm.name], steps.get(arm.name + AT_BASE), point.batch)
                    for arm in arms
                    if not arm.name.endswith(AT_BASE)
                },
                skipped,
            )
        finally:
            for arm in arms:
                arm.close()


def _at_base(point: Point, dense: Dense) -> list[tuple[str, Dense]]:
    """Arms whose KV cost is asked, at `BASE` tokens."""
    if point.context <= BASE:
        return []
    return [(name + AT_BASE, first(dense, BASE)) for name in point.arms if name in ARMS]


def _measured(arm: Arm, steps: list[float], base_steps: list[float] | None, batch: int) -> Measured:
    spans = arm.measured_spans() if isinstance(arm, PagedArm) else None
    held = arm.held()
    token = torch.zeros(batch, 1, dtype=torch.long)
    return Measured(
        steps, base_steps, held.kv, held.host, held.attended, peak_beyond(lambda: arm.step(token)),
        arm.fill_seconds, held.pages, spans, arm.note, arm.packs_every,
    )  # fmt: skip
