"""What digests tell about cold pages, and which of them are read: the rules of `contract`, in float64 torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tierkv.attention.contract import ColdPages, PoolView, Scale


def estimates_of(
    query: torch.Tensor, pool: PoolView, pages: ColdPages, which: Sequence[int], layer: int, scale: Scale
) -> torch.Tensor:
    """Log-mass `[q_heads, queries, pages]` of cold pages, from digests alone; minus infinity where there is none."""
    digests, heads = pool.digests, pool.geometry.num_kv_heads
    assert digests is not None, "there are no digests here"
    estimates = torch.full((*query.shape[:2], len(which)), -torch.inf, dtype=torch.float64)
    asked = query.double().reshape(heads, -1, query.shape[-1]).numpy()
    for column, page in enumerate(which):
        offset = int(pages.digests[page])
        if offset < 0:
            continue
        digest = np.asarray(pool.data)[offset : offset + digests.shape.nbytes]
        known = digests.log_mass(digest, layer, asked, int(pages.counts[page]), scale.factor, scale.cap)
        estimates[:, :, column] = torch.from_numpy(known).reshape(query.shape[:2])
    return estimates


def shares_of(estimates: torch.Tensor, log_sum_exp: torch.Tensor) -> torch.Tensor:
    """Estimated shares `[q_heads, queries, pages]`, given the log-sum-exp `[q_heads, queries]` of what is in HBM."""
    joint = torch.logaddexp(log_sum_exp, estimates.logsumexp(-1)).unsqueeze(-1)
    return torch.exp(estimates - joint).masked_fill(estimates.isneginf(), 0.0)


def weighted_mean(shares: torch.Tensor, pool: PoolView, layer: int) -> torch.Tensor:
    """`[pages]` from `[q_heads, pages]`, as much of each head as its KV head's opinion counts."""
    digests = pool.digests
    assert digests is not None
    weights = torch.from_numpy(digests.weights[layer - digests.shape.first_layer])
    group = len(shares) // len(weights)
    return (shares * weights.repeat_interleave(group).unsqueeze(-1)).mean(0)


def pages_read(
    estimates: torch.Tensor, shares: torch.Tensor, kv_heads: int, count: int, together: bool
) -> torch.Tensor:
    """Which cold pages each query head reads, `[q_heads, pages]`: the `count` best of its KV head.

    Together (a chunk), all read what any KV head names.
    """
    q_heads, queries, pages = shares.shape
    group = q_heads // kv_heads
    wanted = shares.mean(1).reshape(kv_heads, group, pages).sum(1)
    told = ~estimates.isneginf().reshape(kv_heads, group * queries, pages).all(1)
    order = wanted.masked_fill(~told, -1.0).sort(dim=-1, descending=True, stable=True).indices[:, :count]
    read = torch.zeros(kv_heads, pages, dtype=torch.bool).scatter_(-1, order, True) & told
    if together:
        read = read.any(0, keepdim=True).expand(kv_heads, pages)
    return read.repeat_interleave(group, 0)
