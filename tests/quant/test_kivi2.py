"""What kivi2 promises beyond the contract: KIVI's axes and codes, and 8-bit scales by bitsandbytes."""

from __future__ import annotations

import sys

import bitsandbytes.functional
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.quant.pages import exact_page, gaussian_page, page_values
from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.quant import dynamic_map, get

CODEC = get("kivi2")
NO_STATE = np.zeros(0, np.float32)


def round_trip(geometry: Geometry, page: NDArray[np.uint8]) -> NDArray[np.float32]:
    packed, out = np.empty(CODEC.page_bytes(geometry), np.uint8), np.empty(geometry.page_bytes, np.uint8)
    CODEC.encode(geometry, page, 16, NO_STATE, packed)
    CODEC.decode(geometry, packed, 16, NO_STATE, out)
    return page_values(geometry, out)


def kivi(x: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """KIVI's fake quantization at 2 bits with exact scales (arXiv 2402.02750, section 3.1)."""
    zero = x.min(axis, keepdims=True)
    scale = (x.max(axis, keepdims=True) - zero) / 3
    return np.round((x - zero) / scale) * scale + zero


def test_the_map_is_bitsandbytes_own() -> None:
    np.testing.assert_allclose(
        dynamic_map.DYNAMIC_MAP, bitsandbytes.functional.create_dynamic_map().numpy(), rtol=2.5e-7, atol=0
    )


def test_dequantized_numbers_are_those_of_bitsandbytes() -> None:
    values = (
        np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
    )  # 150: two blocks and a short one
    codes, largest = dynamic_map.quantize(values)
    assert largest.tolist() == [abs(values.ravel()[start : start + 64]).max() for start in (0, 64, 128)]
    expected = bitsandbytes.functional.dequantize_blockwise(
        torch.from_numpy(codes.ravel()),
        absmax=torch.from_numpy(largest),
        code=bitsandbytes.functional.create_dynamic_map(),
        blocksize=64,
    )
    np.testing.assert_allclose(dynamic_map.dequantize(codes, largest).ravel(), expected, rtol=1e-6)


def test_eight_bit_scales_cost_little_against_kivi_with_exact_ones() -> None:
    geometry = Geometry(4, 4, 64, "float32")
    exact = page_values(geometry, gaussian_page(geometry)).astype(np.float64)
    decoded = round_trip(geometry, exact_page(geometry, exact))
    keys = kivi(exact[:, 0], axis=-2)
    values = kivi(exact[:, 1].reshape(4, 4, 16, 2, 32), axis=-1).reshape(4, 4, 16, 64)
    for side, oracle in enumerate((keys, values)):
        ours = ((decoded[:, side] - exact[:, side]) ** 2).mean()
        theirs = ((oracle - exact[:, side]) ** 2).mean()
        assert 0.97 * theirs < ours < 1.1 * theirs


def test_keys_are_scaled_by_channel_and_values_by_token() -> None:
    """Magnitudes that differ only along a codec's own axis cost nothing; the other axis' would ruin it."""
    geometry = Geometry(1, 1, 64, "float32")
    exact = page_values(geometry, gaussian_page(geometry)).astype(np.float64)
    exact[:, 0] *= 2.0 ** (np.arange(64) % 5)  # by channel
    exact[:, 1] *= 2.0 ** (np.arange(16) % 5)[:, None]  # by token
    decoded = round_trip(geometry, exact_page(geometry, exact))
    by_channel = ((decoded - exact)[0, 0, 0] ** 2).mean(0) / (exact[0, 0, 0] ** 2).mean(0)
    by_token = ((decoded - exact)[0, 1, 0] ** 2).mean(-1) / (exact[0, 1, 0] ** 2).mean(-1)
    assert by_channel.max() < 0.5
    assert by_token.max() < 0.5
    assert by_channel.mean() < 0.15
    assert by_token.mean() < 0.2


def test_four_equal_steps_stay_equal_steps_from_the_stored_minimum() -> None:
    """The map has 1 but not -1: the nearest to a block of equal minima is .9930 of it; the scale is stored exactly."""
    geometry = Geometry(1, 1, 32, "float32")
    exact = np.empty(geometry.shape, np.float32)
    exact[0, 0, 0] = (np.arange(16) % 4)[:, None] * 2.0 - 3.0  # every channel holds -3, -1, 1, 3
    exact[0, 1, 0] = np.arange(32) % 4 * 2.0 - 3.0
    decoded = round_trip(geometry, exact_page(geometry, exact))
    np.testing.assert_allclose(decoded - exact, 3 * (1 - 0.99296875), rtol=1e-4)


def test_without_bitsandbytes_encoding_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    geometry = Geometry(1, 1, 32, "float32")
    with pytest.raises(ConfigError, match=r"\[kivi\]"):
        round_trip(geometry, gaussian_page(geometry))
