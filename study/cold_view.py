"""Attention over a DynamicCache as if some of its pages lay in host memory: estimated, and read in place or not.

Everything stays exact and in one place; a `ColdView` says what attention may see of the context's pages, by the rules
of `tierkv.attention.contract`. So a question can be asked many ways over one prefill, without a daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from tierkv.attention.contract import CHOOSING_QUERIES, READ_ALL
from tierkv.attention.reference_cold import pages_read, shares_of
from tierkv.study.estimators import DIGEST, Layout, Summary, grouped
from tierkv.study.own_attention import take_over

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATION = "tierkv_cold_view"


class Look(NamedTuple):
    """What one layer's queries see of the context, before anything is left out."""

    layer: int
    query: torch.Tensor  # [q_heads, queries, head_dim]
    pages: torch.Tensor  # [q_heads, queries, pages] log-mass
    own: torch.Tensor  # [q_heads, queries] log-sum-exp over what came after the context
    scale: float

    def near(self, resident: torch.Tensor) -> torch.Tensor:
        """Log-sum-exp `[q_heads, queries]` of the resident pages and what came after the context."""
        return torch.logaddexp(self.pages[..., resident].logsumexp(-1), self.own)


@dataclass
class ColdView:
    """One sequence, of which the first `layout.tokens` are the context.

    A chunk reads what any KV head names by its last `CHOOSING_QUERIES` queries, a decode step what each names itself.
    """

    layout: Layout
    digests: Summary  # of every layer
    resident: torch.Tensor  # [pages] bool; the others are cold
    read: int  # cold pages that a KV head reads in place, or READ_ALL
    look: Callable[[Look], None] | None = None  # told of each layer
    shares: dict[int, torch.Tensor] = field(default_factory=dict)
    """Layer: the last query's estimated share of each page, `[pages]`, averaged over heads; 0 for resident ones."""

    def ranking(self, layers: slice) -> torch.Tensor:
        """Estimated shares `[pages]`, averaged over heads and `layers`."""
        return torch.stack([self.shares[layer] for layer in sorted(self.shares)])[layers].mean(0)

    def bring_back(self, count: int, layers: slice) -> None:
        """The `count` cold pages with the largest estimated shares become resident."""
        best = self.ranking(layers).masked_fill(self.resident, -1.0).topk(min(count, self.cold_pages)).indices
        self.resident = self.resident.clone().index_fill_(0, best, True)

    @property
    def cold_pages(self) -> int:
        return int((~self.resident).sum())

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """`[q_heads, queries, head_dim]`; keys and values `[kv_heads, tokens, head_dim]` end with the queries' own."""
        tokens, queries, cold = self.layout.tokens, query.shape[1], ~self.resident
        future = torch.ones(queries, keys.shape[1], dtype=torch.bool).triu(keys.shape[1] - queries + 1)
        logits = (grouped(query, keys) * scale).masked_fill_(future, -torch.inf)
        pages = self.layout.log_mass(logits[..., :tokens])
        look = Look(layer, query, pages, logits[..., tokens:].logsumexp(-1), scale)
        if self.look is not None:
            self.look(look)
        asking = slice(-CHOOSING_QUERIES, None)
        counts = torch.from_numpy(self.layout.counts).float()[cold]
        estimates = DIGEST.log_mass(query[:, asking], self.digests.layer(layer, cold), counts, scale)
        shares = shares_of(estimates, look.near(self.resident)[:, asking])
        self.shares[layer] = torch.zeros(len(cold)).masked_scatter_(cold, shares[:, -1].mean(0))
        seen = self.resident.repeat(len(query), 1)
        count = self.cold_pages if self.read == READ_ALL else self.read
        seen[:, cold] = pages_read(estimates, shares, len(keys), count, together=queries > 1)
        logits[..., :tokens].masked_fill_(~seen[:, self.layout.page_of].unsqueeze(1), -torch.inf)
        weights = logits.softmax(-1).reshape(len(keys), -1, keys.shape[1])
        return (weights @ values).reshape(query.shape)


class ViewedAttention:
    """The attention of a model (batches of one): through `view`, or plain SDPA while there is none."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.view: ColdView | None = None
        take_over(model, IMPLEMENTATION, self._attend)

    def _attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor | None:
        if self.view is None:
            return None
        return self.view.attend(layer, query[0], key[0], value[0], scale).transpose(0, 1).unsqueeze(0)
