"""What a low-bit form costs on one page: squared error over squared norm, of its keys and of its values.

0 is exact, 1 is as bad as zeros. A codec whose levels fit a Gaussian (k3v2) loses at most about .035 of keys coded in 3
bits and .117 of values in 2 (Max, "Quantizing for minimum distortion", 1960, table I). Norms are of the plain vectors:
keys have a large part in common, which k3v2 keeps exactly, so their ratio usually lies far below that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.geometry import Geometry
from tierkv.numba_setup import kernel
from tierkv.quant.contract import Bytes
from tierkv.quant.floats import BFLOAT16, KIND, page_words, widen

Words = NDArray[np.uint16] | NDArray[np.uint32]


class ErrorRatios(NamedTuple):
    """Of one page; 0 where there is neither an error nor a norm, 1 where there is an error of nothing."""

    keys: float
    values: float


def error_ratios(geometry: Geometry, exact: Bytes, decoded: Bytes, count: int) -> ErrorRatios:
    """Of the first `count` tokens of a page and of what its low-bit form says they are, both in exact layout."""
    sums = np.zeros((2, 2))
    is_bfloat16 = KIND[geometry.dtype] == BFLOAT16
    _add_up(page_words(geometry, exact), page_words(geometry, decoded), is_bfloat16, count, sums)
    return ErrorRatios(*(_ratio(error, norm) for error, norm in sums.tolist()))


def _ratio(error: float, norm: float) -> float:
    return error / norm if norm > 0 else float(error > 0)


@kernel(fastmath=True)
def _add_up(exact: Words, decoded: Words, is_bfloat16: bool, count: int, sums: NDArray[np.float64]) -> None:
    """`sums[side]` gets the squared error and the squared norm of keys (0) and values (1), in float64."""
    layers, _, heads, _, dim = exact.shape
    for layer in range(layers):
        for side in range(2):
            for head in range(heads):
                for token in range(count):
                    row, told = exact[layer, side, head, token], decoded[layer, side, head, token]
                    error, norm = 0.0, 0.0
                    for channel in range(dim):
                        value = np.float64(widen(row[channel], is_bfloat16))
                        off = np.float64(widen(told[channel], is_bfloat16)) - value
                        error += off * off
                        norm += value * value
                    sums[side, 0] += error
                    sums[side, 1] += norm
