"""Estimates against recorded attention: shares, what the best pages by estimate hold, and whose opinion counts.

**Direct reads** are chosen by each layer and KV head for itself, by the shares of its query heads added up.
**Promotion** chooses pages for all at once, so opinions are put together (`AGGREGATES`); what counts is the page's
share averaged over all heads and layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tierkv.attention.reference_cold import shares_of
from tierkv.benchmarks.recall.recorded import Recorded
from tierkv.geometry import PAGE_TOKENS
from tierkv.prefetch.estimators import Estimator
from tierkv.prefetch.opinions import Opinions
from tierkv.prefetch.transform import Sample

SINK_TOKENS, RECENT_TOKENS = PAGE_TOKENS, 64
"""Pages with one of these are resident where estimators are compared."""

BEST = 0.1
"""Of cold pages: those whose mass is compared."""

TOP_SHARE = 0.05
"""Of heads, by page: those that `top` averages."""

Aggregate = Callable[[torch.Tensor], torch.Tensor]
"""Shares `[L, Q, N, pages]` to one number a page, `[N, pages]`."""


class Records(NamedTuple):
    """An estimator, and how many pages after the first share a record."""

    estimator: Estimator
    together: int = 1

    @property
    def name(self) -> str:
        return (
            self.estimator.name if self.together == 1 else f"{self.estimator.name} of {self.together} pages"
        )

    def nbytes(self, dim: int) -> float:
        """Of a page, layer and KV head."""
        return self.estimator.nbytes(dim) / self.together


def group_of(pages: int, together: int) -> torch.Tensor:
    """`[pages]` int64: the first page, which no other is like, is alone."""
    return (torch.arange(pages) + together - 1) // together


def sample(recorded: Recorded, together: int = 1) -> Sample:
    """Keys by page, or by several, zeros where there is no token; and queries by KV head."""
    layers, heads, _, dim = recorded.keys.shape
    of_page = torch.from_numpy(recorded.layout.counts)
    groups = group_of(len(of_page), together)
    counts = torch.zeros(int(groups[-1]) + 1, dtype=torch.int64).index_add_(0, groups, of_page)
    slots, starts = torch.arange(together * PAGE_TOKENS), counts.cumsum(0) - counts
    at = (starts[:, None] + slots).clamp(max=recorded.layout.tokens - 1)
    keys = recorded.keys[:, :, at.flatten()].float().reshape(layers, heads, len(counts), len(slots), dim)
    keys *= (slots < counts[:, None])[..., None]
    return Sample(keys.numpy(), counts.numpy(), recorded.queries.reshape(layers, heads, -1, dim).numpy())


def estimates(records: Records, recorded: Recorded) -> torch.Tensor:
    """Log-masses `[L, Q, N, P]`. Pages that share a record share its mass by their tokens."""
    given = sample(recorded, records.together)
    written = records.estimator.summarize(given.keys, given.counts)
    found = torch.from_numpy(records.estimator.log_mass(given.queries, written, given.counts, recorded.scale))
    counts = torch.from_numpy(recorded.layout.counts)
    groups = group_of(len(counts), records.together)
    part = (counts / torch.from_numpy(given.counts)[groups]).log()
    return (found[..., groups] + part).reshape(recorded.masses.shape)


def of_last_layers(log_masses: torch.Tensor, layers: int) -> torch.Tensor:
    """Nothing is told of the layers before the last so many."""
    held = log_masses.clone()
    held[: len(held) - layers] = -torch.inf
    return held


def shares(log_masses: torch.Tensor, recorded: Recorded, cold: torch.Tensor) -> torch.Tensor:
    """Estimated shares `[L, Q, N, cold pages]` of attention over everything."""
    near = torch.logaddexp(recorded.masses[..., ~cold].logsumexp(-1), recorded.own)
    each = zip(log_masses, near, strict=True)
    return torch.stack([shares_of(estimate[..., cold], own) for estimate, own in each])


def cold_pages(recorded: Recorded) -> torch.Tensor:
    return ~recorded.layout.ends_kept(SINK_TOKENS, RECENT_TOKENS)


def captured(scores: torch.Tensor, true: torch.Tensor) -> float:
    """Mass of the best `BEST` of pages by score over that of the best by mass; both `[..., pages]`."""
    count = math.ceil(BEST * scores.shape[-1])
    got = true.gather(-1, scores.topk(count, -1).indices).sum()
    return float(got / true.topk(count, -1).values.sum())


def by_kv_head(shares: torch.Tensor, heads: int) -> torch.Tensor:
    """`[L, H, N, pages]`: summed over a KV head's query heads."""
    return shares.reshape(len(shares), heads, -1, *shares.shape[2:]).sum(2)


def mean(shares: torch.Tensor) -> torch.Tensor:
    return shares.mean((0, 1))


def largest(shares: torch.Tensor) -> torch.Tensor:
    return shares.flatten(0, 1).amax(0)


def top(shares: torch.Tensor) -> torch.Tensor:
    flat = shares.flatten(0, 1)
    return flat.topk(math.ceil(TOP_SHARE * len(flat)), 0).values.mean(0)


def last_third(shares: torch.Tensor) -> torch.Tensor:
    return mean(shares[-(len(shares) // 3) :])


AGGREGATES: dict[str, Aggregate] = {"mean": mean, "max": largest, "top": top, "last_third": last_third}


def of_layer(shares: torch.Tensor, heads: int) -> torch.Tensor:
    """`[L, H, N, pages]`: the same for all KV heads of a layer."""
    return shares.sum(1, keepdim=True).expand(-1, heads, -1, -1)


def largest_of_group(shares: torch.Tensor, heads: int) -> torch.Tensor:
    """`[L, H, N, pages]`."""
    return shares.reshape(len(shares), heads, -1, *shares.shape[2:]).amax(2)


DIRECT_AGGREGATES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": by_kv_head, "max": largest_of_group, "layer": of_layer,
}  # fmt: skip
"""How a KV head that reads in place hears its query heads, or all of its layer."""


def weighted(weights: torch.Tensor) -> Aggregate:
    """Sum with a weight for each layer and KV head, `[L, H]`, of the mean of its query heads."""

    def aggregate(shares: torch.Tensor) -> torch.Tensor:
        return torch.einsum("lh,lhnp->np", weights, of_groups(shares, weights.shape[1]))

    return aggregate


def of_groups(shares: torch.Tensor, heads: int) -> torch.Tensor:
    """`[L, H, N, pages]`: the mean of a KV head's query heads."""
    return shares.reshape(len(shares), heads, -1, *shares.shape[2:]).mean(2)


def learned(given: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Weights `[L, H]` (`tierkv.prefetch.opinions`).

    Args:
        given: of each text estimated shares `[L, H, N, pages]`, as of `of_groups`, and true ones `[L, Q, N, pages]`.
    """
    heads = given[0][0].shape[:2]
    opinions = Opinions(math.prod(heads))
    for estimated, true in given:
        opinions.add(estimated.flatten(0, 1).flatten(1).numpy(), mean(true).flatten().numpy())
    return torch.from_numpy(opinions.weights()).float().reshape(heads)


def with_offsets(log_masses: torch.Tensor, recorded: Recorded, cold: torch.Tensor) -> torch.Tensor:
    """Each head's estimates moved by what those of resident pages lack on average: their mass is known."""
    off = (recorded.masses - log_masses)[..., ~cold].mean((2, 3), keepdim=True)
    return log_masses + off


MOVED = 0.8
"""Cosine between a head's query and the one before, below which the head chooses anew (Liu et al. 2025, "FreeKV:
Boosting KV cache retrieval for efficient LLM inference")."""


class Late(NamedTuple):
    """Mass that direct reads capture where pages were chosen by the query before, a KV head each: always; but for heads
    whose query moved far, which are the share `redone`.
    """

    late: float
    corrected: float
    redone: float


def a_step_late(estimated: torch.Tensor, true: torch.Tensor, recorded: Recorded) -> Late:
    """Of shares by KV head `[L, H, N, pages]`; first queries of an ask have none before them and count nowhere."""
    follow = torch.nonzero(recorded.asks[1:] == recorded.asks[:-1])[:, 0] + 1
    queries = recorded.queries.reshape(*true.shape[:2], -1, *recorded.queries.shape[2:])  # [L, H, G, N, D]
    along = torch.cosine_similarity(queries[..., follow, :], queries[..., follow - 1, :], dim=-1).mean(2)
    moved = (along < MOVED).unsqueeze(-1)
    now, before, own = estimated[:, :, follow], estimated[:, :, follow - 1], true[:, :, follow]
    return Late(
        captured(before, own), captured(torch.where(moved, now, before), own), float(moved.float().mean())
    )
