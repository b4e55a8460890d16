"""Small random models whose greedy output is not a loop, and left-padded prompts for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.tierkv.local_session import LocalPool, LocalSession
from tierkv.model import AttachedModel
from tierkv.transformers_cache import TieredCache

CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
"""The name of the cache argument; 5.24 renamed it."""

NEW = 24
"""Tokens that `greedy` generates."""

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.25, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip


WINDOW = 8
"""Tokens that a sliding-window layer looks back."""

WINDOWS: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
"""Layers 0 and 2 look WINDOW tokens back, layer 1 at everything."""

EXPERTS: dict[str, Any] = {"head_dim": 16, "num_experts_per_tok": 1}

GEMMA: dict[str, Any] = {
    "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24, "tie_word_embeddings": False,
}  # fmt: skip
"""Untied: with its embeddings tied, a random Gemma repeats one token."""

FAMILIES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2-windows": (Qwen2Config, Qwen2ForCausalLM, WINDOWS | {"use_sliding_window": True}),
    # Soft-capped where these small logits bend, and not at all; layers 0 and 2 have windows too.
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, GEMMA | {"attn_logit_softcapping": 2.0}),
    "gemma2-uncapped": (Gemma2Config, Gemma2ForCausalLM, GEMMA | {"attn_logit_softcapping": None}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, GEMMA | WINDOWS),
    "gpt-oss": (GptOssConfig, GptOssForCausalLM, WINDOWS | EXPERTS | {"num_local_experts": 2}),
    "cohere2": (Cohere2Config, Cohere2ForCausalLM, WINDOWS | {"head_dim": 16, "logit_scale": 1.0}),
    "llama4": (
        Llama4TextConfig,
        Llama4ForCausalLM,
        EXPERTS
        | {
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 0, 1],
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        },
    ),
    "llama-mha": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4}),
    "llama-mqa": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 1}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        EXPERTS | {"num_experts": 2, "moe_intermediate_size": 32},
    ),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"sliding_window": None}),
    "gpt-neox": (GPTNeoXConfig, GPTNeoXForCausalLM, {"num_key_value_heads": None}),
    "gpt2": (GPT2Config, GPT2LMHeadModel, {"num_key_value_heads": None}),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
    "granite": (GraniteConfig, GraniteForCausalLM, {}),
}


def build(name: str, **changes: Any) -> PreTrainedModel:
    config, model, own = FAMILIES[name]
    torch.manual_seed(list(FAMILIES).index(name))  # one seed would make Mistral a Llama, weight for weight
    return model(config(**SHAPE | own | changes)).eval()


def prompt(*lengths: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """A left-padded batch of random tokens, one row for each length."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(2, 97, (length,), generator=generator)
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def longer(inputs: dict[str, torch.Tensor], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The next turn: everything generated so far, and `tokens` `[rows, new]` more."""
    ids = torch.cat([inputs["input_ids"], tokens], dim=1)
    grown = ids.shape[1] - inputs["attention_mask"].shape[1]
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(ids), grown, dtype=torch.long)], dim=1)
    return {"input_ids": ids, "attention_mask": mask}


def greedy(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: Any, **options: Any
) -> torch.Tensor:
    settings = {"max_new_tokens": NEW, "do_sample": False, **options}
    tokens: torch.Tensor = model.generate(**inputs, **{CACHE: cache}, **settings)
    return tokens


def expected(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """What the model says over transformers' own cache."""
    return greedy(model, inputs, DynamicCache(config=model.config), **options)


def tiered(attached: AttachedModel, rows: int = 1, **options: Any) -> TieredCache:
    """A cache over a local pool of exact float32 pages."""
    pool = LocalPool(attached.geometry("float32"))
    return TieredCache([pool.open() for _ in range(rows)], **options)


def local_sessions(cache: TieredCache) -> list[LocalSession]:
    assert all(isinstance(session, LocalSession) for session in cache.sessions)
    return cache.sessions  # type: ignore[return-value]


def count_forward_tokens(model: PreTrainedModel) -> list[int]:
    """Columns of each run of the model's embedding from now on."""
    counts: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, args, out: counts.append(out.shape[1]))
    return counts
