"""Attention over pages that are all of one kind, without a daemon."""

from __future__ import annotations

import numpy as np
import torch

from tierkv.attention.contract import PagedAttention, Pages, PoolView
from tierkv.table import Kind

TOLERANCE = 1e-2
"""Of the output, relative: more than this and attention did not read the pages."""


class PagedSide:
    """`query` `[rows, q_heads, head_dim]`; each row attends `tokens` tokens, pages of its own, `stride` bytes apart."""

    def __init__(
        self, implementation: PagedAttention, query: torch.Tensor, pool: PoolView, kind: Kind, stride: int, tokens: int
    ) -> None:  # fmt: skip
        self.implementation, self.query, self.pool, self.kind, self.stride = (
            implementation, query, pool, kind, stride,
        )  # fmt: skip
        self.pages = self._pages(tokens // pool.geometry.page_tokens)

    def _pages(self, count: int) -> Pages:
        """`count` of each row."""
        tokens, rows = self.pool.geometry.page_tokens, len(self.query)
        index = np.arange(count * rows, dtype=np.int64)
        return Pages(
            index * self.stride,
            np.full(len(index), self.kind, np.int8),
            np.full(len(index), tokens, np.int32),
            index * tokens,
            np.arange(rows + 1, dtype=np.int64) * count,
            len(index) * tokens,
        )

    def attend(self, layer: int) -> torch.Tensor:
        return self._attend(self.pages, layer)

    def _attend(self, pages: Pages, layer: int) -> torch.Tensor:
        scale = self.pool.geometry.head_dim**-0.5
        return self.implementation.decode(self.query, self.pool, pages, layer, scale).out

    def reads(self, first: torch.Tensor) -> bool:
        """Whether attention over the first page is that over `first`, its K/V `[layers, 2, heads, tokens, dim]`."""
        keys, values = first[0].float()[:, None]
        query = self.query[:1]
        right = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, None], keys, values, enable_gqa=True
        )[:, :, 0]
        error = (self._attend(self._pages(1), 0)[:1] - right).norm() / right.norm()
        return bool(error < TOLERANCE)
