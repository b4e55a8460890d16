"""Milliseconds a token of SmolLM2-135M (float32) over tierkv pages, beside transformers' `DynamicCache` and sdpa.

Three arms read the same prompt and then the same tokens, one decode step at a time, in turn:

- `peer`: the same weights, not attached, `DynamicCache`.
- `exact`: a session whose bfloat16 pages all fit into HBM.
- `budget`: a session that may hold a quarter of its exact bytes in HBM; the rest is low-bit or in host memory.

The daemon is a process of its own. Every arm has the same thread count, and a step is a whole forward.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import tierkv
from tierkv.benchmarks import pairs, processes
from tierkv.geometry import DTypeName, Geometry
from tierkv.table import Kind

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

    from tierkv.session import Session

CONTEXTS = (1000, 4000)
"""Tokens read before the clock runs."""

QUICK_CONTEXTS = (256,)
BUDGET_SHARE = 4
"""The `budget` arm holds one part in this many of its exact bytes."""

LEAST_BUDGET_PAGES = 12
CHUNK_SHARE = 4
"""A forward of the `budget` arm takes one part in this many of its budget: what is there needs room too."""

POOL_DTYPE: DTypeName = "bfloat16"
WARM_UP_STEPS = 3
STEPS = 40
QUICK_STEPS = 3
SETTLE_SECONDS = 10.0
"""How long moves that the prompt caused may take before the clock runs."""


def run(quick: bool = False) -> list[dict[str, Any]]:
    """One record a context; see the package for keys."""
    from tierkv.study.model import load_smollm2

    contexts, steps = (QUICK_CONTEXTS, QUICK_STEPS) if quick else (CONTEXTS, STEPS)
    plain, _ = load_smollm2()
    paged, _ = load_smollm2()
    attached = tierkv.attach(paged)
    page = attached.geometry(POOL_DTYPE).page_bytes
    hbm = 3 * page * (sum(contexts) // 16 + 64)
    records = []
    with processes.service(hbm, hbm) as state_dir, tierkv.connect(state_dir) as client:
        for context in contexts:
            exact = attached.open(client, POOL_DTYPE, ladder="exact")
            budget = attached.open(client, POOL_DTYPE, hbm_budget=_budget(exact.geometry, context))
            records.append(_measure(plain, paged, exact, budget, context, steps))
            exact.close()
            budget.close()
            gc.collect()
    attached.detach()
    return records


def _budget(geometry: Geometry, tokens: int) -> int:
    return max(LEAST_BUDGET_PAGES * geometry.page_bytes, tokens * geometry.token_bytes // BUDGET_SHARE)


def _chunk(geometry: Geometry, tokens: int) -> int:
    pages = _budget(geometry, tokens) // (CHUNK_SHARE * geometry.page_bytes)
    return max(1, pages) * geometry.page_tokens


def _measure(
    plain: PreTrainedModel, paged: PreTrainedModel, exact: Session, budget: Session, context: int, steps: int
) -> dict[str, Any]:
    import torch
    from transformers import DynamicCache

    from tierkv.transformers_cache import TieredCache

    prompt = np.random.default_rng(context).integers(1000, 40_000, context).tolist()
    caches = {
        "peer": (plain, DynamicCache(config=plain.config)),
        "exact": (paged, TieredCache(exact)),
        "budget": (paged, TieredCache(budget, chunk_tokens=_chunk(budget.geometry, context))),
    }
    prefill = {}
    for name, (model, cache) in caches.items():
        start = time.perf_counter()
        _forward(model, cache, prompt)
        prefill[name] = time.perf_counter() - start
    _settle(budget)
    step = {name: _stepper(model, cache) for name, (model, cache) in caches.items()}
    timed: dict[str, list[float]] = {name: [] for name in caches}
    for index in range(WARM_UP_STEPS + steps):
        for name, once in step.items():
            milliseconds = once(1000 + index)
            if index >= WARM_UP_STEPS:
                timed[name].append(milliseconds)
    return {
        "context": context,
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        "prefill_seconds": prefill,
        "exact": pairs.compare(zip(timed["exact"], timed["peer"], strict=True)),
        "budget": pairs.compare(zip(timed["budget"], timed["peer"], strict=True)),
        "budget_pages": _pages(budget),
        "budget_hbm_bytes": _budget(budget.geometry, context),
    }


def _stepper(model: PreTrainedModel, cache: Cache) -> Callable[[int], float]:
    def once(token: int) -> float:
        start = time.perf_counter()
        _forward(model, cache, [token])
        return 1e3 * (time.perf_counter() - start)

    return once


def _forward(model: PreTrainedModel, cache: Cache, tokens: list[int]) -> None:
    import torch

    from tierkv.study.probe import forward

    with torch.inference_mode():
        forward(model, cache, tokens)


def _settle(session: Session) -> None:
    """Wait until the table has stood still for a while: what the prompt set moving has arrived."""
    deadline, version = time.monotonic() + SETTLE_SECONDS, -1
    while session.version != version and time.monotonic() < deadline:
        version = session.version
        time.sleep(0.3)


def _pages(session: Session) -> dict[str, int]:
    """Attendable pages by kind, and tokens that are not attended (in host memory)."""
    session.begin(0)
    rows = session.rows(session.length)
    session.end()
    return {
        "exact": int((rows.kinds == Kind.EXACT).sum()),
        "low_bit": int((rows.kinds == Kind.QUANTIZED).sum()),
        "tokens_in_host": session.length - int(rows.counts.sum()),
    }
