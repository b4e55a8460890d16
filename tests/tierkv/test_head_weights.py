"""Weights of heads, learned from a tiny model, against dense arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.tierkv.test_calibration import look
from tests.tierkv.tiny_models import build
from tierkv.calibration import observe
from tierkv.head_weights import ASKING, head_weights
from tierkv.prefetch.opinions import Opinions, of_mean_one
from tierkv.prefetch.transform import KeySums, Transform, solve

SINKS, RECENT = 4, 8
TEXTS = [np.random.default_rng(seed).integers(2, 97, 200).tolist() for seed in (1, 2)]


def test_a_head_that_tells_what_pages_get_counts_and_one_that_tells_nothing_does_not() -> None:
    random = np.random.default_rng(0)
    good, noise = random.random((2, 500))
    opinions = Opinions(2)
    opinions.add(np.stack([good, noise]).astype(np.float32), (good / 2).astype(np.float32))
    np.testing.assert_allclose(opinions.weights(), [0.5, 0], atol=0.01)


def test_without_texts_heads_count_the_same() -> None:
    assert of_mean_one(Opinions(4).weights()).tolist() == [1, 1, 1, 1]
    assert of_mean_one(np.zeros(4)).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("size", [8, 32])
def test_weights_are_those_of_dense_arithmetic(size: int) -> None:
    model = build("llama")
    pages: list[KeySums] = []
    state = solve(pages, observe(model, TEXTS, SINKS, RECENT, pages=pages).query_second)
    before = model.config._attn_implementation
    found = head_weights(
        model, [*TEXTS, TEXTS[0][:40]], state, size, SINKS, RECENT
    )  # the last has no cold page
    assert model.config._attn_implementation == before
    opinions, transform = Opinions(6), Transform(state, size)
    for text in TEXTS:
        seen = look(build("llama", attn_implementation="eager").double(), text)
        asking = torch.linspace(150, 199, ASKING).long().numpy()
        cold = slice(
            16, 16 + 16 * 7
        )  # seven full pages from the second on are at least 8 tokens from token 150
        attention = seen.attention[:, :, asking]
        true = attention[..., cold].reshape(3, 4, ASKING, 7, 16).sum(-1)
        keys = seen.key[:, :, cold].reshape(3, 2, 7, 16, 16)
        counts = np.full(7, 16)
        records = transform.summarize(keys, counts)
        queries = seen.query[:, :, asking].reshape(3, 2, 2 * ASKING, 16)
        scale = 16**-0.5
        told = transform.log_mass(queries, records, counts, scale).reshape(3, 2, 2, ASKING, 7)
        repeated = seen.key.repeat(2, 1)
        logits = np.einsum("lqnd,lqtd->lqnt", seen.query[:, :, asking], repeated) * scale
        logits[..., cold] = -np.inf
        logits[..., np.arange(200) > asking[:, None]] = -np.inf
        near = np.exp(logits).sum(-1).reshape(3, 2, 2, ASKING, 1)
        estimated = np.exp(told) / (near + np.exp(told).sum(-1, keepdims=True))
        opinions.add(estimated.mean(2).reshape(6, -1), true.mean((0, 1)).reshape(-1))
    np.testing.assert_allclose(found.weights.ravel(), of_mean_one(opinions.weights()), rtol=2e-2, atol=2e-3)
    assert found.weights.mean() == pytest.approx(1, abs=1e-5) and found.weights.std() > 0.01
