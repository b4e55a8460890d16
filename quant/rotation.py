"""The orthonormal rotation that makes a head's channels look Gaussian: random-looking signs, then Hadamard.

`rotate(x) = H diag(signs) x`. H is block diagonal in Sylvester Hadamard blocks of the largest powers of two
(80 = 64 + 16, 96 = 64 + 32), each scaled by 1/sqrt(size). Without signs a constant vector would end in one channel,
where few levels cannot code it; the signs are the Rudin-Shapiro sequence, whose Hadamard spectrum is flat (to sqrt 2),
so every vector of the Hadamard basis, the constant one included, is spread evenly. (Idea: QuaRot, arXiv 2404.00456.)

The transform is the butterfly with stride 1, 2, 4, ... and one multiplication at the end, always in this order, so that
two implementations agree bit for bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.numba_setup import kernel
from tierkv.quant.columns import butterfly_2, butterfly_4, butterfly_8

_ONE = np.float32(1)


def block_sizes(head_dim: int) -> list[int]:
    """Sizes of the Hadamard blocks in order: the powers of two of which `head_dim` is the sum, largest first."""
    return [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]


def signs(head_dim: int) -> NDArray[np.float32]:
    """`[head_dim]` of +1 and -1: the Rudin-Shapiro sequence, started anew in each Hadamard block."""
    parts = [
        [(-1.0) ** (index & index >> 1).bit_count() for index in range(size)]
        for size in block_sizes(head_dim)
    ]
    return np.array([sign for part in parts for sign in part], np.float32)


@kernel()
def largest_block(remaining: int) -> int:
    """The largest power of two that is at most `remaining`."""
    size = 1
    while size * 2 <= remaining:
        size *= 2
    return size


@kernel()
def sign_of(index: int) -> np.float32:
    """Entry `index` of the Rudin-Shapiro sequence."""
    pairs = index & (index >> 1)
    odd = 0
    while pairs:
        odd ^= pairs & 1
        pairs >>= 1
    return np.float32(-1.0) if odd else np.float32(1.0)


@kernel()
def apply_signs(x: NDArray[np.float32]) -> None:
    """`x[channel] *= sign`, in place, for `x` `[head_dim]`."""
    start = 0
    while start < x.shape[0]:
        size = largest_block(x.shape[0] - start)
        for index in range(size):
            x[start + index] *= sign_of(index)
        start += size


@kernel()
def hadamard(x: NDArray[np.float32]) -> None:
    """H x in place, for `x` `[head_dim]`."""
    start = 0
    while start < x.shape[0]:
        size = largest_block(x.shape[0] - start)
        block = x[start : start + size]
        span = 1
        while span < size:
            for low in range(0, size, 2 * span):
                upper, lower = block[low : low + span], block[low + span : low + 2 * span]
                for index in range(span):
                    a, b = upper[index], lower[index]
                    upper[index] = a + b
                    lower[index] = a - b
            span *= 2
        scale = np.float32(1.0 / np.sqrt(np.float64(size)))
        for index in range(size):
            block[index] *= scale
        start += size


@kernel()
def hadamard_columns(columns: NDArray[np.float32], head_dim: int) -> None:
    """The same of 16 vectors at once, in columns (`columns.py`); `head_dim` is a multiple of 8.

    Three steps of the butterfly at a time (two or one at the end), so that columns are loaded and stored less often.
    """
    start = 0
    while start < head_dim:
        size = largest_block(head_dim - start)
        scale = np.float32(1.0 / np.sqrt(np.float64(size)))
        stride = 1
        while stride < size:
            radix = min(8, size // stride)
            factor = scale if stride * radix == size else _ONE
            for base in range(start, start + size, stride * radix):
                for row in range(base, base + stride):
                    if radix == 8:
                        butterfly_8(columns, row, stride, factor)
                    elif radix == 4:
                        butterfly_4(columns, row, stride, factor)
                    else:
                        butterfly_2(columns, row, stride, factor)
            stride *= radix
        start += size
