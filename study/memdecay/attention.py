"""The model's attention, as the study needs it: observed while a context is read, and masked while it is asked.

- `Observing`: plain SDPA, and beside it the attention that each token gets from chosen queries.
- `SharedContext`: many questions at once over one context, each of which sees its own subset of the context's tokens.
  A token that a row does not see is as good as evicted: keys carry their positions, so leaving a token out of the
  softmax is the same as cutting it out of the cache, and no cache is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tierkv.study.own_attention import take_over

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATION = "tierkv_study"


@dataclass
class Observing:
    """The masses of the last `window` queries of each forward.

    `masses` gets, for each of them, `[tokens so far]` float32 averaged over layers and heads, or with `by_head`
    `[layers, q_heads, tokens so far]` float16.
    """

    layers: int
    window: int
    by_head: bool = False
    masses: list[torch.Tensor] = field(default_factory=list)
    _layer_masses: list[torch.Tensor] = field(default_factory=list)

    def see(self, query: torch.Tensor, keys: torch.Tensor, scale: float) -> None:
        """query `[q_heads, queries, head_dim]`, keys `[kv_heads, tokens, head_dim]`, of one layer."""
        last = query[:, -self.window :]
        heads, queries, size = last.shape
        grouped = last.reshape(len(keys), -1, size)
        logits = (grouped @ keys.transpose(1, 2) * scale).float().view(heads, queries, -1)
        tokens = keys.shape[1]
        future = torch.ones(queries, tokens, dtype=torch.bool).triu(tokens - queries + 1)
        mass = logits.masked_fill_(future, -torch.inf).softmax(-1)
        self._layer_masses.append(mass.half() if self.by_head else mass.mean(0))
        if len(self._layer_masses) < self.layers:
            return
        whole = torch.stack(self._layer_masses)
        self._layer_masses.clear()
        first = tokens - queries
        for i in range(queries):
            seen = slice(first + i + 1)
            self.masses.append(whole[:, :, i, seen] if self.by_head else whole[:, i, seen].mean(0))


@dataclass
class SharedContext:
    """Rows of a batch that all continue one context.

    keys, values: of each layer, `[kv_heads, tokens, head_dim]`; seen: `[rows, tokens]` bool; own: `[rows, width]` bool,
    the places of the rows' own tokens that hold one (questions are padded on the left).
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    seen: torch.Tensor
    own: torch.Tensor
    _masked: tuple[int, int] = (0, 0)
    _masks: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """query `[rows, q_heads, queries, head_dim]`, key and value `[rows, kv_heads, own, head_dim]`; `[rows, queries,
        q_heads, head_dim]`.

        All rows are one: their queries stand in one long row over the context and every row's own tokens, of which the
        mask leaves each its own.
        """
        rows, heads, queries, size = query.shape
        groups, own = key.shape[1], key.shape[2]
        flat = query.transpose(0, 1).reshape(1, heads, rows * queries, size)
        keys = torch.cat([self.keys[layer], key.transpose(0, 1).reshape(groups, rows * own, size)], 1)
        values = torch.cat([self.values[layer], value.transpose(0, 1).reshape(groups, rows * own, size)], 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            flat, keys[None], values[None], self._mask(queries, own), scale=scale, enable_gqa=True
        )
        return out.view(heads, rows, queries, size).permute(1, 2, 0, 3)

    def _mask(self, queries: int, own: int) -> torch.Tensor:
        """`[rows * queries, tokens + rows * own]` bool, the same in every layer of a forward."""
        if self._masked != (queries, own):
            rows = len(self.seen)
            causal = torch.ones(queries, own, dtype=torch.bool).tril(own - queries)
            near = torch.zeros(rows, queries, rows, own, dtype=torch.bool)
            each = torch.arange(rows)
            near[each, :, each] = causal & self.own[:, None, :own]
            far = self.seen[:, None].expand(-1, queries, -1).reshape(rows * queries, -1)
            self._masks = torch.cat([far, near.view(rows * queries, rows * own)], 1)
            self._masked = (queries, own)
        return self._masks


class StudyAttention:
    """The attention of a model: plain SDPA until told otherwise."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._mode: Observing | SharedContext | None = None
        take_over(model, IMPLEMENTATION, self._attend)

    @contextmanager
    def using(self, mode: Observing | SharedContext) -> Iterator[None]:
        self._mode = mode
        try:
            yield
        finally:
            self._mode = None

    def _attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor | None:
        if isinstance(self._mode, SharedContext):
            return self._mode.attend(layer, query, key, value, scale)
        if isinstance(self._mode, Observing):
            self._mode.see(query[0], key[0], scale)
        return None
