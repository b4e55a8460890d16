"""Cold pages on a device: estimated from digests, read in place in host memory, audited. Only `named` waits.

The host pool is read where it is: a GPU reaches it because `triton_host.py` has it pinned and mapped.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from tierkv.attention.contract import READ_ALL, ColdPages, ColdSeen, Pages, PoolView, Scale, Sums
from tierkv.attention.triton_decode import (
    FORMS,
    LOGITS,
    NOTHING,
    DevicePages,
    Found,
    Part,
    attend_parts,
    plan_pages,
    to_device,
)
from tierkv.attention.triton_estimates import estimate_deviations
from tierkv.attention.triton_forms import Forms, bytes_of
from tierkv.attention.triton_transform import estimate_by_transform
from tierkv.prefetch.digests import Digests
from tierkv.prefetch.transform_digests import TransformDigests
from tierkv.table import Kind
from tierkv.triton_setup import next_power_of_two

COLUMNS = 16
"""Columns that a step of an estimate takes."""


class DeviceCold(NamedTuple):
    """`ColdPages` on a device, in the same order, and plans to read all of them and those that KV heads choose."""

    whole: Pages  # the same, on the host
    row_starts: list[int]
    digests: torch.Tensor  # [pages] int64
    offsets: torch.Tensor  # [pages] int64
    kinds: torch.Tensor  # [pages] int8
    counts: torch.Tensor  # [pages] int32
    token_starts: torch.Tensor  # [pages] int64
    rows: torch.Tensor  # [pages] int64
    everything: DevicePages
    present: list[Kind]  # forms that there are
    width: int  # pages that a KV head may choose
    items: list[torch.Tensor]  # of each form `[rows * kv_heads, 4]`: the pages that a KV head chose
    spans: torch.Tensor  # [rows, 3] of these items


class Choice(NamedTuple):
    """Pages that each row and KV head reads, `[rows, kv_heads, width]`."""

    pages: torch.Tensor  # int64
    valid: torch.Tensor  # bool: a head may have less to read


def plan_cold(pages: ColdPages, kv_heads: int, read: int, device: torch.device) -> DeviceCold:
    """read: `Cold.read`."""
    held = np.diff(pages.row_starts)
    row = np.repeat(np.arange(len(held)), held).astype(np.int64)
    present = [kind for kind in FORMS if (pages.kinds == kind).any()]
    width = max(0, min(read, int(held.max(initial=0))))
    pair = np.arange(len(held) * kv_heads)
    items = [
        np.stack(
            [pair // kv_heads * len(present) + part, pair // kv_heads, pair * width, (pair + 1) * width], 1
        )
        for part in range(len(present))
    ]
    ends = np.arange(1, len(held) + 1) * len(present)
    spans = np.stack([ends - len(present), ends - (Kind.QUANTIZED in present), ends], 1)
    columns = (pages.digests, pages.offsets, pages.kinds, pages.counts, pages.token_starts, row)
    digests, offsets, kinds, counts, starts, rows, spans_there, *items_there = to_device(
        (*columns, *(table.astype(np.int32) for table in (spans, *items))), device
    )
    whole = Pages(*pages[1:], int(pages.counts.sum()))
    return DeviceCold(
        whole, pages.row_starts.tolist(), digests, offsets, kinds, counts, starts, rows,
        plan_pages(whole, kv_heads, device), present, width, items_there, spans_there,
    )  # fmt: skip


def look(
    query: torch.Tensor, pool: PoolView, cold: DeviceCold, layer: int, scale: Scale, log_sum_exp: torch.Tensor,
    queries: int, read: int, seen: ColdSeen | None,
) -> Choice | None:  # fmt: skip
    """Estimate all cold pages, add to `seen.estimates`, and choose; `None` where nothing is chosen.

    Args:
        query: `[rows, q_heads * queries, head_dim]` float32, a head's queries next to each other.
        log_sum_exp: `[rows, q_heads * queries]` of what lies in HBM.
    """
    geometry = pool.geometry
    first_layer = geometry.num_layers - pool.digest_layers
    chooses = read not in (0, READ_ALL)
    if layer < first_layer or not len(cold.offsets) or not (chooses or seen is not None):
        return None
    estimates = _estimates(query, pool, cold, layer, scale)
    assert pool.digests is not None
    weights = _weights_of(pool.digests, query.device)[layer - first_layer].unsqueeze(-1)
    columns, heads, rows = query.shape[1], geometry.num_kv_heads, len(query)
    width = cold.width if chooses else 0
    choice = Choice(
        torch.zeros(rows, heads, width, dtype=torch.int64, device=query.device),
        torch.zeros(rows, heads, width, dtype=torch.bool, device=query.device),
    )
    for row, (first, last) in enumerate(pairwise(cold.row_starts)):
        if first == last:
            continue
        mine = estimates[:, first:last]
        joint = torch.cat([log_sum_exp[row].unsqueeze(-1), mine], -1)
        shares = torch.softmax(joint, -1)[:, 1:].nan_to_num(0.0)  # NaN: nothing in HBM, and nothing known
        if seen is not None:
            asking = shares.view(heads, columns // heads // queries, queries, last - first)[:, :, -1]
            sum_of(seen.estimates)[first:last] += (asking.mean(1) * weights).mean(0)
        if not chooses:
            continue
        told = ~mine.isneginf().view(heads, columns // heads, -1).all(1)
        wanted = shares.view(heads, columns // heads, -1).sum(1).masked_fill(~told, -1.0)
        order = wanted.sort(dim=-1, descending=True, stable=True).indices[:, :width]
        choice.pages[row, :, : order.shape[1]] = order + first
        choice.valid[row, :, : order.shape[1]] = told.gather(1, order)
    return choice if chooses else None


_weights: WeakKeyDictionary[Digests, dict[torch.device, torch.Tensor]] = WeakKeyDictionary()


def _weights_of(digests: Digests, device: torch.device) -> torch.Tensor:
    """Moved once to a device."""
    moved = _weights.setdefault(digests, {})
    if device not in moved:
        moved[device] = torch.tensor(digests.weights, device=device)
    return moved[device]


def _estimates(
    query: torch.Tensor, pool: PoolView, cold: DeviceCold, layer: int, scale: Scale
) -> torch.Tensor:
    """`[columns, pages]` estimated log-masses."""
    geometry, count, digests = pool.geometry, len(cold.offsets), pool.digests
    assert digests is not None
    data, columns = bytes_of(pool), query.shape[1]
    estimates = torch.empty(columns, count, dtype=torch.float32, device=query.device)
    at = (layer - digests.shape.first_layer) * geometry.num_kv_heads * digests.shape.record_bytes
    places = (cold.digests, cold.counts, cold.rows)
    if isinstance(digests, TransformDigests):
        estimate_by_transform(query, data, digests, layer, places, at, scale, estimates)
        return estimates
    estimate_deviations[(count * geometry.num_kv_heads,)](
        query, data, data[: data.numel() // 4 * 4].view(torch.float32), *places, estimates,
        count, at, scale.factor, HEADS=geometry.num_kv_heads,
        COLUMNS=columns // geometry.num_kv_heads, DIM=geometry.head_dim, WIDTH=next_power_of_two(geometry.head_dim),
        BLOCK=COLUMNS, CAP=scale.cap, num_warps=4,
    )  # fmt: skip
    return estimates


def read_chosen(
    query: torch.Tensor, forms: Forms, cold: DeviceCold, choice: Choice, scale: Scale, masses: bool
) -> Found:
    """Attention of each KV head over the pages that it chose, in place; `kept` as of `attend_parts` by head."""
    chosen = choice.pages.reshape(-1)
    live = torch.where(choice.valid.reshape(-1), cold.counts[chosen], 0)
    parts = []
    for kind, items in zip(cold.present, cold.items, strict=True):
        counts = torch.where(cold.kinds[chosen] == int(kind), live, 0).to(torch.int32)
        parts.append(Part(forms.of(kind), items, counts))
    return attend_parts(
        query, forms.geometry, cold.offsets[chosen], parts, cold.spans, len(cold.spans) * len(parts), scale.factor,
        scale.cap, None, LOGITS if masses else NOTHING, by_head=True,
    )  # fmt: skip


def add_chosen_mass(
    cold: DeviceCold, choice: Choice, kept: torch.Tensor, totals: torch.Tensor, token_mass: torch.Tensor
) -> None:
    """Add the mass of tokens that were read in place. kept: of `read_chosen`; totals: over log 2, of everything."""
    rows, heads, width = choice.pages.shape
    q_heads, tokens = kept.shape[-2:]
    logits = kept.view(-1, rows, heads, width, heads, q_heads // heads, tokens)
    own = logits.diagonal(dim1=2, dim2=4).amax(0)  # [rows, width, group, tokens, heads]: own pages'
    total = totals.view(rows, 1, heads, -1).permute(0, 1, 3, 2).unsqueeze(3)
    shares = (
        torch.exp2(own - total.clamp(min=-1e30)).sum(2).permute(0, 3, 1, 2) / q_heads
    )  # [rows, heads, width, tokens]
    slot = torch.arange(tokens, device=kept.device)
    there = choice.valid.unsqueeze(-1) & (slot < cold.counts[choice.pages].unsqueeze(-1))
    place = torch.where(there, cold.token_starts[choice.pages].unsqueeze(-1) + slot, 0)
    token_mass.index_add_(0, place.reshape(-1), torch.where(there, shares, 0.0).reshape(-1))


def named(choice: Choice | None, cold: DeviceCold, read: int) -> Pages:
    """The pages of one row that any KV head reads. Waits for the device, unless nothing or everything is read."""
    if choice is None and read == READ_ALL:
        return cold.whole
    which = np.arange(0) if choice is None else torch.unique(choice.pages[choice.valid]).cpu().numpy()
    counts = cold.whole.counts[which]
    return Pages(
        cold.whole.offsets[which], cold.whole.kinds[which], counts, cold.whole.token_starts[which],
        np.array([0, len(which)], np.int64), int(counts.sum()),
    )  # fmt: skip


def wants_audit(seen: ColdSeen | None) -> bool:
    return seen is not None and (seen.true is not None or seen.attended is not None)


def audit(
    cold: DeviceCold, everything: Found, hbm: torch.Tensor, attended: torch.Tensor, seen: ColdSeen
) -> None:
    """Add the true shares that `seen` asks for.

    Args:
        everything: attention over all cold pages, with PAGE_LOGS kept.
        hbm, attended: `[rows, q_heads]` log-sum-exp of what lies in HBM, and of what was attended; over log 2.
    """
    total = torch.logaddexp2(hbm, everything.totals)
    nothing = total.isneginf()  # here and cold: then nothing was missed
    floor = total.clamp(min=-1e30)
    plan = cold.everything
    if seen.true is not None:
        shares = torch.exp2(everything.kept - floor[plan.rows]).mean(1)
        sum_of(seen.true).index_add_(0, plan.order, shares)
    if seen.attended is not None:
        sum_of(seen.attended).add_(torch.exp2(attended - floor).masked_fill(nothing, 1.0).mean(1))


def sum_of(sums: Sums) -> torch.Tensor:
    """Raises TypeError where the sums are another implementation's."""
    if not isinstance(sums, torch.Tensor):
        raise TypeError("attention on a device adds to tensors there: make sums with its `zeros`")
    return sums
