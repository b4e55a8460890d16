"""Blockwise 8-bit numbers (Dettmers et al., arXiv 2110.02861), packed by bitsandbytes and read by kernels.

A value is `DYNAMIC_MAP[code] * largest`, with the largest magnitude of its block of `BLOCK` values. The map is the
signed dynamic tree: for each power of ten from 10**-6 to 10**0, the centers of 2**0 .. 2**6 equal cells of [0.1, 1] and
their negatives, and 0 and 1. It is handed to bitsandbytes as its code book, so that both sides hold the same floats
(bitsandbytes computes its own in float32, which differs in the last bit of some entries).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.quant.blocks import BLOCK, bitsandbytes, normal_blocks


def _dynamic_map() -> NDArray[np.float32]:
    values = [0.0, 1.0]
    for exponent in range(7):
        for cell in range(2**exponent):
            center = 10.0 ** (exponent - 6) * (0.1 + 0.9 * (cell + 0.5) / 2**exponent)
            values += [center, -center]
    return np.sort(np.array(values, np.float32))


DYNAMIC_MAP: Final = _dynamic_map()


def quantize(values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes, shaped like `values`, and the largest magnitude of each block of the flattened values.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    functional = bitsandbytes()
    import torch

    flat = torch.from_numpy(normal_blocks(values))
    codes, state = functional.quantize_blockwise(flat, code=torch.from_numpy(DYNAMIC_MAP), blocksize=BLOCK)
    return codes.numpy().reshape(values.shape), state.absmax.numpy()


def dequantize(codes: NDArray[np.uint8], largest: NDArray[np.float32]) -> NDArray[np.float32]:
    """The values, shaped like `codes`."""
    scale = np.repeat(largest, BLOCK)[: codes.size].reshape(codes.shape)
    values: NDArray[np.float32] = DYNAMIC_MAP[codes] * scale
    return values
