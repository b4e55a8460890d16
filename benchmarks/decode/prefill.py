"""A prompt read through pages, beside `DynamicCache`: when all of it fits, and when three quarters must demote."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

import tierkv
from tierkv.benchmarks import processes
from tierkv.benchmarks.decode import DYNAMIC, EXACT, QUARTER
from tierkv.benchmarks.decode.models import Models
from tierkv.benchmarks.decode.paged import open_session
from tierkv.benchmarks.decode.plan import Plan
from tierkv.benchmarks.pairs import Figures, compare
from tierkv.recall import RecallOptions
from tierkv.study.probe import dynamic_cache, forward
from tierkv.transformers_cache import TieredCache

if TYPE_CHECKING:
    from tierkv import Client

PAGED = (EXACT, QUARTER)
POOL_PROMPTS = 4
"""Prompts that the pool would hold exactly: a slice takes a quarter of it at most."""

DEFAULT = RecallOptions()
AUDITED = RecallOptions(audit_every=1)
"""For warming up: its kernels take long to compile, and a short prompt is not audited otherwise."""


def measure(models: Models, tokens: Sequence[int], plan: Plan) -> dict[str, Figures]:
    """Seconds of each of tierkv's arms beside `dynamic`, each prompt read whole in turn, `plan.prefills` times."""
    geometry = models.paged.geometry(plan.pages)
    hbm = POOL_PROMPTS * (len(tokens) + geometry.page_tokens) * geometry.token_bytes
    with processes.service(hbm, 2 * hbm, plan.codec) as state_dir, tierkv.connect(state_dir) as client:
        for name in PAGED:  # kernels compile and warm up
            _paged(models, client, plan, name, tokens[:256], AUDITED)
        taken: dict[str, list[float]] = {name: [] for name in (DYNAMIC, *PAGED)}
        for _ in range(plan.prefills):
            taken[DYNAMIC].append(_seconds(lambda: _dynamic(models, tokens)))
            for name in PAGED:
                taken[name].append(_paged(models, client, plan, name, tokens))
    return {name: compare(zip(taken[name], taken[DYNAMIC], strict=True)) for name in PAGED}


@torch.inference_mode()
def _dynamic(models: Models, tokens: Sequence[int]) -> None:
    forward(models.plain, dynamic_cache(models.plain), tokens)


def _paged(
    models: Models,
    client: Client,
    plan: Plan,
    name: str,
    tokens: Sequence[int],
    recall: RecallOptions = DEFAULT,
) -> float:
    session = open_session(name, models.paged, client, plan.pages, len(tokens))
    cache = TieredCache(session, recall=recall)
    with torch.inference_mode():
        seconds = _seconds(lambda: forward(models.paged.model, cache, tokens))
    session.close()
    return seconds


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
