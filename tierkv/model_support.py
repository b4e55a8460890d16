"""What a transformers model is, as far as pages care: is it servable, which layers live in pages, what names it."""

from __future__ import annotations

import json
from typing import Any

import torch
import xxhash
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tierkv.attention_calls import Calls, calls_of
from tierkv.errors import UnsupportedModel
from tierkv.geometry import PAGE_TOKENS, DTypeName, Geometry

_DTYPES: dict[torch.dtype, DTypeName] = {
    torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16",
}  # fmt: skip

_NOT_IDENTITY = {
    "transformers_version",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "architectures",
    "use_cache",
}
"""Configuration keys that leave the K/V as they are."""

_PROBED_VALUES = 64
"""Values of the first and the last parameter that go into a model's id: models built from one config differ."""


def check_supported(model: PreTrainedModel) -> None:
    """Raises `UnsupportedModel`, naming the feature, where attention over pages would give other answers."""
    for refused, feature in _features(model):
        if refused:
            raise UnsupportedModel(f"{type(model).__name__}: {feature}; tierkv pages cannot serve it")


def check_plain(model: PreTrainedModel) -> None:
    """Raises `UnsupportedModel` where attention is more than a softmax of products: what observes it knows no more."""
    config = model.config.get_text_config(decoder=True)
    for bent, feature in (
        (getattr(config, "attn_logit_softcapping", None) is not None, "it soft-caps attention logits"),
        (any(getattr(m, "sinks", None) is not None for m in model.modules()), "it has attention sinks"),
    ):
        if bent:
            raise UnsupportedModel(f"{type(model).__name__}: {feature}; tierkv serves but cannot observe it")


def check_layers(model: PreTrainedModel) -> None:
    """Raises `UnsupportedModel` where a layer that would live in pages passes what they do not know, or K/V of another
    shape than the model's.
    """
    own = own_layers(model)
    shape = geometry(model)
    sizes = {shape.num_kv_heads * shape.head_dim}
    known: dict[type, Calls] = {}
    reached: set[int] = set()
    hidden = False
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in own:
            continue
        kind = type(module)
        calls = known[kind] = known.get(kind) or calls_of(kind)
        if calls.unserved:
            raise UnsupportedModel(
                f"{type(module).__name__}: its attention takes {', '.join(calls.unserved)}; "
                "tierkv pages cannot serve it"
            )
        made_by: list[Any] = [getattr(module, name, None) for name in ("k_proj", "v_proj")]
        found = {int(made.out_features) for made in made_by if hasattr(made, "out_features")}
        if found - sizes:
            raise UnsupportedModel(
                f"{type(module).__name__}: its keys and values have {sorted(found)} numbers a token at layer "
                f"{layer}, pages {shape.num_kv_heads} heads of {shape.head_dim} for each"
            )
        hidden |= not calls.readable
        if calls.found:
            reached.add(layer)
    missing = set(range(num_layers(model))) - own.keys() - reached
    if missing and not hidden:
        raise UnsupportedModel(
            f"{type(model).__name__}: layer {min(missing)} does not take its attention from AttentionInterface; "
            "tierkv pages cannot serve it"
        )


def _features(model: PreTrainedModel) -> list[tuple[bool, str]]:
    config = model.config.get_text_config(decoder=True)
    attn_config = getattr(config, "attn_config", None)
    alibi = (
        getattr(config, "alibi", False)
        or getattr(attn_config, "alibi", False)
        or config.model_type == "bloom"
    )
    modules = list(model.modules())
    return [
        (bool(model.config.is_encoder_decoder), "it is an encoder-decoder"),
        (bool(getattr(config, "add_cross_attention", False)), "it has cross attention"),
        (
            any(hasattr(m, "is_cross_attention") and m.is_cross_attention for m in modules),
            "it has cross attention",
        ),
        (bool(alibi), "it biases attention by distance (ALiBi)"),
        (not model._supports_attention_backend, "it does not take its attention from AttentionInterface"),
        (getattr(config, "is_causal", True) is False, "its attention is not causal"),
        (bool(getattr(config, "use_bidirectional_attention", False)), "its attention is not causal"),
        (any(getattr(m, "is_causal", True) is False for m in modules), "its attention is not causal"),
        (getattr(config, "kv_lora_rank", None) is not None, "it has latent attention (MLA)"),
        (bool(getattr(config, "num_kv_shared_layers", 0)), "its layers share K/V"),
    ]


def own_layers(model: PreTrainedModel) -> dict[int, Any]:
    """New cache layers, by index, for the layers that keep transformers' own cache (sliding windows).

    Raises:
        UnsupportedModel: a layer is neither full attention nor a sliding window, or none is full attention.
    """
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedModel(
                f"{type(model).__name__}: it has {type(layer).__name__} layers, not only attention"
            )
    own = {index: layer for index, layer in enumerate(layers) if type(layer) is not DynamicLayer}
    if len(own) == len(layers):
        raise UnsupportedModel(
            f"{type(model).__name__}: every layer has a sliding window, none would live in pages"
        )
    return own


def num_layers(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def geometry(
    model: PreTrainedModel, dtype: DTypeName | None = None, page_tokens: int = PAGE_TOKENS
) -> Geometry:
    """The page that holds this model's full-attention layers; `dtype` defaults to the model's."""
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    return Geometry(
        num_layers=num_layers(model) - len(own_layers(model)),
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=dtype or _DTYPES.get(model.dtype, "float32"),
        page_tokens=page_tokens,
    )


def model_id(model: PreTrainedModel) -> str:
    """`name@hash`: the configuration and a few weights, so that two models of one shape share no pages."""
    config = {
        k: v for k, v in model.config.to_dict().items() if k not in _NOT_IDENTITY and "attn_impl" not in k
    }
    digest = xxhash.xxh3_64(json.dumps(config, sort_keys=True, default=str).encode())
    parameters = list(model.parameters())
    for parameter in (parameters[0], parameters[-1]):
        if parameter.device.type != "meta":
            probe = parameter.detach().flatten()[:_PROBED_VALUES].to("cpu", torch.float32)
            digest.update(probe.numpy().tobytes())
    return f"{model.config.name_or_path or type(model).__name__}@{digest.hexdigest()}"


__all__ = [
    "check_layers",
    "check_plain",
    "check_supported",
    "geometry",
    "model_id",
    "num_layers",
    "own_layers",
]
