"""What digests promise, against the truth, on the demo's episodes and SmolLM2."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from statistics import mean

import pytest
import torch

import tierkv
from tests.faults.harness import Owner
from tierkv.model import attach
from tierkv.protocol import Audit
from tierkv.recall import RecallOptions
from tierkv.study.arms import POOL_DTYPE
from tierkv.study.episodes import load_episode, spans
from tierkv.study.model import load_smollm2
from tierkv.study.probe import cache_argument
from tierkv.transformers_cache import TieredCache

POOL_BYTES = 12 * 368_640
"""An eighth of an episode."""


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(("name", "layers"), [("ferry", 0), ("outage", 10)])
def test_estimates_of_cold_pages_sum_to_their_true_mass_within_a_factor_of_two(
    name: str, layers: int
) -> None:
    """No offset is fitted; digests of all layers, or of the last ten.

    Audits of a whole replay: decode steps, and the last query of each slice of the prompt.
    """
    model, tokenizer = load_smollm2()
    tokens = [token for span in spans(load_episode(name), tokenizer) for token in span.tokens]
    folder = Path(tempfile.mkdtemp(prefix="tierkv-", dir="/dev/shm"))
    options = ("--recent-tokens", "32", "--digest-share", "0.25", "--digest-layers", str(layers))
    owner, attached = Owner(folder, POOL_BYTES, 64 << 20, *options), attach(model)
    argument = cache_argument(model)
    try:
        with tierkv.connect(folder, reserve_ahead=0) as client, torch.inference_mode():
            recall = RecallOptions("background", audit_every=1)
            cache = TieredCache(attached.open(client, POOL_DTYPE, pins={}), recall=recall)
            model(torch.tensor([tokens[:-16]]), logits_to_keep=1, **{argument: cache})
            for token in tokens[-16:]:
                model(torch.tensor([[token]]), **{argument: cache})
            audits = [audit for audit in cache.audits if audit.missed > 0.05]
    finally:
        attached.detach()
        owner.kill()
        shutil.rmtree(folder)
    assert len(audits) >= 10
    assert 0.5 < ratio(audits) < 2, [(audit.estimated, audit.missed) for audit in audits]
    within = [0.5 < ratio([audit]) < 2 for audit in audits]
    assert mean(within) > 0.7, "single queries, too, are mostly estimated that well"


def ratio(audits: list[Audit]) -> float:
    """Estimated over true mass of cold pages."""
    return mean(audit.estimated for audit in audits) / mean(audit.missed for audit in audits)
