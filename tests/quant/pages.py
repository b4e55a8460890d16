"""Exact pages for codec tests, made and read through torch's own dtypes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.geometry import Geometry


def exact_page(geometry: Geometry, values: NDArray[np.float64] | NDArray[np.float32]) -> NDArray[np.uint8]:
    """The bytes of a page with these values, rounded to the page dtype by torch."""
    tensor = torch.from_numpy(np.ascontiguousarray(values.reshape(geometry.shape)))
    tensor = tensor.to(torch.float32).to(getattr(torch, geometry.dtype)).contiguous()
    return tensor.view(torch.uint8).flatten().numpy().copy()


def page_values(geometry: Geometry, page: NDArray[np.uint8]) -> NDArray[np.float32]:
    """`geometry.shape` float32 from an exact page's bytes."""
    tensor = torch.from_numpy(page.copy()).view(getattr(torch, geometry.dtype)).reshape(geometry.shape)
    return tensor.float().numpy()


def gaussian_page(geometry: Geometry, seed: int = 0, scale: float = 1.0) -> NDArray[np.uint8]:
    return exact_page(geometry, np.random.default_rng(seed).standard_normal(geometry.shape) * scale)


def gaussian_state(floats: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(floats).astype(np.float32)
