"""Attention over tensors with soft-capping or sinks, which torch's sdpa does not know: for layers that keep
transformers' own cache, and for forwards without a `TieredCache`.
"""

from __future__ import annotations

import torch
from torch import nn


def dense_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    scale: float, softcap: float | None, sinks: torch.Tensor | None, dropout: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """`[batch, queries, q_heads, head_dim]`, in the query's dtype; softmax is in float32.

    Args:
        query: `[batch, q_heads, queries, head_dim]`; key, value: `[batch, kv_heads, tokens, head_dim]`.
        mask: bool, true where a query sees a token; `None`: query `t` of several sees tokens `0..t`, a single one all.
        sinks: `[q_heads]` logits that give no value.
    """
    group = query.shape[1] // key.shape[1]
    logits = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    queries, tokens = logits.shape[2:]
    if mask is None and queries > 1:
        mask = torch.ones(queries, tokens, dtype=torch.bool, device=logits.device).tril()
    if mask is not None:
        # Not minus infinity: a padded query, which sees nothing, would become NaN.
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    if sinks is not None:
        column = sinks.to(logits.dtype).reshape(1, -1, 1, 1).expand(len(logits), -1, queries, 1)
        logits = torch.cat([logits, column], -1)
    weights = torch.softmax(logits, -1, dtype=torch.float32)[..., :tokens].to(query.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous()


__all__ = ["dense_attention"]
