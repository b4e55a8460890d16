"""Decode attention on a device over pages exact and packed, in place: `plan_pages` once a step, `decode` once a layer.

Queries are rounded to the page dtype where they meet exact pages, as are weights; products with packed pages are in
tf32. `tierkv.attention.contract` says what attention is; this is `decode` without cold pages and token mass.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.attention.contract import Attended, Pages
from tierkv.attention.triton_kernels import attend_exact, attend_packed, merge_items, prepare_queries
from tierkv.attention.triton_klt import attend_klt
from tierkv.errors import ConfigError
from tierkv.quant.klt_triton import KltPages
from tierkv.quant.rotated_triton import RotatedPages
from tierkv.table import Kind
from tierkv.triton_setup import interpreting, least_columns, next_power_of_two, tl

PROGRAMS = 1056
"""Programs worth having: eight for each of the 132 multiprocessors of an H200."""

LEAST_PAGES = 8
"""Pages of an item at least, below which merging costs more than the split gains."""

TILE_TOKENS = 64
"""Tokens that one step of a program attends."""

SLICE = 32
"""Channels of a query that one program takes into or out of the space of codes."""

TILE_SIDE = 16
"""Rows that a product must have, and terms."""


class DevicePages(NamedTuple):
    """`contract.Pages` on a device, the pages of each row sorted by form and cut in items."""

    offsets: torch.Tensor  # [pages] int64 byte offset in the pool
    counts: torch.Tensor  # [pages] int32
    order: torch.Tensor  # [pages] int64 index in the `Pages` this was made of
    rows: torch.Tensor  # [pages] int64
    exact_items: torch.Tensor  # [items, 4] int32: number, row, first and last page
    packed_items: torch.Tensor  # the same
    spans: torch.Tensor  # [rows, 3] int32: first item, first packed item, end of the items


def plan_pages(pages: Pages, kv_heads: int, device: torch.device | str) -> DevicePages:
    """Sort and cut the pages of a batch; the copies to the device wait for nothing.

    Raises:
        ConfigError: a page is of the middle form, which the device's kernels do not read.
    """
    if np.any(pages.kinds == Kind.MIDDLE):
        raise ConfigError("attention on a device reads no pages of a middle form: leave `middle` out")
    rows = np.repeat(np.arange(len(pages.row_starts) - 1), np.diff(pages.row_starts))
    order = np.lexsort((pages.kinds != Kind.EXACT, rows))
    length = max(LEAST_PAGES, math.ceil(len(order) * kv_heads / PROGRAMS))
    exact: list[tuple[int, int, int, int]] = []
    packed: list[tuple[int, int, int, int]] = []
    spans = []
    for row, (start, stop) in enumerate(pairwise(pages.row_starts.tolist())):
        middle = start + int((pages.kinds[start:stop] == Kind.EXACT).sum())
        ends = [len(exact) + len(packed)]
        for items, first, last in ((exact, start, middle), (packed, middle, stop)):
            for at in range(first, last, length):
                items.append((len(exact) + len(packed), row, at, min(at + length, last)))
            ends.append(len(exact) + len(packed))
        spans.append(ends)

    def on_device(array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    return DevicePages(
        on_device(pages.offsets[order]),
        on_device(pages.counts[order]),
        on_device(order.astype(np.int64)),
        on_device(rows.astype(np.int64)),
        on_device(np.array(exact, np.int32).reshape(-1, 4)),
        on_device(np.array(packed, np.int32).reshape(-1, 4)),
        on_device(np.array(spans, np.int32).reshape(-1, 3)),
    )


def decode(
    query: torch.Tensor, pool: torch.Tensor, pages: DevicePages, codec: RotatedPages | KltPages, layer: int,
    scale: float, page_mass: torch.Tensor | None = None, softcap: float = 0.0, sinks: torch.Tensor | None = None,
) -> Attended:  # fmt: skip
    """One query a row over its pages.

    Args:
        query: `[rows, q_heads, head_dim]`, any float dtype; q_heads is a multiple of kv_heads.
        pool: uint8, a multiple of 4 bytes long; pages lie at multiples of 64.
        codec: of the packed pages.
        layer: index into the pages' layers.
        scale: factor on the logits.
        page_mass: `[pages]` float32 in the order of `contract.Pages`, gets each page's attention probability added,
            averaged over query heads.
        softcap: what logits are capped to; 0 for none.
        sinks: `[q_heads]` logits on the query's device.

    A row that attends nothing gets zeros and `log_sum_exp = -inf` (or its sinks).

    Raises:
        ConfigError: the query does not fit the pages.
    """
    geometry = codec.geometry
    rows, query_heads, dim = query.shape
    if dim != geometry.head_dim or query_heads % geometry.num_kv_heads or rows != len(pages.spans):
        raise ConfigError(
            f"queries {tuple(query.shape)} do not fit {len(pages.spans)} rows of pages with "
            f"{geometry.num_kv_heads} KV heads of {geometry.head_dim}"
        )
    heads, share = geometry.num_kv_heads, query_heads // geometry.num_kv_heads
    mass = page_mass is not None
    exact_items, packed_items = len(pages.exact_items), len(pages.packed_items)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=query.device)

    sums, logs = (
        floats(exact_items + packed_items, query_heads, dim),
        floats(exact_items + packed_items, query_heads),
    )
    page_logs = floats(len(pages.order) if mass else 0, query_heads)
    query = query.contiguous()
    width, quarter = (max(TILE_SIDE, next_power_of_two(channels)) for channels in (dim, dim // 4))
    slices = {
        "HEADS": heads, "SHARE": share, "DIM": dim, "MATRIX": dim * dim if codec.synthesis.ndim > 2 else 0,
        "WIDTH": width, "SLICE": min(width, SLICE), "num_warps": 4,
    }  # fmt: skip
    by_slice = (rows * query_heads, width // slices["SLICE"])
    common = {
        "HEADS": heads, "SHARE": share, "TOKENS": geometry.page_tokens, "DIM": dim, "MASS": mass,
        "PAGES": max(1, TILE_TOKENS // geometry.page_tokens), "CAP": softcap * math.log2(math.e),
    }  # fmt: skip
    unit = scale * math.log2(math.e)
    if exact_items:
        attend_exact[(exact_items * heads,)](
            query, pool.view(codec.dtype), pages.offsets, pages.counts, pages.exact_items, sums, logs, page_logs,
            layer, unit, OPERAND=_operand(codec.dtype), ITEM=geometry.item_bytes, WIDTH=width,
            ROWS=max(TILE_SIDE, next_power_of_two(share)), num_warps=4, **common,
        )  # fmt: skip
    if packed_items:
        prepared, biases = floats(rows, query_heads, dim), floats(rows, query_heads)
        prepare_queries[by_slice](query, codec.synthesis, codec.means, prepared, biases, layer, **slices)
        found = (pages.offsets, pages.counts, pages.packed_items, sums, logs, page_logs, layer, unit)
        form = {
            "QUARTER": quarter, "ROWS": max(least_columns(), next_power_of_two(share)),
            "num_warps": min(4, quarter // TILE_SIDE),
        }  # fmt: skip
        data = prepared, biases, pool, pool.view(torch.float32)
        if isinstance(codec, KltPages):
            tables = codec.blocks, codec.channels, codec.quantizers
            attend_klt[(packed_items * heads,)](*data, *tables, *found, **form, **common)
        else:
            form |= {"LAYERS": geometry.num_layers, "KEY_BITS": codec.key_bits}
            attend_packed[(packed_items * heads,)](*data, *found, **form, **common)
    out, log_sum_exp = floats(rows, query_heads, dim), floats(rows, query_heads)
    merge_items[by_slice](
        sums, logs, pages.spans, codec.synthesis, log_sum_exp if sinks is None else sinks.float(), out, log_sum_exp,
        layer, BLOCK=TILE_SIDE, SINKS=sinks is not None, **slices,
    )  # fmt: skip
    if page_mass is not None:
        shares = torch.exp2(page_logs - log_sum_exp[pages.rows] * math.log2(math.e)).mean(1)
        page_mass.index_add_(0, pages.order, shares)
    return Attended(out, log_sum_exp)


def _operand(dtype: torch.dtype) -> tl.dtype:
    """What exact products take: the page dtype, but float32 in the interpreter, which cannot multiply bfloat16."""
    halves = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return tl.float32 if interpreting() else halves.get(dtype, tl.float32)
