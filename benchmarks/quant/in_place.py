"""How long attention takes over packed pages in place, beside exact pages in place: a token, all layers, one thread."""

from __future__ import annotations

import numpy as np
import torch

from tierkv import attention
from tierkv.attention.contract import PagedAttention, Pages, PoolView
from tierkv.benchmarks.pairs import Figures, interleave
from tierkv.benchmarks.quant.pages import from_pages, to_pages
from tierkv.benchmarks.quant.speed import one_thread, seconds, window
from tierkv.geometry import Geometry
from tierkv.quant.contract import Codec, Floats
from tierkv.table import Kind

TOKENS = 4096
PAIRS, QUICK_PAIRS = 15, 3

TOLERANCE = 1e-2
"""Of the output, relative: more than this and attention did not read the pages."""


def measure(codec: Codec, state: Floats, geometry: Geometry, q_heads: int, quick: bool) -> Figures | None:
    """Milliseconds, packed (`ours`) and exact (`peer`); `None` where attention does not read this form in place."""
    count = TOKENS // geometry.page_tokens
    some = to_pages(geometry, window(geometry, quick=True))
    exact = np.resize(some, (count, geometry.page_bytes))
    packed = np.zeros((count, -(-codec.page_bytes(geometry) // 64) * 64), np.uint8)
    for page, out in zip(exact, packed, strict=True):
        codec.encode(geometry, page, geometry.page_tokens, state, out)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, q_heads, geometry.head_dim, generator=generator)
    implementation = attention.get("cpu")
    sides = [
        _Side(implementation, query, PoolView(data.ravel(), geometry, codec, state), kind, data.shape[1])
        for data, kind in ((packed, Kind.QUANTIZED), (exact, Kind.EXACT))
    ]
    decoded = np.empty_like(exact[0])
    codec.decode(geometry, packed[0], geometry.page_tokens, state, decoded)
    if not sides[0].reads(from_pages(geometry, decoded[None])):
        return None
    with one_thread():
        return interleave(sides[0].milliseconds, sides[1].milliseconds, QUICK_PAIRS if quick else PAIRS)


class _Side:
    """One pool of `TOKENS` tokens, all of one kind."""

    def __init__(
        self, implementation: PagedAttention, query: torch.Tensor, pool: PoolView, kind: Kind, stride: int
    ) -> None:
        self.implementation, self.query, self.pool, self.kind, self.stride = (
            implementation, query, pool, kind, stride,
        )  # fmt: skip
        self.pages = self._pages(TOKENS // pool.geometry.page_tokens)

    def _pages(self, count: int) -> Pages:
        tokens = self.pool.geometry.page_tokens
        index = np.arange(count, dtype=np.int64)
        return Pages(
            index * self.stride,
            np.full(count, self.kind, np.int8),
            np.full(count, tokens, np.int32),
            index * tokens,
            np.array([0, count], np.int64),
            count * tokens,
        )

    def _attend(self, pages: Pages, layer: int) -> torch.Tensor:
        scale = self.pool.geometry.head_dim**-0.5
        return self.implementation.decode(self.query, self.pool, pages, layer, scale).out

    def milliseconds(self) -> float:
        layers = range(self.pool.geometry.num_layers)
        return 1e3 * seconds(lambda: [self._attend(self.pages, layer) for layer in layers])

    def reads(self, first: torch.Tensor) -> bool:
        """Whether attention over the first page is that over `first`, its K/V `[layers, 2, heads, tokens, dim]`."""
        keys, values = first[0].float()[:, None]
        right = torch.nn.functional.scaled_dot_product_attention(
            self.query[:, :, None], keys, values, enable_gqa=True
        )[:, :, 0]
        error = (self._attend(self._pages(1), 0) - right).norm() / right.norm()
        return bool(error < TOLERANCE)
