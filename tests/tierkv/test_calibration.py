"""Moments of tiny random models, against dense float64 arithmetic over transformers' own eager attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.tierkv.tiny_models import CACHE, build
from tierkv import calibration
from tierkv.calibration import context_tokens, observe, token_weights, value_metric
from tierkv.errors import ConfigError, UnsupportedModel
from tierkv.fisher import information
from tierkv.model import attach
from tierkv.prefetch.transform import KeySums
from tierkv.tiered_layer import IMPLEMENTATION

SINKS, RECENT = 4, 8
LAYERS, HEADS, GROUP, DIM = 3, 2, 2, 16
TEXTS = [np.random.default_rng(seed).integers(2, 97, tokens).tolist() for seed, tokens in ((1, 60), (2, 41))]
CONTEXTS = (36, 27)  # half of what is beyond 12 exact tokens is generated: 24 of 60, 14 of 41


class Seen(NamedTuple):
    """One text, float64: attention `[layers, q_heads, T, T]`, queries `[layers, q_heads, T, D]`, K/V of KV heads."""

    attention: np.ndarray
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray


def look(model: PreTrainedModel, text: Sequence[int]) -> Seen:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        given: Any = model(
            torch.tensor([text]), output_attentions=True, output_hidden_states=True, **{CACHE: cache}
        )
        cos, sin = model.model.rotary_emb(given.hidden_states[0], torch.arange(len(text))[None])
        queries = []
        for block, hidden in zip(model.model.layers, given.hidden_states, strict=False):
            asked = (
                block.self_attn.q_proj(block.input_layernorm(hidden)).unflatten(-1, (-1, DIM)).transpose(1, 2)
            )
            queries.append(apply_rotary_pos_emb(asked, asked, cos, sin)[0][0])
    return Seen(
        torch.stack([one[0] for one in given.attentions]).numpy(),
        torch.stack(queries).numpy(),
        torch.stack([layer.keys[0] for layer in cache.layers]).numpy(),
        torch.stack([layer.values[0] for layer in cache.layers]).numpy(),
    )


def dense(texts: Sequence[Seen], layer: int, head: int) -> dict[str, np.ndarray]:
    """The definition, token by token and query by query."""
    keys, values, weights = [], [], []
    asked, given = np.zeros((DIM, DIM)), 0.0
    for seen in texts:
        tokens = seen.key.shape[2]
        mass = np.zeros(tokens)
        for q_head in range(head * GROUP, (head + 1) * GROUP):
            for t in range(tokens):
                far = range(SINKS, t - RECENT + 1)
                p = seen.attention[layer, q_head, t]
                weight = sum(p[s] for s in far)
                for s in far:
                    mass[s] += p[s]
                q = seen.query[layer, q_head, t]
                asked += weight * np.outer(q, q)
                given += weight
        count = tokens - SINKS
        weights.append(0.5 / count + 0.5 * mass[SINKS:] / mass[SINKS:].sum())
        keys.append(seen.key[layer, head, SINKS:])
        values.append(seen.value[layer, head, SINKS:])
    weight = np.concatenate(weights) / len(texts)
    key, value = np.concatenate(keys), np.concatenate(values)
    mean = weight @ key
    return {
        "key_mean": mean,
        "key_covariance": np.einsum("t,ti,tj->ij", weight, key - mean, key - mean),
        "value_second": np.einsum("t,ti,tj->ij", weight, value, value),
        "query_second": asked / given,
    }


@pytest.fixture(scope="module")
def seen() -> list[Seen]:
    exact = build("llama", attn_implementation="eager").double()
    return [look(exact, text[:context]) for text, context in zip(TEXTS, CONTEXTS, strict=True)]


@pytest.mark.parametrize("queries", [7, 16, 64])
def test_moments_are_those_of_the_definition(
    queries: int, seen: list[Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "QUERIES", queries)
    moments = observe(build("llama"), TEXTS, SINKS, RECENT)
    assert moments.key_mean.shape == (LAYERS, HEADS, DIM)
    for layer in range(LAYERS):
        for head in range(HEADS):
            for name, expected in dense(seen, layer, head).items():
                found = getattr(moments, name)[layer, head]
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_pages_are_full_ones_of_each_context_from_its_start(seen: list[Seen]) -> None:
    """Moments of their cosine coefficients: over all of them those of the tokens, and the first are of page means."""
    pages: list[KeySums] = []
    observe(build("llama"), TEXTS, SINKS, RECENT, pages=pages)
    assert len(pages) == LAYERS and {sums.pages for sums in pages} == {2 + 1}  # of 36 and 27 tokens
    for layer, sums in enumerate(pages):
        keys = np.concatenate(
            [one.key[layer, :, :whole] for one, whole in zip(seen, (32, 16), strict=True)], 1
        )
        close = {"rtol": 1e-4, "atol": 1e-4}
        np.testing.assert_allclose(sums.keys, keys.sum(1), **close)
        np.testing.assert_allclose(sums.rows.sum(1), np.einsum("hti,htj->hij", keys, keys), **close)
        means = keys.reshape(HEADS, 3, 16, DIM).mean(2)
        np.testing.assert_allclose(sums.rows[:, 0], 16 * np.einsum("hpi,hpj->hij", means, means), **close)


def test_an_error_of_a_value_costs_what_it_does_behind_the_attention() -> None:
    model = build("llama")
    moments = observe(model, TEXTS[:1], SINKS, RECENT)
    error = torch.randn(DIM, generator=torch.Generator().manual_seed(0))
    for layer, block in enumerate(model.model.layers):
        for head in range(HEADS):
            behind = []
            for q_head in (2 * head, 2 * head + 1):  # both query heads read this value head
                given = torch.zeros(HEADS * GROUP, DIM)
                given[q_head] = error
                behind.append(block.self_attn.o_proj(given.flatten()).square().sum().item())
            metric = torch.from_numpy(moments.value_metric[layer, head])
            assert (error @ metric @ error).item() == pytest.approx(sum(behind) / 2, rel=1e-4)


def test_without_a_projection_that_is_known_all_errors_of_values_cost_the_same() -> None:
    model = build("llama")
    for block in model.model.layers:
        block.self_attn.o_proj = nn.Sequential(block.self_attn.o_proj)
    np.testing.assert_array_equal(value_metric(model, 1), np.eye(DIM)[None].repeat(HEADS, 0))


def test_layers_with_a_window_are_left_out() -> None:
    model = build("qwen2-windows")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([TEXTS[0][: CONTEXTS[0]]]), **{CACHE: cache})
    moments = observe(model, TEXTS[:1], SINKS, RECENT)
    assert moments.key_mean.shape == (1, HEADS, DIM)
    values = cache.layers[1].values[0, :, SINKS:]  # layer 1 looks at everything
    # Each token counts between half its even share and all of what is left: bounds of any weights.
    even = values.square().mean(1).numpy()
    found = np.diagonal(moments.value_second[0], axis1=-2, axis2=-1)
    largest = values.square().amax(1).numpy()
    assert (found >= even / 2 - 1e-6).all() and (found <= even / 2 + largest / 2 + 1e-6).all()


def test_tokens_count_half_evenly_and_half_by_attention() -> None:
    mass = torch.tensor([[0.0, 1.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    expected = [[0.125, 0.25, 0.5, 0.125], [0.25] * 4]
    np.testing.assert_allclose(token_weights(mass), expected)


def test_a_text_ends_with_what_is_generated_128_tokens_or_half_of_a_short_one() -> None:
    assert [context_tokens(tokens) for tokens in (2848, 352, 98, 99, 100)] == [2720, 224, 97, 98, 98]


@pytest.mark.parametrize("family", ["llama", "qwen2-windows"])
def test_costs_of_errors_are_means_over_texts_of_tokens_that_are_far_from_all_generated_ones(
    family: str,
) -> None:
    model = build(family)
    layers, found = ([1] if family == "qwen2-windows" else [0, 1, 2]), []
    for text, context in zip(TEXTS, CONTEXTS, strict=True):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.tensor([text[:context]]), **{CACHE: cache})
        found.append(information(model, cache, layers, text[context:], slice(SINKS, context - RECENT)))
    moments = observe(model, TEXTS, SINKS, RECENT)
    for side, matrices in ((0, moments.key_fisher), (1, moments.value_fisher)):
        expected = ((found[0][side] + found[1][side]) / 2).numpy()
        np.testing.assert_allclose(matrices, expected, rtol=1e-3, atol=1e-4 * expected.max())


def test_texts_count_the_same_in_any_order() -> None:
    model = build("llama")
    one, other = observe(model, TEXTS, SINKS, RECENT), observe(model, TEXTS[::-1], SINKS, RECENT)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_models_attention_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", attn_implementation="eager")
    observe(model, TEXTS[:1], SINKS, RECENT)
    assert model.config._attn_implementation == "eager"

    def broken(*_: object) -> None:
        raise RuntimeError("no attention today")

    for part in ("information", "listen"):
        monkeypatch.setattr(calibration, part, broken)
        with pytest.raises(RuntimeError, match="no attention"):
            observe(model, TEXTS[:1], SINKS, RECENT)
        assert model.config._attn_implementation == "eager"
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_attached_model_is_observed_and_stays_attached() -> None:
    model = build("llama")
    plain = observe(model, TEXTS, SINKS, RECENT)
    attached = attach(model)
    for a, b in zip(plain, observe(model, TEXTS, SINKS, RECENT), strict=True):
        np.testing.assert_array_equal(a, b)
    assert model.config._attn_implementation == IMPLEMENTATION
    attached.detach()


def test_a_bfloat16_model_has_nearly_the_same_moments() -> None:
    full, half = (
        observe(build("llama").to(dtype), TEXTS, SINKS, RECENT) for dtype in (torch.float32, torch.bfloat16)
    )
    for name, a, b in zip(full._fields, full, half, strict=True):
        assert b.dtype == np.float32
        # Some of the few answers that are drawn are others: test_fisher.py compares more of them.
        assert np.linalg.norm(a - b) < (0.3 if "fisher" in name else 0.05) * np.linalg.norm(a)


def test_what_cannot_be_observed_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="soft-caps"):
        observe(build("gemma2"), TEXTS, SINKS, RECENT)
    with pytest.raises(ConfigError, match="no text"):
        observe(build("llama"), [], SINKS, RECENT)
    with pytest.raises(ConfigError, match=r"text 2 has 13 tokens.*at least 14"):
        observe(build("llama"), [TEXTS[0], TEXTS[0][: SINKS + RECENT + 1]], SINKS, RECENT)
