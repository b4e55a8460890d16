"""Exact pages for codec tests, made and read through torch's own dtypes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.geometry import Geometry
from tierkv.quant.contract import Codec
from tierkv.quant.moments import Moments
from tierkv.quant.whole_products import WHOLE


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


def example_state(codec: Codec, geometry: Geometry, seed: int = 1) -> NDArray[np.float32]:
    """Any state that the codec might have been fitted to."""
    if codec.takes_moments:
        return codec.fit_moments(geometry, example_moments(geometry, seed))
    return gaussian_state(codec.state_floats(geometry), seed)


def example_moments(geometry: Geometry, seed: int = 1) -> Moments:
    """Moments of channels whose variances fall by a factor of a thousand, with unlike layers and heads."""
    rng, dim = np.random.default_rng(seed), geometry.head_dim
    shape = (geometry.num_layers, geometry.num_kv_heads)

    def second() -> NDArray[np.float32]:
        axes = np.linalg.qr(rng.standard_normal((*shape, dim, dim)))[0]
        variances = rng.uniform(0.5, 2, (*shape, 1)) * np.logspace(0.5, -2.5, dim)
        return ((axes * variances[..., None, :]) @ axes.swapaxes(-1, -2)).astype(np.float32)

    mean = rng.standard_normal((*shape, dim))
    return Moments(mean.astype(np.float32), *(second() for _ in Moments._fields[1:]))


IN_PLACE = 1e-4 if WHOLE else 2e-5
"""What attention in place may be off, as a fraction of the sizes of what it multiplies."""


def assert_products(got: NDArray[np.float32], a: NDArray[np.floating], b: NDArray[np.floating]) -> None:
    """`got` is `a @ b`, to within `IN_PLACE` of the size of each row of `a` times the size of `b`."""
    sizes = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b)
    assert (abs(got - a.astype(np.float64) @ b) < IN_PLACE * sizes + 1e-6).all()
