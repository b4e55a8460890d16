"""Which pages a budget makes attendable: the first page and the open one exact, others low-bit, the rest cold.

Bytes are those of bfloat16 pages: exact frames, low-bit pages in the daemon's default codec, and a digest for each cold
page. Pages of pinned regions stay attendable, as far as the quota of the default configuration lets them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tierkv.benchmarks.recall.inputs import Input
from tierkv.benchmarks.recall.recorded import Recorded
from tierkv.geometry import Geometry
from tierkv.quant.contract import Codec
from tierkv.regions import Region
from tierkv.study.estimators import Layout

PINNED = Region.SYSTEM
PIN_QUOTA = 0.5


class Room(NamedTuple):
    """A budget for one context."""

    budget: int
    exact_bytes: int
    low_bytes: int
    exact: torch.Tensor  # [P] bool
    pinned: torch.Tensor  # [P] bool; none of them is exact

    @classmethod
    def of(cls, given: Input, layout: Layout, share: float, geometry: Geometry, codec: Codec) -> Room:
        """`share` is of the context's bytes in bfloat16."""
        low = codec.page_bytes(geometry)
        budget = int(share * layout.tokens * geometry.page_bytes / geometry.page_tokens)
        exact = exact_pages(layout)
        pinned = region_pages(given, layout) & ~exact
        held = int(PIN_QUOTA * budget) // low
        return cls(budget, geometry.page_bytes, low, exact, pinned & (pinned.cumsum(0) <= held))

    def pages(self, digest_bytes: int) -> int:
        """Low-bit pages that fit, pinned ones included, while each cold page keeps a digest."""
        others = int((~self.exact).sum())
        left = self.budget - int(self.exact.sum()) * self.exact_bytes - others * digest_bytes
        return max(0, min(others, left // (self.low_bytes - digest_bytes)))

    def attendable(self, scores: torch.Tensor, digest_bytes: int) -> torch.Tensor:
        """`[N, P]` bool: exact and pinned pages, and as many of the best by `scores` `[N, P]` as fit."""
        order = scores.masked_fill(self.pinned, torch.inf).masked_fill(self.exact, -torch.inf)
        best = order.topk(max(self.pages(digest_bytes), int(self.pinned.sum())), -1).indices
        return self.exact.expand_as(order).clone().scatter_(-1, best, True)


def exact_pages(layout: Layout) -> torch.Tensor:
    """`[P]` bool: the first and the open one."""
    at = torch.arange(len(layout.counts))
    return (at == 0) | (at == at[-1])


def region_pages(given: Input, layout: Layout) -> torch.Tensor:
    """`[P]` bool: pages of the pinned region."""
    found, start = torch.zeros(len(layout.counts), dtype=torch.bool), 0
    for run in given.runs:
        if run.region is PINNED:
            inside = (layout.starts >= start) & (layout.starts < start + run.tokens)
            found |= torch.from_numpy(inside)
        start += run.tokens
    return found


def recall(attendable: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """`[N]`: the share of attention that lies on attendable pages and new tokens. Both are `[N, P]`, `shares` those of
    pages, mean over heads and layers.
    """
    return 1 - (shares * ~attendable).sum(-1)


def recall_in_place(attendable: torch.Tensor, wanted: torch.Tensor, shares: torch.Tensor, read: int) -> float:
    """The mean of `recall` where each layer and KV head also reads, in place, the `read` pages that it wants most among
    those that are not attendable.

    Args:
        attendable: `[N, P]` bool.
        wanted: `[L, H, N, P]`, at least 0.
        shares: `[L, Q, N, P]`.
    """
    hidden = wanted.masked_fill(attendable, -1.0)
    best = hidden.topk(min(read, hidden.shape[-1]), -1).indices
    reads = torch.zeros_like(hidden, dtype=torch.bool).scatter_(-1, best, True) | attendable
    group = shares.shape[1] // wanted.shape[1]
    missed = (shares * ~reads.repeat_interleave(group, 1)).sum(-1)
    return 1 - float(missed.mean())


def a_step_late(scores: torch.Tensor, asks: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Scores `[N, P]` of the query before; of the first query of each ask what was known before it, `first` `[P]`."""
    late = scores.roll(1, 0)
    late[0] = first
    late[1:][asks[1:] != asks[:-1]] = first
    return late


def wasted(
    attendable: torch.Tensor, before: torch.Tensor, shares: torch.Tensor, recorded: Recorded, lift: float
) -> float:
    """Of pages brought in (attendable, not so in `before` `[P]`), the share that no query of their ask gave `lift`
    times what as many average tokens get; 0 where none is.
    """
    counts = torch.from_numpy(recorded.layout.counts)
    used = shares >= lift * counts / recorded.layout.tokens
    brought = unused = 0
    for ask in range(int(recorded.asks.max()) + 1):
        mine = recorded.asks == ask
        came = attendable[mine].any(0) & ~before
        brought += int(came.sum())
        unused += int((came & ~used[mine].any(0)).sum())
    return unused / brought if brought else 0.0
