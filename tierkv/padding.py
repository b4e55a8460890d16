"""Which columns of a batch are padding, by its attention mask: they are never stored, and stay what they were."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def real_columns(
    batch: int, columns: int, mask: torch.Tensor | None, pads: Sequence[Sequence[int]], cached: int
) -> NDArray[np.bool_] | None:
    """`[batch, columns]`: False where a new column is padding; None when none is.

    Args:
        mask: `[batch, cached + columns]`, 0 where a column is padding; None: no padding.
        pads: of each row that the cache holds, its columns of padding; rows of the batch may be copies of them.
        cached: columns that the cache holds.

    Raises:
        ValueError: the mask has another shape, or shows cached columns otherwise than they were written.
    """
    if mask is None:
        if any(pads):
            raise ValueError(
                "the rows of this TieredCache hold padding: give the attention_mask of all columns, cached and new"
            )
        return None
    if mask.ndim != 2 or mask.shape != (batch, cached + columns):
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)}; a TieredCache that holds {cached} columns takes "
            f"the 2-D mask of all of them and the new ones, {(batch, cached + columns)}"
        )
    whole = mask.numpy(force=True)
    real = whole[:, cached:] != 0
    if columns > 1 and cached:
        seen = np.ones((batch, cached), bool)
        for row in range(batch):
            seen[row, list(pads[row * len(pads) // batch])] = False
        if not np.array_equal(whole[:, :cached] != 0, seen):
            raise ValueError(
                "attention_mask hides or shows cached columns otherwise than when they were written"
            )
    return None if real.all() else real


__all__ = ["real_columns"]
