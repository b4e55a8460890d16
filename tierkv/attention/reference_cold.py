"""What digests tell about cold pages, and which of them are read: the rules of `contract`, in float64 torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tierkv.attention.contract import ColdPages, PoolView, Scale
from tierkv.prefetch.digests import digest_shape, log_mass, read


def estimates_of(
    query: torch.Tensor, pool: PoolView, pages: ColdPages, which: Sequence[int], layer: int, scale: Scale
) -> torch.Tensor:
    """Log-mass `[q_heads, queries, pages]` of cold pages, from digests alone; minus infinity where there is none."""
    shape = digest_shape(pool.geometry, pool.digest_layers)
    at = layer - (pool.geometry.num_layers - shape.layers)
    group = query.shape[0] // pool.geometry.num_kv_heads
    estimates = torch.full((*query.shape[:2], len(which)), -torch.inf, dtype=torch.float64)
    for column, page in enumerate(which):
        offset = int(pages.digests[page])
        if offset < 0:
            continue
        digest = read(shape, np.asarray(pool.data)[offset : offset + shape.nbytes])
        mean, deviation = (
            torch.from_numpy(part[at]).double().repeat_interleave(group, 0).unsqueeze(1) for part in digest
        )
        means = (query.double() * mean).sum(-1) * scale.factor
        sigmas = torch.sqrt(((query.double() * deviation) ** 2).sum(-1)) * abs(scale.factor)
        for head in range(query.shape[0]):
            for q in range(query.shape[1]):
                known = log_mass(
                    float(means[head, q]), float(sigmas[head, q]), int(pages.counts[page]), scale.cap
                )
                estimates[head, q, column] = known if np.isfinite(known) else -torch.inf
    return estimates


def shares_of(estimates: torch.Tensor, log_sum_exp: torch.Tensor) -> torch.Tensor:
    """Estimated shares `[q_heads, queries, pages]`, given the log-sum-exp `[q_heads, queries]` of what is in HBM."""
    joint = torch.logaddexp(log_sum_exp, estimates.logsumexp(-1)).unsqueeze(-1)
    return torch.exp(estimates - joint).masked_fill(estimates.isneginf(), 0.0)


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
