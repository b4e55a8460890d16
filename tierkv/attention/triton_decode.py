"""Decode attention on a device over pages of every form, in place: `plan_pages` once a step, `attend` once a layer.

Queries are rounded to the page dtype where they meet exact pages, as are weights; products with other pages are in
tf32. `tierkv.attention.contract` says what attention is; `triton_attention.py` fulfils it with what is here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.attention.contract import Attended, Pages
from tierkv.attention.triton_forms import Coded, Forms, Plain, coded_form, exact_form
from tierkv.attention.triton_kernels import attend_exact, attend_packed, merge_items, prepare_queries
from tierkv.attention.triton_klt import attend_klt
from tierkv.attention.triton_masses import add_masses
from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
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

FORMS = (Kind.EXACT, Kind.MIDDLE, Kind.QUANTIZED)
"""In the order of a row's items: what is coded comes last, and is merged apart."""

NOTHING, PAGE_LOGS, LOGITS = 0, 1, 2
"""What `attend` keeps for masses: nothing, a log-sum-exp a page, or every logit."""


ALIGNMENT = 16
"""Bytes: kernels read pointers so aligned in larger words."""


class DevicePages(NamedTuple):
    """`contract.Pages` on a device, the pages of each row sorted by form and cut in items."""

    offsets: torch.Tensor  # [pages] int64 byte offset in the pool
    counts: torch.Tensor  # [pages] int32
    order: torch.Tensor  # [pages] int64 index in the `Pages` this was made of
    rows: torch.Tensor  # [pages] int64
    token_starts: torch.Tensor  # [pages] int64
    exact_items: torch.Tensor  # [items, 4] int32: number, row, first and last page
    middle_items: torch.Tensor  # the same
    packed_items: torch.Tensor  # the same
    spans: torch.Tensor  # [rows, 3] int32: first item, first packed item, end of the items


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device | str) -> list[torch.Tensor]:
    """Arrays on a device, all in one copy, which is not waited for."""
    ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays])
    on_gpu = torch.device(device).type == "cuda"
    together = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=on_gpu)
    flat = together.numpy()
    starts = [0, *ends[:-1].tolist()]
    for start, array in zip(starts, arrays, strict=True):
        flat[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = together.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes]
        .view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
        .view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def plan_pages(pages: Pages, kv_heads: int, device: torch.device | str) -> DevicePages:
    """Sort and cut the pages of a batch; the copy to the device waits for nothing."""
    rows = np.repeat(np.arange(len(pages.row_starts) - 1), np.diff(pages.row_starts))
    rank = np.zeros(len(pages.kinds), np.int8)
    for place, kind in enumerate(FORMS):
        rank[pages.kinds == kind] = place
    order = np.lexsort((rank, rows))
    length = max(LEAST_PAGES, math.ceil(len(order) * kv_heads / PROGRAMS))
    items: list[list[tuple[int, int, int, int]]] = [[] for _ in FORMS]
    spans, number = [], 0
    for row, (start, stop) in enumerate(pairwise(pages.row_starts.tolist())):
        edges = start + np.cumsum([0, *np.bincount(rank[start:stop], minlength=len(FORMS))])
        span = [number]
        for form, (first, last) in enumerate(pairwise(edges.tolist())):
            if FORMS[form] == Kind.QUANTIZED:
                span.append(number)
            for at in range(first, last, length):
                items[form].append((number, row, at, min(at + length, last)))
                number += 1
        spans.append([*span, number])
    arrays: list[NDArray[Any]] = [
        pages.offsets[order], pages.counts[order], order.astype(np.int64), rows.astype(np.int64),
        pages.token_starts[order].astype(np.int64),
        *(np.array(form, np.int32).reshape(-1, 4) for form in items), np.array(spans, np.int32).reshape(-1, 3),
    ]  # fmt: skip
    return DevicePages(*to_device(arrays, device))


class Part(NamedTuple):
    """What one kernel attends: items of pages of one form."""

    form: Plain | Coded
    items: torch.Tensor  # [items, 4], or by head [rows * kv_heads, 4]
    counts: torch.Tensor  # [pages] int32


class Found(NamedTuple):
    out: torch.Tensor  # [rows, q_heads, head_dim] float32
    log_sum_exp: torch.Tensor  # [rows, q_heads] float32
    totals: torch.Tensor  # the same, over log 2
    kept: torch.Tensor  # [pages, q_heads] of PAGE_LOGS, [pages, q_heads, page_tokens] of LOGITS; over log 2


def attend(
    query: torch.Tensor, forms: Forms, pages: DevicePages, scale: float, softcap: float = 0.0,
    sinks: torch.Tensor | None = None, keep: int = NOTHING,
) -> Found:  # fmt: skip
    """One query a row over its pages. Launches kernels and allocates; never waits.

    Raises:
        ConfigError: the query does not fit the pages, or no kernel reads some of them.
    """
    listed = zip(FORMS, (pages.exact_items, pages.middle_items, pages.packed_items), strict=True)
    parts = [Part(forms.of(kind), items, pages.counts) for kind, items in listed if len(items)]
    count = sum(len(part.items) for part in parts)
    return attend_parts(
        query, forms.geometry, pages.offsets, parts, pages.spans, count, scale, softcap, sinks, keep
    )


def attend_parts(
    query: torch.Tensor, geometry: Geometry, offsets: torch.Tensor, parts: Sequence[Part], spans: torch.Tensor,
    items: int, scale: float, softcap: float = 0.0, sinks: torch.Tensor | None = None, keep: int = NOTHING,
    by_head: bool = False,
) -> Found:  # fmt: skip
    """`attend` over parts whose items have numbers below `items`. By head, each KV head has items of its own and a page
    may be in several parts, of which `counts` lets one have its tokens: `kept` is then by part.
    """
    rows, query_heads, dim = query.shape
    heads = geometry.num_kv_heads
    if dim != geometry.head_dim or query_heads % heads or rows != len(spans):
        raise ConfigError(
            f"queries {tuple(query.shape)} do not fit {len(spans)} rows of pages with {heads} KV heads of "
            f"{geometry.head_dim}"
        )
    share = query_heads // heads

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=query.device)

    sums, logs = floats(items, query_heads, dim), floats(items, query_heads)
    per_page = {NOTHING: (0,), PAGE_LOGS: (query_heads,), LOGITS: (query_heads, geometry.page_tokens)}[keep]
    kept = floats(len(parts) if by_head else 1, len(offsets), *per_page)
    query = query.contiguous()
    width, quarter = (max(TILE_SIDE, next_power_of_two(channels)) for channels in (dim, dim // 4))
    common = {
        "HEADS": heads, "SHARE": share, "TOKENS": geometry.page_tokens, "DIM": dim, "MASS": keep, "BY_HEAD": by_head,
        "PAGES": max(1, TILE_TOKENS // geometry.page_tokens), "CAP": softcap * math.log2(math.e),
    }  # fmt: skip
    part = width if interpreting() else min(width, SLICE)  # which takes its time a program
    sliced = {"HEADS": heads, "SHARE": share, "DIM": dim, "WIDTH": width, "SLICE": part, "num_warps": 4}
    by_slice = (rows * query_heads, width // part)
    unit = scale * math.log2(math.e)
    coded = None
    for index, (form, own, counts) in enumerate(parts):
        programs = (len(own) * (1 if by_head else heads),)
        found = (offsets, counts, own, sums, logs, kept[index if by_head else 0])
        if isinstance(form, Plain):
            attend_exact[programs](
                query, form.pool, form.numbers, form.levels, *found, form.layer, unit,
                OPERAND=tl.float32 if form.bits else _operand(form.pool.dtype), ITEM=geometry.item_bytes,
                BITS=form.bits, LAYERS=form.layers, WIDTH=width, ROWS=max(TILE_SIDE, next_power_of_two(share)),
                num_warps=4, **common,
            )  # fmt: skip
            continue
        codec, coded = form.codec, form
        prepared, biases = floats(rows, query_heads, dim), floats(rows, query_heads)
        prepare_queries[by_slice](
            query, codec.synthesis, codec.means, prepared, biases, form.layer, MATRIX=_matrix(codec), **sliced
        )
        own_form = {
            "QUARTER": quarter, "ROWS": max(least_columns(), next_power_of_two(share)),
            "num_warps": min(4, quarter // TILE_SIDE),
        }  # fmt: skip
        data = prepared, biases, form.pool, form.numbers
        if isinstance(codec, KltPages):
            tables = codec.blocks, codec.channels, codec.quantizers
            attend_klt[programs](*data, *tables, *found, form.layer, unit, **own_form, **common)
        else:
            own_form |= {"LAYERS": codec.geometry.num_layers, "KEY_BITS": codec.key_bits}
            attend_packed[programs](*data, *found, form.layer, unit, **own_form, **common)
    out, log_sum_exp, totals = (
        floats(rows, query_heads, dim),
        floats(rows, query_heads),
        floats(rows, query_heads),
    )
    merge_items[by_slice](
        sums, logs, spans, sums if coded is None else coded.codec.synthesis,
        log_sum_exp if sinks is None else sinks.float(), out, log_sum_exp, totals, 0 if coded is None else coded.layer,
        MATRIX=0 if coded is None else _matrix(coded.codec), BLOCK=TILE_SIDE, SINKS=sinks is not None,
        CODED=coded is not None, **sliced,
    )  # fmt: skip
    return Found(out, log_sum_exp, totals, kept if by_head else kept[0])


def add_mass(
    pages: DevicePages, found: Found, page_mass: torch.Tensor | None, token_mass: torch.Tensor | None
) -> None:
    """Add what tokens and pages got to the arrays, in the order of `contract.Pages`, averaged over query heads.

    found: with PAGE_LOGS kept, enough for `page_mass`, or LOGITS; `totals` of everything that was attended.
    """
    if found.kept.ndim == 2:
        if page_mass is not None:
            shares = torch.exp2(found.kept - found.totals.clamp(min=-1e30)[pages.rows]).mean(1)
            page_mass.index_add_(0, pages.order, shares)
        return
    count, query_heads, tokens = found.kept.shape
    if count:
        nowhere = found.kept  # a pointer that is not written to
        add_masses[(count,)](
            found.kept, found.totals, pages.rows, pages.order, pages.token_starts, pages.counts,
            nowhere if page_mass is None else page_mass, nowhere if token_mass is None else token_mass,
            QUERY_HEADS=query_heads, TOKENS=tokens, BLOCK=TILE_SIDE, OF_PAGES=page_mass is not None,
            OF_TOKENS=token_mass is not None,
        )  # fmt: skip


def decode(
    query: torch.Tensor, pool: torch.Tensor, pages: DevicePages, codec: RotatedPages | KltPages, layer: int,
    scale: float, page_mass: torch.Tensor | None = None, softcap: float = 0.0, sinks: torch.Tensor | None = None,
) -> Attended:  # fmt: skip
    """One query a row over its exact and packed pages, without what a `PoolView` knows.

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
        ConfigError: the query does not fit the pages, or one is of the middle form.
    """
    forms = Forms(
        codec.geometry, exact_form(codec.geometry, pool, layer), None, coded_form(codec, pool, layer)
    )
    found = attend(query, forms, pages, scale, softcap, sinks, NOTHING if page_mass is None else PAGE_LOGS)
    if page_mass is not None:
        add_mass(pages, found, page_mass, None)
    return Attended(found.out, found.log_sum_exp)


def _matrix(codec: RotatedPages | KltPages) -> int:
    """Floats from one matrix out of the space of codes to the next; 0: there is one for all."""
    return codec.geometry.head_dim**2 if codec.synthesis.ndim > 2 else 0


def _operand(dtype: torch.dtype) -> tl.dtype:
    """What exact products take: the page dtype, but float32 in the interpreter, which cannot multiply bfloat16."""
    halves = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return tl.float32 if interpreting() else halves.get(dtype, tl.float32)
