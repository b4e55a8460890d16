"""Blocks of dense keys and values of a row on a device, for prefill: planned once a step, read once a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from tierkv.attention.contract import Pages
from tierkv.attention.prefill import Block
from tierkv.attention.triton_decode import FORMS, to_device
from tierkv.attention.triton_forms import Forms
from tierkv.table import Kind


class BlockPlan(NamedTuple):
    """Some pages, sorted by form, and the tokens in them."""

    present: list[tuple[Kind, int, int]]  # forms, and where each one's first page and end are
    offsets: torch.Tensor  # [pages] int64
    counts: torch.Tensor  # [pages] int32
    written: torch.Tensor | None  # [tokens] int64 slots of all pages that hold a token; None: all of them
    places: torch.Tensor  # [tokens] int64 where each lies in the mass array


def plan_blocks(pages: Pages, page_tokens: int, size: int, device: torch.device) -> list[BlockPlan]:
    """About `size` tokens in each block; the copies to the device wait for nothing."""
    step = max(1, size // page_tokens)
    return [
        _plan(pages, slice(start, start + step), page_tokens, device)
        for start in range(0, len(pages.offsets), step)
    ]


def _plan(pages: Pages, part: slice, page_tokens: int, device: torch.device) -> BlockPlan:
    by_form = [np.flatnonzero(pages.kinds[part] == kind) for kind in FORMS]
    edges = np.cumsum([0, *map(len, by_form)]).tolist()
    present = [(kind, *edge) for kind, edge in zip(FORMS, pairwise(edges), strict=True) if edge[0] < edge[1]]
    order = np.concatenate(by_form)
    counts = pages.counts[part][order]
    slots = np.arange(len(order) * page_tokens)
    page, slot = slots // page_tokens, slots % page_tokens
    written = np.flatnonzero(slot < counts[page])
    places = (pages.token_starts[part][order][page] + slot)[written].astype(np.int64)
    offsets, there, written_there, places_there = to_device(
        (pages.offsets[part][order], counts, written, places), device
    )
    return BlockPlan(
        present, offsets, there, written_there if len(written) < len(slots) else None, places_there
    )


def read_blocks(forms: Forms, plans: Sequence[BlockPlan], dtype: torch.dtype) -> Iterator[Block]:
    geometry = forms.geometry
    heads, tokens, dim = geometry.num_kv_heads, geometry.page_tokens, geometry.head_dim
    for plan in plans:
        dense = torch.empty(len(plan.offsets), 2, heads, tokens, dim, dtype=dtype, device=plan.offsets.device)
        for kind, first, last in plan.present:
            forms.of(kind).read(plan.offsets[first:last], plan.counts[first:last], dense[first:last])
        keys, values = dense.permute(1, 2, 0, 3, 4).reshape(2, heads, -1, dim)
        if plan.written is not None:
            keys, values = keys.index_select(1, plan.written), values.index_select(1, plan.written)
        yield Block(keys, values, plan.places)


__all__ = ["BlockPlan", "plan_blocks", "read_blocks"]
