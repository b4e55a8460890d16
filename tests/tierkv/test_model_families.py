"""Families of models: those that are served answer as over `DynamicCache`, the others are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    DynamicCache,
    FalconConfig,
    FalconForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.tierkv.tiny_models import (
    CACHE,
    FAMILIES,
    SHAPE,
    build,
    expected,
    greedy,
    local_sessions,
    prompt,
    tiered,
)
from tierkv.errors import UnsupportedModel
from tierkv.model import attach

# Served --------------------------------------------------------------------------------------------------------------

SERVED = {
    "llama": 3, "llama-mha": 3, "llama-mqa": 3, "qwen2": 3, "qwen3": 3, "qwen3-moe": 3, "mistral": 3, "phi3": 3,
    "gpt-neox": 3, "gpt2": 3, "olmo2": 3, "granite": 3,
    "qwen2-windows": 1, "gemma2": 1, "gemma2-uncapped": 1, "gemma3": 1, "gpt-oss": 1, "cohere2": 1, "llama4": 1,
}  # fmt: skip
"""Layers of three that live in pages; the others have sliding windows or, in Llama 4, chunks."""


def sink(model: PreTrainedModel, logit: float) -> None:
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.sinks, logit)


def test_every_family_of_the_tests_is_served() -> None:
    assert SERVED.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", SERVED)
def test_a_served_family_answers_as_over_a_dynamic_cache(name: str) -> None:
    model, inputs = build(name), prompt(37, 20)
    want = expected(model, inputs)
    attached = attach(model)
    assert attached.geometry().num_layers == SERVED[name]
    assert torch.equal(expected(model, inputs), want)  # over transformers' own cache it is as before
    assert torch.equal(greedy(model, inputs, tiered(attached, rows=2)), want)
    assert torch.equal(greedy(model, inputs, tiered(attached, rows=2, chunk_tokens=16)), want)


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_capped_logits_and_sinks_give_the_logits_of_eager_attention(name: str) -> None:
    model, inputs = build(name), prompt(33, 20)
    assert model.config._attn_implementation == "eager"
    with torch.no_grad():
        want = model(**inputs, **{CACHE: DynamicCache(config=model.config)}).logits
        attached = attach(model)
        dense = model(**inputs, **{CACHE: DynamicCache(config=model.config)}).logits
        paged = model(**inputs, **{CACHE: tiered(attached, rows=2)}).logits
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(dense[real], want[real], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(paged[real], want[real], rtol=1e-4, atol=1e-4)


def test_soft_capping_and_sinks_make_a_difference_here() -> None:
    """Or the tests above would pass without them."""
    inputs = prompt(33)
    assert not torch.equal(
        expected(build("gemma2"), inputs), expected(build("gemma2", attn_logit_softcapping=None), inputs)
    )
    sunk, dry = build("gpt-oss"), build("gpt-oss")
    sink(dry, -1e4)
    assert not torch.equal(expected(sunk, inputs), expected(dry, inputs))


def test_what_sinks_take_is_no_tokens_mass() -> None:
    """One paged layer. With sinks far below all logits the masses sum to 1, far above them to nothing."""
    sums = []
    for level in (-1e4, 0.0, 1e4):
        model = build("gpt-oss")
        sink(model, level)
        cache = tiered(attach(model))
        greedy(model, prompt(20), cache)
        observations = local_sessions(cache)[0].observations
        sums.append([float(np.nansum(mass)) for _, mass in observations])
    assert sums[0] and all(total == pytest.approx(1.0, abs=1e-5) for total in sums[0])
    assert all(0.0 < total < 1.0 for total in sums[1])
    assert all(total == pytest.approx(0.0, abs=1e-6) for total in sums[2])


# Refused -------------------------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
LATENT: dict[str, Any] = TINY | {
    "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1,
    "first_k_dense_replace": 2,
}  # fmt: skip
RELATIVE: dict[str, Any] = {
    "vocab_size": 50, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2,
}  # fmt: skip
REFUSED: list[tuple[str, Callable[[], PreTrainedModel]]] = [
    ("ALiBi", lambda: BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_head=2, n_layer=1))),
    ("ALiBi", lambda: FalconForCausalLM(FalconConfig(**TINY, alibi=True))),
    ("ALiBi", lambda: MptForCausalLM(MptConfig(vocab_size=50, d_model=32, n_heads=2, n_layers=1))),
    ("AttentionInterface", lambda: FalconForCausalLM(FalconConfig(**TINY))),
    ("takes an attention mask of its own", lambda: DogeForCausalLM(DogeConfig(**TINY))),
    (
        "its keys and values have",
        lambda: MiMoV2FlashForCausalLM(MiMoV2FlashConfig(**SHAPE)),
    ),
    ("encoder-decoder", lambda: T5ForConditionalGeneration(T5Config(**RELATIVE))),
    (
        "cross attention",
        lambda: BertLMHeadModel(BertConfig(**TINY, is_decoder=True, add_cross_attention=True)),
    ),
    ("not causal", lambda: BertLMHeadModel(BertConfig(**TINY))),
    ("latent", lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT))),
    (
        "AttentionInterface",
        lambda: MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1)),
    ),
    ("sliding window", lambda: build("mistral", sliding_window=8)),
]


@pytest.mark.parametrize(("feature", "make"), REFUSED)
def test_what_pages_cannot_serve_is_refused_by_name_and_left_alone(
    feature: str, make: Callable[[], PreTrainedModel]
) -> None:
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=feature):
        attach(model)
    assert model.config._attn_implementation == before
    assert "forward" not in vars(model)
