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
def hadamard(x: NDArray[np.float32], lanes: int) -> None:
    """H x in place for each of `lanes` interleaved vectors: `x` is `[head_dim * lanes]`, channel by channel."""
    head_dim = x.shape[0] // lanes
    start = 0
    while start < head_dim:
        size = largest_block(head_dim - start)
        block = x[start * lanes : (start + size) * lanes]
        span = lanes
        while span < size * lanes:
            for low in range(0, size * lanes, 2 * span):
                upper, lower = block[low : low + span], block[low + span : low + 2 * span]
                for index in range(span):
                    a, b = upper[index], lower[index]
                    upper[index] = a + b
                    lower[index] = a - b
            span *= 2
        scale = np.float32(1.0 / np.sqrt(np.float64(size)))
        for index in range(size * lanes):
            block[index] *= scale
        start += size
