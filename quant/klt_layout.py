"""Where things lie in klt2's state and in its packed pages (`klt.py`)."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.numba_setup import kernel

GROUP: Final = 16
"""Channels that share a number of bits: the lanes of a vector."""

MAX_BITS: Final = 5


@kernel(inline=True)
def record_floats(head_dim: int) -> int:
    """float32 values of the state for one layer, side and head."""
    return 1 + 2 * (head_dim // GROUP) + head_dim + 2 * head_dim * head_dim


@kernel(inline=True)
def record_start(layer: int, side: int, head: int, heads: int, head_dim: int) -> int:
    """Where that record starts; `side` 0 is keys, 1 values."""
    return ((layer * 2 + side) * heads + head) * record_floats(head_dim)


@kernel(inline=True)
def mean_start(record: int, head_dim: int) -> int:
    return record + 1 + 2 * (head_dim // GROUP)


@kernel(inline=True)
def analysis_start(record: int, head_dim: int) -> int:
    return mean_start(record, head_dim) + head_dim


@kernel(inline=True)
def synthesis_start(record: int, head_dim: int) -> int:
    return analysis_start(record, head_dim) + head_dim * head_dim


@kernel(inline=True)
def block_start(state: NDArray[np.float32], record: int) -> int:
    """Byte offset in a packed page of the record's block."""
    return int(state[record])


@kernel(inline=True)
def bits_of_group(state: NDArray[np.float32], record: int, group: int) -> int:
    return int(state[record + 1 + group])


@kernel(inline=True)
def spread_of_group(state: NDArray[np.float32], record: int, group: int, head_dim: int) -> np.float32:
    """What a squared error of a unit in the group's channels costs."""
    cost: np.float32 = state[record + 1 + head_dim // GROUP + group]
    return cost


@kernel(inline=True)
def plane_bytes(tokens: int) -> int:
    """Bytes of one bit of one key channel of all tokens."""
    return (tokens + 7) // 8


def block_bytes(side: int, group_bits: int, tokens: int) -> int:
    """Bytes of a block whose groups have `group_bits` bits together: gain codes, then bit planes."""
    plane = GROUP * plane_bytes(tokens) if side == 0 else tokens * GROUP // 8
    return tokens + group_bits * plane
