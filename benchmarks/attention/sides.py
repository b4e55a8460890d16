"""The arms: one call a layer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np
import torch
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from tierkv import attention, quant
from tierkv.attention.contract import PoolView
from tierkv.benchmarks.attention import EXACT_PAGES, PEERS
from tierkv.benchmarks.paged_side import PagedSide
from tierkv.benchmarks.quant.calibrate import Calibration, fit
from tierkv.benchmarks.quant.in_place import decoded, packed_pages
from tierkv.benchmarks.quant.pages import from_pages, to_pages
from tierkv.errors import ConfigError
from tierkv.geometry import PAGE_TOKENS, DTypeName, Geometry
from tierkv.quant.contract import Bytes
from tierkv.quant.moments import standard
from tierkv.table import Kind

DISTINCT_PAGES = 16
"""Pages of other content; what a page holds changes no time."""

LEAST_BYTES = 64 << 20
"""Of dense float32 K/V that a pass over all layers reads: more than a processor caches."""

LOW_BIT = tuple(name for name in quant.NAMES if name != "exact")
NAMES = (*PEERS, *EXACT_PAGES, *LOW_BIT)


class Model(NamedTuple):
    name: str
    layers: int
    kv_heads: int
    q_heads: int
    head_dim: int


MODELS = (Model("smollm2-135m", 30, 3, 9, 64), Model("8b", 32, 8, 32, 128))


class Side(NamedTuple):
    name: str
    attend: Callable[[int], object]
    attended_bytes: int
    """Of one call."""


class Shape(NamedTuple):
    model: Model
    context: int
    batch: int

    @property
    def layers(self) -> int:
        """That take turns."""
        return min(self.model.layers, max(1, -(-LEAST_BYTES // self.dense_bytes(4))))

    def dense_bytes(self, item: int) -> int:
        """K/V of one layer, all rows."""
        return 2 * self.batch * self.model.kv_heads * self.context * self.model.head_dim * item

    @property
    def query(self) -> torch.Tensor:
        """`[batch, q_heads, head_dim]`."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.batch, self.model.q_heads, self.model.head_dim, generator=generator)


def side(name: str, shape: Shape) -> Side:
    """Raises `ConfigError` where it cannot run here, or does not read what it should."""
    if name in PEERS:
        return _dense(name, shape)
    return _exact(name, shape) if name in EXACT_PAGES else _low_bit(name, shape)


def _dense(name: str, shape: Shape) -> Side:
    dtype = torch.bfloat16 if name.endswith("bfloat16") else torch.float32
    _, _, kv_heads, q_heads, dim = shape.model
    generator = torch.Generator().manual_seed(0)
    size = (shape.layers, 2, shape.batch, kv_heads, shape.context, dim)
    kv = torch.randn(size, generator=generator).to(dtype)
    query, scale = shape.query[:, :, None].to(dtype), dim**-0.5
    group = q_heads // kv_heads
    module = cast(
        torch.nn.Module, SimpleNamespace(num_key_value_groups=group, is_causal=True, training=False)
    )

    def attend(layer: int) -> object:
        keys, values = kv[layer]
        if name == "eager":
            return eager_attention_forward(module, query, keys, values, None, scaling=scale)
        if name == "sdpa-repeated":
            return torch.nn.functional.scaled_dot_product_attention(
                query, repeat_kv(keys, group), repeat_kv(values, group), scale=scale
            )
        return sdpa_attention_forward(module, query, keys, values, None, scaling=scale)

    return Side(name, attend, shape.dense_bytes(dtype.itemsize))


def _exact(name: str, shape: Shape) -> Side:
    geometry, pages = _pages(shape, cast(DTypeName, name))
    pool = _tiled(pages, shape)
    view = PoolView(pool, geometry, quant.get("k3v2"), np.zeros(0, np.float32))
    return _paged(name, view, Kind.EXACT, pages, from_pages(geometry, pages[:1]), shape, geometry.page_bytes)


def _low_bit(name: str, shape: Shape) -> Side:
    geometry, pages = _pages(shape, "bfloat16")
    codec = quant.get(name)
    state = fit(codec, Calibration(geometry, list(pages), standard(geometry)))
    packed = packed_pages(codec, state, geometry, pages)
    view = PoolView(_tiled(packed, shape), geometry, codec, state)
    first = decoded(codec, state, geometry, packed[0])
    return _paged(name, view, Kind.QUANTIZED, packed, first, shape, codec.page_bytes(geometry))


def _paged(
    name: str, view: PoolView, kind: Kind, pages: Bytes, first: torch.Tensor, shape: Shape, page_bytes: int
) -> Side:
    found = PagedSide(attention.get("cpu"), shape.query, view, kind, pages.shape[1], shape.context)
    if not found.reads(first):
        raise ConfigError("attention does not read its pages in place")
    each = shape.batch * shape.context // PAGE_TOKENS
    return Side(name, found.attend, each * page_bytes // shape.layers)


def _pages(shape: Shape, dtype: DTypeName) -> tuple[Geometry, Bytes]:
    """Some exact pages of all layers that take turns."""
    geometry = Geometry(shape.layers, shape.model.kv_heads, shape.model.head_dim, dtype)
    layers, _, heads, tokens, dim = geometry.shape
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(layers, 2, heads, DISTINCT_PAGES * tokens, dim, generator=generator)
    return geometry, to_pages(geometry, kv.to(getattr(torch, dtype)))


def _tiled(pages: Bytes, shape: Shape) -> Bytes:
    """The pages again and again, as many as all rows hold, as one pool."""
    count = shape.batch * shape.context // PAGE_TOKENS
    pool: Bytes = np.resize(pages, (count, pages.shape[1])).ravel()
    return pool
