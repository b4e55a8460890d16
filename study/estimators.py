"""What two vectors a page, a byte a dimension each, tell of a query's attention to the page without its keys.

Three ways of the same size, for each layer and KV head:

digest      mean and standard deviation of the keys, read as `tierkv.prefetch.deviation` says: an estimate of the mass
min_max     middle and half-width of the box around the keys; its best corner for the query bounds every logit
            (Tang et al. 2024, "Quest: Query-aware sparsity for efficient long-context LLM inference")
mean_box    mean of the keys and their mean absolute deviation, read as a box
            (Chen et al. 2024, "ArkVale: Efficient generative LLM inference with recallable key-value eviction")

A box takes each of the page's n tokens for its best corner, so its log-mass is `ln n` more than that corner's logit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.geometry import PAGE_TOKENS, Geometry
from tierkv.prefetch.deviation import DEVIATION, DEVIATION_CODES, MEAN_CODES
from tierkv.regions import Run
from tierkv.table import lay_out


class Layout(NamedTuple):
    """Pages in token order."""

    counts: NDArray[np.int64]  # [pages] tokens of each

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def ends(self) -> NDArray[np.int64]:
        """`[pages]`: the token after a page's last."""
        return np.cumsum(self.counts)

    @property
    def starts(self) -> NDArray[np.int64]:
        return self.ends - self.counts

    @property
    def page_of(self) -> torch.Tensor:
        """`[tokens]`, int64."""
        return torch.arange(len(self.counts)).repeat_interleave(torch.from_numpy(self.counts))

    def pages(self, keys: torch.Tensor) -> list[torch.Tensor]:
        """The keys `[layers, kv_heads, tokens, head_dim]` of each page."""
        return [
            keys[:, :, start:end] for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        ]

    def log_mass(self, logits: torch.Tensor) -> torch.Tensor:
        """The true log-mass `[..., pages]` of logits `[..., tokens]`."""
        slots = torch.arange(int(self.counts.max()))
        filled = slots < torch.from_numpy(self.counts).unsqueeze(1)
        at = (torch.from_numpy(self.starts).unsqueeze(1) + slots).clamp(max=self.tokens - 1)
        return logits[..., at].masked_fill(~filled, -torch.inf).logsumexp(-1)

    def ends_kept(self, first: int, last: int) -> torch.Tensor:
        """`[pages]`, bool: pages with a token among the `first` or the `last` ones."""
        return torch.from_numpy((self.starts < first) | (self.ends > self.tokens - last))


class Summary(NamedTuple):
    """Two vectors a page: `[layers, kv_heads, pages, head_dim]`, or without layers for one of them."""

    center: torch.Tensor
    spread: torch.Tensor  # not negative

    def layer(self, layer: int, pages: torch.Tensor) -> Summary:
        """Of one layer and some pages (a mask or indices)."""
        return Summary(self.center[layer][:, pages], self.spread[layer][:, pages])


class Estimator(NamedTuple):
    name: str
    summarize: Callable[[torch.Tensor, Layout], Summary]
    """Keys `[layers, kv_heads, tokens, head_dim]` to two vectors a page."""

    log_mass: Callable[[torch.Tensor, Summary, torch.Tensor, float], torch.Tensor]
    """Query `[q_heads, queries, head_dim]`, summary of one layer, counts `[pages]` and the factor on logits to the
    estimated log-mass `[q_heads, queries, pages]`."""


def layout_of(runs: Iterable[Run], page_tokens: int = PAGE_TOKENS) -> Layout:
    """Region-aligned pages."""
    counts: list[int] = []
    for placed in lay_out(None, 0, runs, page_tokens, straddle=False):
        if placed.fresh:
            counts.append(0)
        counts[-1] += placed.tokens
    return Layout(np.array(counts, np.int64))


def grouped(query: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Inner products `[q_heads, queries, n]` with `vectors` `[kv_heads, n, head_dim]`; query heads share KV heads."""
    flat = query.reshape(len(vectors), -1, query.shape[-1]) @ vectors.transpose(1, 2)
    return flat.reshape(*query.shape[:2], -1)


def digest_summary(keys: torch.Tensor, layout: Layout) -> Summary:
    """Mean and standard deviation, through the bytes of a digest."""
    layers, heads, _, dim = keys.shape
    geometry = Geometry(layers, heads, dim, "float32", int(layout.counts.max()))
    digests = DEVIATION.of(geometry, layers)
    page, digest = np.zeros(geometry.shape, np.float32), np.zeros(digests.shape.nbytes, np.uint8)
    found = []
    for part in layout.pages(keys):
        count = part.shape[2]
        page[:, 0, :, :count] = part.numpy()
        digests.write(page.reshape(-1).view(np.uint8), count, digest)
        found.append(digests.read(digest))
    mean, deviation = (torch.from_numpy(np.stack(vectors, 2)) for vectors in zip(*found, strict=True))
    return Summary(mean, deviation)


def digest_log_mass(
    query: torch.Tensor, summary: Summary, counts: torch.Tensor, scale: float
) -> torch.Tensor:
    """`tierkv.prefetch.deviation.log_mass` of all pages at once."""
    sigma = grouped(query**2, summary.spread**2).sqrt() * abs(scale)
    log_counts = counts.log()
    a = (2 * log_counts).sqrt()
    above = torch.where(sigma <= a, sigma**2 / 2, a * sigma - a**2 / 2)
    return log_counts + grouped(query, summary.center) * scale + above


def min_max_summary(keys: torch.Tensor, layout: Layout) -> Summary:
    parts = layout.pages(keys)
    top = torch.stack([part.amax(2) for part in parts], 2)
    bottom = torch.stack([part.amin(2) for part in parts], 2)
    return _as_bytes((top + bottom) / 2, (top - bottom) / 2)


def mean_box_summary(keys: torch.Tensor, layout: Layout) -> Summary:
    parts = layout.pages(keys)
    mean = torch.stack([part.mean(2) for part in parts], 2)
    off = [(part - part.mean(2, keepdim=True)).abs().mean(2) for part in parts]
    return _as_bytes(mean, torch.stack(off, 2))


def box_log_mass(query: torch.Tensor, summary: Summary, counts: torch.Tensor, scale: float) -> torch.Tensor:
    corner = grouped(query, summary.center) * scale + grouped(query.abs(), summary.spread) * abs(scale)
    return counts.log() + corner


def offset_of(estimates: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """What each head's log-masses lack on average, `[q_heads, 1, 1]`; both are `[q_heads, queries, pages]`."""
    return (true - estimates).mean((1, 2), keepdim=True)


def pages_before(shares: torch.Tensor, page: int) -> int:
    """How many pages of `shares` `[pages]` have more than this one: 0 is the first."""
    return int((shares > shares[page]).sum())


def _as_bytes(center: torch.Tensor, spread: torch.Tensor) -> Summary:
    """Rounded to a byte a dimension with one scale a vector, as digests are."""
    return Summary(_rounded(center, MEAN_CODES), _rounded(spread, DEVIATION_CODES))


def _rounded(values: torch.Tensor, codes: int) -> torch.Tensor:
    scale = values.abs().amax(-1, keepdim=True) / codes
    return torch.where(scale > 0, (values / scale).round() * scale, 0.0)


DIGEST = Estimator("digest", digest_summary, digest_log_mass)
MIN_MAX = Estimator("min_max", min_max_summary, box_log_mass)
MEAN_BOX = Estimator("mean_box", mean_box_summary, box_log_mass)
ESTIMATORS = (DIGEST, MIN_MAX, MEAN_BOX)
