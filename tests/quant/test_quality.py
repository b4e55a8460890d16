"""Error ratios: pages whose ratio can be worked out by hand, in every element type."""

from __future__ import annotations

import numpy as np
import pytest

from tests.quant.pages import exact_page, gaussian_page
from tierkv.geometry import DTypeName, Geometry
from tierkv.quant import get
from tierkv.quant.quality import error_ratios

DTYPES: tuple[DTypeName, ...] = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ratio_is_the_squared_error_over_the_squared_norm_of_each_side(dtype: DTypeName) -> None:
    """Keys of 2 told as 1.5 lose (1/2)^2 of 2^2; of values, half the channels of 4 told as 0 lose half."""
    geometry = Geometry(3, 2, 8, dtype, 4)
    exact, told = np.empty(geometry.shape), np.empty(geometry.shape)
    exact[:, 0], told[:, 0] = 2.0, 1.5
    exact[:, 1], told[:, 1] = -4.0, -4.0
    told[:, 1, ..., ::2] = 0.0
    found = error_ratios(geometry, exact_page(geometry, exact), exact_page(geometry, told), 4)
    assert found == (pytest.approx(1 / 16), pytest.approx(0.5))


def test_tokens_that_are_not_written_do_not_count() -> None:
    geometry = Geometry(1, 1, 8, "float32", 4)
    exact, told = np.ones(geometry.shape), np.ones(geometry.shape)
    told[:, :, :, 2:] = 9.0
    assert error_ratios(geometry, exact_page(geometry, exact), exact_page(geometry, told), 2) == (0.0, 0.0)


def test_a_page_of_zeros_has_lost_nothing_or_everything() -> None:
    geometry = Geometry(1, 1, 8, "float32", 4)
    zeros, told = np.zeros(geometry.shape), np.zeros(geometry.shape)
    told[:, 1] = 0.25
    page = exact_page(geometry, zeros)
    assert error_ratios(geometry, page, page, 4) == (0.0, 0.0)
    assert error_ratios(geometry, page, exact_page(geometry, told), 4) == (0.0, 1.0)


def test_k3v2_loses_of_gaussian_pages_a_little_less_than_a_lloyd_max_quantizer_does() -> None:
    """Max 1960, table I: mean squared error .03454 with 8 levels and .1175 with 4, of a Gaussian of unit variance; a
    gain fitted to each vector takes a few percent off."""
    geometry, codec = Geometry(8, 4, 64, "float32", 16), get("k3v2")
    page = gaussian_page(geometry)
    state = np.zeros(codec.state_floats(geometry), np.float32)
    packed, decoded = np.empty(codec.page_bytes(geometry), np.uint8), np.empty(geometry.page_bytes, np.uint8)
    codec.encode(geometry, page, 16, state, packed)
    codec.decode(geometry, packed, 16, state, decoded)
    keys, values = error_ratios(geometry, page, decoded, 16)
    assert 0.9 * 0.03454 < keys < 0.03454
    assert 0.9 * 0.1175 < values < 0.1175
