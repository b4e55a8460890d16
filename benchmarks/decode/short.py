"""Two contexts of `bench decode` at batch 1, for `make bench`."""

from __future__ import annotations

import os
from typing import Any

import torch

from tierkv.benchmarks.decode import DYNAMIC, EXACT, QUARTER, prefill
from tierkv.benchmarks.decode.full import prompt
from tierkv.benchmarks.decode.models import first, models, read
from tierkv.benchmarks.decode.paged import budget_of
from tierkv.benchmarks.decode.plan import Plan, Point
from tierkv.benchmarks.decode.point import measure
from tierkv.benchmarks.decode.timing import BLOCK, ratio

CONTEXTS, QUICK_CONTEXTS = (1000, 4000), (256,)
STEPS, QUICK_STEPS = 40, 8


def run(quick: bool = False) -> list[dict[str, Any]]:
    """One record a context; see `tierkv.benchmarks` for keys."""
    from tierkv.study.model import load_smollm2

    plain, _ = load_smollm2()
    points = tuple(
        Point(context, 1, (EXACT, QUARTER, DYNAMIC)) for context in (QUICK_CONTEXTS if quick else CONTEXTS)
    )
    plan = Plan(points, QUICK_STEPS if quick else STEPS, float("inf"), None, 1)
    shared = models(plain)
    tokens = prompt(plan.longest, int(plain.config.vocab_size))
    dense = read(plain, tokens)
    geometry = shared.paged.geometry(plan.pages)
    records = []
    for point in points:
        arms = measure(shared, first(dense, point.context), point, plan).arms
        seconds = prefill.measure(shared, tokens[: point.context], plan)
        exact, budget = (ratio(arms[name].steps, arms[DYNAMIC].steps, BLOCK) for name in (EXACT, QUARTER))
        pages = arms[QUARTER].pages or {}
        records.append(
            {
                "context": point.context,
                "threads": torch.get_num_threads(),
                "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
                "prefill_seconds": {
                    "peer": seconds[EXACT]["peer"], "exact": seconds[EXACT]["ours"], "budget": seconds[QUARTER]["ours"]
                },
                "exact": exact,
                "budget": budget,
                "budget_pages": {"exact": pages["exact"], "low_bit": pages["low_bit"], "cold": pages["cold"]},
                "budget_hbm_bytes": budget_of(QUARTER, geometry, point.context),
            }
        )  # fmt: skip
    shared.paged.detach()
    return records
