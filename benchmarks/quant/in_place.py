"""How long attention takes over packed pages in place, beside exact pages in place: a token, all layers, one thread."""

from __future__ import annotations

import numpy as np
import torch

from tierkv import attention
from tierkv.attention.contract import PoolView
from tierkv.benchmarks.paged_side import PagedSide
from tierkv.benchmarks.pairs import Figures, interleave
from tierkv.benchmarks.quant.pages import from_pages, to_pages
from tierkv.benchmarks.quant.speed import one_thread, seconds, window
from tierkv.geometry import Geometry
from tierkv.quant.contract import Bytes, Codec, Floats
from tierkv.table import Kind

TOKENS = 4096
PAIRS, QUICK_PAIRS = 15, 3

FRAME = 64
"""Pages lie at multiples of so many bytes."""


def measure(codec: Codec, state: Floats, geometry: Geometry, q_heads: int, quick: bool) -> Figures | None:
    """Milliseconds, packed (`ours`) and exact (`peer`); `None` where attention does not read this form in place."""
    count = TOKENS // geometry.page_tokens
    some = to_pages(geometry, window(geometry, quick=True))
    exact = np.resize(some, (count, geometry.page_bytes))
    packed = packed_pages(codec, state, geometry, exact)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, q_heads, geometry.head_dim, generator=generator)
    implementation = attention.get("cpu")
    sides = [
        PagedSide(
            implementation, query, PoolView(data.ravel(), geometry, codec, state), kind, data.shape[1], TOKENS
        )
        for data, kind in ((packed, Kind.QUANTIZED), (exact, Kind.EXACT))
    ]
    if not sides[0].reads(decoded(codec, state, geometry, packed[0])):
        return None
    with one_thread():
        return interleave(
            lambda: _milliseconds(sides[0]), lambda: _milliseconds(sides[1]), QUICK_PAIRS if quick else PAIRS
        )


def packed_pages(codec: Codec, state: Floats, geometry: Geometry, exact: Bytes) -> Bytes:
    """`[pages, bytes of a frame]` of exact `[pages, page_bytes]`."""
    packed = np.zeros((len(exact), -(-codec.page_bytes(geometry) // FRAME) * FRAME), np.uint8)
    for page, out in zip(exact, packed, strict=True):
        codec.encode(geometry, page, geometry.page_tokens, state, out)
    return packed


def decoded(codec: Codec, state: Floats, geometry: Geometry, packed: Bytes) -> torch.Tensor:
    """The K/V of one page."""
    out = np.empty(geometry.page_bytes, np.uint8)
    codec.decode(geometry, packed, geometry.page_tokens, state, out)
    return from_pages(geometry, out[None])


def _milliseconds(side: PagedSide) -> float:
    layers = range(side.pool.geometry.num_layers)
    return 1e3 * seconds(lambda: [side.attend(layer) for layer in layers])
