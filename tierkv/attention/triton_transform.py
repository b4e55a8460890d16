"""Estimates from transform digests on a device: the numbers that the kernel reads records by, and its call."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from tierkv.attention.contract import Scale
from tierkv.attention.triton_estimates import estimate_transforms
from tierkv.prefetch.transform import GAIN
from tierkv.prefetch.transform_digests import CODE_LEVELS, COSINES, SLOTS, TransformDigests
from tierkv.triton_setup import next_power_of_two

COLUMNS = 4
"""Columns that a step of an estimate takes."""

AXES = 16
"""Axes that a step of a column's product takes."""


class DeviceTables(NamedTuple):
    """Of all layers; see `estimate_transforms`."""

    places: torch.Tensor  # [L, H, SLOTS, D] int32
    masks: torch.Tensor  # [L, H, SLOTS, D] int32
    sizes: torch.Tensor  # [L, H, SLOTS, D]
    mean: torch.Tensor  # [L, H, D]
    axes: torch.Tensor  # [L, H, D, D]
    lost: torch.Tensor  # [L, H, D]
    levels: torch.Tensor
    gains: torch.Tensor
    cosines: torch.Tensor


_made: WeakKeyDictionary[TransformDigests, dict[torch.device, DeviceTables]] = WeakKeyDictionary()


def tables_of(digests: TransformDigests, device: torch.device) -> DeviceTables:
    """Made once for a device."""
    made = _made.setdefault(digests, {})
    if device not in made:
        bits = digests.transform.bits
        flat = bits.reshape(*bits.shape[:2], -1)
        first = (8 + np.cumsum(flat, -1) - flat).reshape(bits.shape)  # behind the gain
        state = digests.transform.state
        arrays = (
            first.astype(np.int32), ((1 << bits) - 1).astype(np.int32), np.sqrt(state.variance),
            state.mean, state.axes, digests.transform.lost, CODE_LEVELS, GAIN, COSINES,
        )  # fmt: skip
        made[device] = DeviceTables(*(torch.tensor(array, device=device) for array in arrays))
    return made[device]


def estimate_by_transform(
    query: torch.Tensor, pool: torch.Tensor, digests: TransformDigests, layer: int,
    pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor], at: int, scale: Scale, estimates: torch.Tensor,
) -> None:  # fmt: skip
    """Fill `estimates` `[columns, pages]`.

    Args:
        query: `[rows, columns, head_dim]` float32, a KV head's columns next to each other.
        pool: of bytes.
        pages: of each where its digest lies, its tokens and its row.
        at: where the layer's records begin in a digest.
    """
    tables, heads = tables_of(digests, query.device), digests.shape.geometry.num_kv_heads
    rows, columns, dim = query.shape
    asked = query.view(rows, heads, -1, dim) * scale.factor
    turned = asked @ tables.axes[layer]
    common = (asked * tables.mean[layer].unsqueeze(1)).sum(-1)
    noise = (turned**2 * tables.lost[layer].unsqueeze(1)).sum(-1)
    count = estimates.shape[1]
    estimate_transforms[(count * heads,)](
        turned, common, noise, pool, *pages, tables.places[layer], tables.masks[layer], tables.sizes[layer],
        tables.levels, tables.gains, tables.cosines, estimates, count, at, HEADS=heads, COLUMNS=columns // heads,
        DIM=dim, WIDTH=max(AXES, next_power_of_two(dim)), STEP=AXES, SLOTS=SLOTS, SIZE=digests.shape.record_bytes,
        BLOCK=COLUMNS, CAP=scale.cap, num_warps=4,
    )  # fmt: skip
