"""4-bit NormalFloat (Dettmers et al., arXiv 2305.14314, appendix E): 16 levels at quantiles of a Gaussian, 0 included.

Packed by bitsandbytes, which keeps two codes a byte, the first in the high half. The map is its own, to the last bit
(`tests/quant/test_blockwise.py`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.quant.blocks import BLOCK, bitsandbytes, normal_blocks

_NEGATIVE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495,
)  # fmt: skip
_POSITIVE = (
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
NORMAL_FLOAT_MAP: Final = np.array([*_NEGATIVE, 0.0, *_POSITIVE], np.float32)


def quantize(values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Bytes of two codes each, and the largest magnitude of each block, of an even number of flattened values.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    functional = bitsandbytes()
    import torch

    flat = torch.from_numpy(normal_blocks(values))
    codes, state = functional.quantize_4bit(flat, blocksize=BLOCK, quant_type="nf4")
    return codes.numpy().reshape(-1), state.absmax.numpy()
