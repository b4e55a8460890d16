"""Which codecs have kernels on a device, and how to get them. Importing this brings neither torch nor triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import ConfigError
from tierkv.geometry import Geometry

if TYPE_CHECKING:
    import torch

    from tierkv.quant.klt_triton import KltPages
    from tierkv.quant.rotated_triton import RotatedPages

KEY_BITS = {"k3v2": 3, "rotated2": 2}
"""Codecs of the rotated family, by the bits of their keys."""

SERVED = (*KEY_BITS, "klt2")
"""Codecs that kernels on a device encode, decode and attend."""


def device_pages(
    name: str, geometry: Geometry, state: NDArray[np.float32], device: torch.device
) -> RotatedPages | KltPages:
    """The codec `name` of one model's pages on `device`, with its state there.

    Raises:
        ConfigError: no kernels for this codec or shape, or no triton.
    """
    require_served(name, "", geometry.page_tokens)
    if name == "klt2":
        from tierkv.quant.klt_triton import KltPages

        return KltPages(geometry, state, device)
    from tierkv.quant.rotated_triton import RotatedPages

    return RotatedPages(geometry, state, device, KEY_BITS[name])


def require_served(codec: str, middle: str, page_tokens: int) -> None:
    """Raises `ConfigError`: pages of these forms and this size cannot be served on a device."""
    if codec not in SERVED:
        raise ConfigError(
            f"codec = {codec!r} has no kernels for a GPU; take {', '.join(SERVED[:-1])} or {SERVED[-1]}, "
            'or device = "cpu"'
        )
    if middle:
        raise ConfigError(
            f'middle = {middle!r}: kernels on a GPU write no middle form; leave it out, or take device = "cpu"'
        )
    if page_tokens & (page_tokens - 1):
        raise ConfigError(
            f"page_tokens = {page_tokens}: kernels on a GPU take a power of two; change it, "
            'or take device = "cpu"'
        )
