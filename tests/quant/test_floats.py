"""Bit conversions in kernels, against torch's own for every half-precision number and for chosen float32 numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tierkv.numba_setup import kernel
from tierkv.quant.floats import KIND, bits_of, narrow_bfloat16, narrow_float16, store_clamped, widen


@kernel()
def widen_all(words: NDArray[np.uint16], is_bfloat16: bool, out: NDArray[np.float32]) -> None:
    for index in range(words.shape[0]):
        out[index] = widen(words[index], is_bfloat16)


@kernel()
def narrow_all(values: NDArray[np.float32], is_bfloat16: bool, out: NDArray[np.uint16]) -> None:
    for index in range(values.shape[0]):
        out[index] = narrow_bfloat16(values[index]) if is_bfloat16 else narrow_float16(values[index])


@kernel()
def bits_of_all(values: NDArray[np.float32], out: NDArray[np.uint32]) -> None:
    for index in range(values.shape[0]):
        out[index] = bits_of(values[index])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_widens_to_what_torch_says(dtype: str) -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(1 << 16, np.float32)
    widen_all(words, dtype == "bfloat16", out)
    expected = torch.from_numpy(words.view(np.int16).copy()).view(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(out, expected)  # NaNs compare equal
    assert (np.signbit(out) == np.signbit(expected))[~np.isnan(expected)].all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_narrows_to_nearest_even_like_torch(dtype: str) -> None:
    rng = np.random.default_rng(0)
    every_half = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(getattr(torch, dtype)).float()
    bits = every_half.numpy().view(np.uint32)
    half_step = {"float16": 1 << 12, "bfloat16": 1 << 15}[dtype]
    middles = bits.astype(np.int64) + half_step
    ties = np.concatenate([middles - 1, middles, middles + 1])
    anything = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    values = np.concatenate([bits, ties.astype(np.uint32), anything]).view(np.float32)
    out = np.empty(values.size, np.uint16)
    narrow_all(values, dtype == "bfloat16", out)
    expected = (
        torch.from_numpy(values.copy()).to(getattr(torch, dtype)).view(torch.int16).numpy().view(np.uint16)
    )
    wanted = ~np.isnan(values)
    np.testing.assert_array_equal(out[wanted], expected[wanted])
    narrowed = torch.from_numpy(out[~wanted].view(np.int16)).view(getattr(torch, dtype))
    assert narrowed.isnan().all(), "NaN stays NaN"


def test_bits_are_the_bits() -> None:
    values = np.array([0.0, -0.0, 1.0, -2.5, 1e-45, np.inf], np.float32)
    out = np.empty(values.size, np.uint32)
    bits_of_all(values, out)
    np.testing.assert_array_equal(out, values.view(np.uint32))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_stores_saturate_instead_of_overflowing(dtype: str) -> None:
    words = np.zeros(3, np.uint32 if dtype == "float32" else np.uint16)
    store_clamped(words, KIND[dtype], np.array([np.inf, -3.4028235e38, 1.5], np.float32))
    kind = getattr(torch, dtype)
    stored = torch.from_numpy(words.view(np.int32 if dtype == "float32" else np.int16)).view(kind)
    top = torch.finfo(kind).max
    assert stored.tolist() == [top, -top, 1.5]
