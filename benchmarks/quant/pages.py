"""K/V `[layers, 2, kv_heads, tokens, head_dim]` as exact pages, and back."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.geometry import Geometry

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def to_pages(geometry: Geometry, kv: torch.Tensor) -> NDArray[np.uint8]:
    """`[pages, page_bytes]`; `kv` has the geometry's dtype and a multiple of `page_tokens` tokens."""
    layers, _, heads, tokens, dim = geometry.shape
    pages = kv.reshape(layers, 2, heads, -1, tokens, dim).permute(3, 0, 1, 2, 4, 5)
    data: NDArray[np.uint8] = pages.contiguous().flatten(1).view(torch.uint8).numpy()
    return data


def from_pages(geometry: Geometry, pages: NDArray[np.uint8]) -> torch.Tensor:
    """The K/V of `[pages, page_bytes]`."""
    shaped = torch.from_numpy(pages).view(TORCH[geometry.dtype]).view(len(pages), *geometry.shape)
    return shaped.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
