"""The model over exact K/V, and over any other K/V in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from tierkv.benchmarks.quant import FORCED
from tierkv.benchmarks.quant.inputs import Text
from tierkv.study.own_attention import take_over
from tierkv.study.probe import cache_argument, dynamic_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Exact(NamedTuple):
    """What one text is without any loss. Tensors are float32."""

    kv: torch.Tensor  # [layers, 2, kv_heads, context, head_dim]
    new_kv: torch.Tensor  # [layers, 2, kv_heads, FORCED, head_dim]
    queries: torch.Tensor  # [layers, q_heads, FORCED, head_dim]
    scale: float  # on the logits of attention
    logits: torch.Tensor  # [FORCED, vocabulary]
    forced: list[int]
    following: torch.Tensor  # [FORCED] the text's token after each forced one

    def attend(self, layer: int, kv: torch.Tensor) -> torch.Tensor:
        """What the layer's exact queries get from `kv` `[2, kv_heads, context, head_dim]` as context and the exact new
        K/V, `[q_heads, FORCED, head_dim]`. Forced token `t` sees the context and forced tokens `0..t`.
        """
        keys, values = torch.cat((kv, self.new_kv[layer]), 2)[:, None]
        seen = torch.ones(self.queries.shape[2], keys.shape[2], dtype=torch.bool).tril(kv.shape[2])
        return scaled_dot_product_attention(
            self.queries[layer][None], keys, values, attn_mask=seen, scale=self.scale, enable_gqa=True
        )[0]


class Listener:
    """Sits in the model's attention and keeps what it is asked while `forced` tokens run."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._asked: dict[int, tuple[torch.Tensor, torch.Tensor, float]] | None = None
        take_over(model, "tierkv-bench-listener", self._attend)

    def _attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> None:
        if self._asked is not None:
            new = torch.stack((key[0, :, -query.shape[2] :], value[0, :, -query.shape[2] :]))
            self._asked[layer] = (query[0].clone(), new, scale)

    def run(self, text: Text) -> Exact:
        """Read the context, then the forced tokens over it."""
        kv = prefill(self.model, text.tokens[: text.context])
        forced = text.tokens[text.context : text.context + FORCED]
        self._asked = {}
        logits = continue_over(self.model, kv, forced)
        asked = [self._asked[layer] for layer in sorted(self._asked)]
        self._asked = None
        return Exact(
            kv,
            torch.stack([new for _, new, _ in asked]),
            torch.stack([query for query, _, _ in asked]),
            asked[0][2],
            logits,
            forced,
            torch.tensor(text.tokens[text.context + 1 :]),
        )


@torch.inference_mode()
def prefill(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """The K/V of `tokens`, `[layers, 2, kv_heads, tokens, head_dim]`."""
    cache = dynamic_cache(model)
    model(torch.tensor([tokens]), logits_to_keep=1, **{cache_argument(model): cache})
    return torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])


@torch.inference_mode()
def continue_over(model: PreTrainedModel, kv: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Logits `[tokens, vocabulary]` of `tokens` after the K/V, which stay as they are."""
    cache = dynamic_cache(model)
    for layer, (keys, values) in enumerate(kv):
        cache.update(keys[None], values[None], layer)
    logits: torch.Tensor = model(torch.tensor([tokens]), **{cache_argument(model): cache}).logits[0]
    return logits
