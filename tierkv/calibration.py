"""What a transformers model does with its K/V, observed on texts: the moments that a codec's state is fitted from.

A text is a context, which is read, and the tokens that are then generated: the last `FORCED`, or half of what a short
text has beyond its exact tokens (`context_tokens`). Generating them tells what errors of the context's K/V would cost
(`fisher.py`): of those tokens that are far from all of the generated ones.

A token of a context is *far* from a query when it is none of the first `sinks` and at least `recent` tokens back: such
tokens are low-bit in a long session. What counts is what queries get from them:

- A query weighs as much as the attention that it gives to far tokens (so a head that looks only nearby has no say).
- A token weighs as much as the attention that far queries give to it, one half, and as all others, the other half (so
  that no token is coded carelessly that another text would need). A context's weights add up to 1, and so texts count
  the same, long or short.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from tierkv import model_support
from tierkv.errors import ConfigError
from tierkv.fisher import Fisher, information
from tierkv.geometry import PAGE_TOKENS
from tierkv.prefetch.transform import KeySums
from tierkv.quant.moments import Moments, check
from tierkv.study.own_attention import take_over
from tierkv.study.probe import cache_argument, dynamic_cache

SINKS = 16
RECENT = 80
FORCED = 128

UNIFORM = 0.5
"""Part of a token's weight that does not depend on attention."""

QUERIES = 64
"""Queries that are attended at a time: scores of so few over some thousand tokens stay in cache."""

_IMPLEMENTATION = "tierkv-calibration"
_OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "c_proj")
"""Under which models keep the projection behind their attention."""


class Listened(NamedTuple):
    """Attention over one text, and how much of it was far. H KV heads, G query heads each."""

    out: torch.Tensor  # [H, G, tokens, head_dim]
    mass: torch.Tensor  # [H, tokens]: what a token got from queries that it is far from
    weight: torch.Tensor  # [H, G, tokens]: what a query gave to far tokens


@dataclass
class _Sums:
    """Of one layer, over the texts so far."""

    keys: torch.Tensor  # [H, D] float64
    key_squares: torch.Tensor  # [H, D, D] float64
    value_squares: torch.Tensor
    query_squares: torch.Tensor
    weight: torch.Tensor  # [H], of queries

    @classmethod
    def empty(cls, heads: int, dim: int, device: torch.device) -> _Sums:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(heads, *shape, dtype=dtype, device=device)

        wide = torch.float64  # keys of one head may lie far from 0 and close together
        return cls(
            zeros(dim, dtype=wide), zeros(dim, dim, dtype=wide), zeros(dim, dim), zeros(dim, dim), zeros()
        )

    def add(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heard: Listened, sinks: int
    ) -> None:
        """One text. `query` is `[H, G, tokens, D]`, the others `[H, tokens, D]`."""
        weight = token_weights(heard.mass[:, sinks:])[..., None]
        key, value = key[:, sinks:].double(), value[:, sinks:]
        weighted = key * weight
        self.keys += weighted.sum(1)
        self.key_squares += weighted.mT @ key
        self.value_squares += (value * weight).mT @ value
        self.query_squares += (query * heard.weight[..., None]).flatten(1, 2).mT @ query.flatten(1, 2)
        self.weight += heard.weight.sum((1, 2))


def context_tokens(tokens: int, sinks: int = SINKS, recent: int = RECENT) -> int:
    """How many tokens of a text are its context."""
    return tokens - min(FORCED, (tokens - sinks - recent) // 2)


@torch.no_grad()
def observe(
    model: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    sinks: int = SINKS,
    recent: int = RECENT,
    told: Callable[[int], None] | None = None,
    pages: list[KeySums] | None = None,
) -> Moments:
    """Run the model over each text (token ids) once, and `fisher.SAMPLES` times back over its generated tokens. The
    model is afterwards what it was before.

    Layers with a sliding window, which have no pages, are left out.

    Args:
        told: is called with a text's number, from 0, when its turn comes.
        pages: gets each observed layer's sums over full pages of the contexts, from their first token on, appended.

    Raises:
        UnsupportedModel: tierkv cannot serve this model, or it has soft-capping or sinks.
        ConfigError: there is no text, one has no token that is far from any, or gradients are not finite.
    """
    model_support.check_supported(model)
    model_support.check_plain(model)
    own, shape = model_support.own_layers(model), model_support.geometry(model)
    if not texts:
        raise ConfigError("there is no text to observe the model on; name at least one")
    least = sinks + recent + 2  # one that is far, one that is generated
    for number, text in enumerate(texts, 1):
        if len(text) < least:
            raise ConfigError(
                f"text {number} has {len(text)} tokens; a calibration needs at least {least} of each"
            )
    sums = {
        layer: _Sums.empty(shape.num_kv_heads, shape.head_dim, model.device)
        for layer in range(model_support.num_layers(model))
        if layer not in own
    }
    in_pages = {layer: KeySums(shape.num_kv_heads, PAGE_TOKENS, shape.head_dim) for layer in sums}

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor | None:
        heads, tokens, dim = key.shape[1:]
        if layer not in sums or query.shape[2] < tokens:  # fewer queries: tokens are generated
            return None
        q, k, v = query.float().reshape(heads, -1, tokens, dim), key[0].float(), value[0].float()
        heard = listen(q, k, v, scale, sinks, recent)
        sums[layer].add(q, k, v, heard, sinks)
        if pages is not None:
            in_pages[layer].add(*_full_pages(k))
        return heard.out.flatten(0, 1).transpose(0, 1)[None].to(query.dtype)

    before = model.config._attn_implementation
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    found = []
    take_over(model, _IMPLEMENTATION, attend)
    try:
        for number, text in enumerate(texts):
            if told is not None:
                told(number)
            cache, context = dynamic_cache(model), context_tokens(len(text), sinks, recent)
            read = torch.tensor([list(text[:context])], device=model.device)
            model(input_ids=read, **{cache_argument(model): cache}, **keep)
            far = slice(sinks, context - recent)
            found.append(information(model, cache, list(sums), text[context:], far))
    finally:
        model.set_attn_implementation(before)
    if pages is not None:
        pages += in_pages.values()
    return _moments(model, sums, found)


def _full_pages(key: torch.Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """`[H, tokens, D]` as `[H, pages, PAGE_TOKENS, D]`, and how many tokens the pages have."""
    heads, tokens, dim = key.shape
    count = tokens // PAGE_TOKENS
    pages = key[:, : count * PAGE_TOKENS].reshape(heads, count, PAGE_TOKENS, dim)
    return pages.cpu().numpy(), np.full(count, PAGE_TOKENS, np.int64)


def listen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, sinks: int, recent: int
) -> Listened:
    """Causal attention in float32. `query` is `[H, G, tokens, head_dim]`, `key` and `value` `[H, tokens, head_dim]`."""
    heads, group, tokens, dim = query.shape
    out, mass, weight = torch.empty_like(query), key.new_zeros(heads, tokens), key.new_zeros(query.shape[:3])
    position = torch.arange(tokens, device=key.device)
    for start in range(0, tokens, QUERIES):
        stop = min(start + QUERIES, tokens)
        asking = position[start:stop, None]
        logits = (query[:, :, start:stop].reshape(heads, -1, dim) * scale) @ key[:, :stop].mT
        logits = logits.view(heads, group, -1, stop)
        logits[..., start:].masked_fill_(position[start:stop] > asking, -torch.inf)
        share = logits.softmax(-1)
        out[:, :, start:stop] = (share.flatten(1, 2) @ value[:, :stop]).view(heads, group, -1, dim)
        # The chunk's last query is far from tokens before `end`, its first one from those up to `start - recent`.
        end, uneven = stop - recent, max(sinks, start - recent)
        if end <= sinks:
            continue
        share[..., uneven:end].masked_fill_(position[uneven:end] > asking - recent, 0)
        far = share[..., sinks:end]
        mass[:, sinks:end] += far.sum((1, 2))
        weight[:, :, start:stop] = far.sum(-1)
    return Listened(out, mass, weight)


def token_weights(mass: torch.Tensor) -> torch.Tensor:
    """What tokens count `[H, tokens]`, 1 in all: one half the same, one half by the attention that they got."""
    uniform = torch.full_like(mass, 1 / mass.shape[1])
    total = mass.sum(1, keepdim=True)
    attended = torch.where(total > 0, mass / total, uniform)
    return UNIFORM * uniform + (1 - UNIFORM) * attended


def value_metric(model: PreTrainedModel, layer: int) -> torch.Tensor:
    """`[H, D, D]`: the mean over a group's query heads of `W^T W`, where `W` `[hidden, D]` is the head's part of the
    projection behind the attention. The identity where no such projection is found.
    """
    shape = model_support.geometry(model)
    heads, dim = shape.num_kv_heads, shape.head_dim
    weight = _output_weight(model, layer)
    if weight is None or weight.shape[1] % (heads * dim):
        return torch.eye(dim).repeat(heads, 1, 1)
    by_head = (
        weight.detach().float().reshape(len(weight), heads, -1, dim).permute(1, 2, 0, 3)
    )  # [H, G, hidden, D]
    return (by_head.mT @ by_head).mean(1)


def _output_weight(model: PreTrainedModel, layer: int) -> torch.Tensor | None:
    """`[hidden, q_heads * head_dim]` of the layer's attention."""
    for module in model.modules():
        if getattr(module, "layer_idx", None) != layer:
            continue
        for name in _OUTPUT_NAMES:
            if isinstance(projection := getattr(module, name, None), nn.Linear):
                return projection.weight
    return None


def _moments(model: PreTrainedModel, sums: dict[int, _Sums], found: Sequence[Fisher]) -> Moments:
    layers, texts = list(sums.values()), len(found)
    keys = torch.stack([one.keys for one in layers]) / texts
    squares = torch.stack([one.key_squares for one in layers]) / texts
    values = torch.stack([one.value_squares for one in layers]) / texts
    weight = torch.stack([one.weight for one in layers])
    asked = torch.stack([one.query_squares for one in layers])
    moments = Moments(
        *(
            (one if one.shape[-1] != one.shape[-2] else (one + one.mT) / 2).float().cpu().numpy()
            for one in (
                keys,
                squares - keys[..., :, None] * keys[..., None, :],
                values,
                asked / weight.clamp(min=torch.finfo(torch.float32).tiny)[..., None, None],
                torch.stack([value_metric(model, layer) for layer in sums]),
                torch.stack([one.keys for one in found]).mean(0),
                torch.stack([one.values for one in found]).mean(0),
            )
        )
    )
    check(moments)
    return moments
