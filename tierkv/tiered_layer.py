"""One full-attention layer of a `TieredCache`, and the attention functions of transformers that find it.

`update` hangs the layer on the key tensor; the attention function `"tierkv"` finds it there and attends pages.
"""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tierkv.dense_attention import dense_attention
from tierkv.errors import UnsupportedModel

if TYPE_CHECKING:
    from tierkv.transformers_cache import TieredCache

IMPLEMENTATION = "tierkv"
"""Name of the attention implementation in transformers' registries."""

_HANDLE = "tierkv_layer"

forwarding: contextvars.ContextVar[TieredCache | None] = contextvars.ContextVar(
    "tierkv_forward", default=None
)
"""The cache that the current forward writes; set by `tierkv.attach`'s wrapper."""


class TieredLayer(CacheLayerMixin):  # type: ignore[misc]
    """One full-attention layer of a `TieredCache`; its K/V are in pages, never in tensors.

    Args:
        cache: the cache it belongs to.
        page_layer: index into the pages' layers.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: TieredCache, page_layer: int) -> None:
        super().__init__()
        self.cache = cache
        self.page_layer = page_layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to allocate: the daemon owns the memory."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens into pages and return them untouched, the layer hung on the key."""
        self.cache.running_step.write(self.page_layer, key_states, value_states)
        setattr(key_states, _HANDLE, self)
        return key_states, value_states

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float,
        softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """`[batch, q_heads, columns, head_dim]` -> `[batch, columns, q_heads, head_dim]`."""
        return self.cache.running_step.attend(self.page_layer, query, keys, values, scale, softcap, sinks)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.padded_length + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.padded_length

    def get_max_length(self) -> int:
        return -1


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: pages where the key carries a layer, and dense attention everywhere else,
    which is sdpa's wherever sdpa can.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    layer: TieredLayer | None = getattr(key, _HANDLE, None)
    if layer is None:
        cache, index = forwarding.get(), getattr(module, "layer_idx", None)
        if cache is not None and index is not None and isinstance(cache.layers[index], TieredLayer):
            raise UnsupportedModel(
                f"{type(module).__name__} changes its keys after the cache update; pages cannot serve it"
            )
        if softcap is not None or sinks is not None:
            dropout = kwargs.get("dropout", 0.0)
            return dense_attention(
                module, query, key, value, attention_mask, scale, softcap, sinks, dropout
            ), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    if (
        kwargs.get("position_bias") is not None
    ):  # of a model whose source could not be read when it was attached
        raise UnsupportedModel(f"{type(module).__name__} attends with position_bias; pages cannot serve it")
    return layer.attend(query, key, value, scale, softcap or 0.0, sinks), None


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Pages hold no padding and are causal by construction: no mask. Everything else gets sdpa's.

    `local_size` marks the mask of sliding-window layers, which keep transformers' own cache.
    """
    if forwarding.get() is not None and kwargs.get("local_size") is None:
        return None
    return sdpa_mask(*args, **kwargs)  # type: ignore[no-any-return]


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)


__all__ = ["IMPLEMENTATION", "TieredLayer", "forwarding"]
