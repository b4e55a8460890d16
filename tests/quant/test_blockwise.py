"""What int8 and nf4 promise beyond the contract: their bytes are those of bitsandbytes, and so are their values."""

from __future__ import annotations

import sys

import bitsandbytes.functional as functional
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.quant.pages import exact_page, gaussian_page, page_values
from tierkv.errors import ConfigError
from tierkv.geometry import DTypeName, Geometry
from tierkv.quant import get
from tierkv.quant.blocks import normal_blocks
from tierkv.quant.contract import Codec
from tierkv.quant.dynamic_map import DYNAMIC_MAP
from tierkv.quant.normal_float import NORMAL_FLOAT_MAP

NO_STATE = np.zeros(0, np.float32)


def pack(codec: Codec, geometry: Geometry, page: NDArray[np.uint8]) -> NDArray[np.uint8]:
    packed = np.empty(codec.page_bytes(geometry), np.uint8)
    codec.encode(geometry, page, geometry.page_tokens, NO_STATE, packed)
    return packed


def unpack(codec: Codec, geometry: Geometry, packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    out = np.empty(geometry.page_bytes, np.uint8)
    codec.decode(geometry, packed, geometry.page_tokens, NO_STATE, out)
    return page_values(geometry, out)


def by_bitsandbytes(name: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, block magnitudes and dequantized values of a float32 tensor, by nothing but bitsandbytes."""
    if name == "nf4":
        codes, state = functional.quantize_4bit(values, blocksize=64, quant_type="nf4")
        return codes, state.absmax, functional.dequantize_4bit(codes, state)
    codes, state = functional.quantize_blockwise(
        values, code=torch.from_numpy(DYNAMIC_MAP.copy()), blocksize=64
    )
    return codes, state.absmax, functional.dequantize_blockwise(codes, state)


@pytest.mark.parametrize("name", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_a_full_page_is_what_bitsandbytes_makes_of_its_values(name: str, dtype: DTypeName, dim: int) -> None:
    """16 tokens of any of these head dims fill blocks of 64, so the page is one tensor to bitsandbytes."""
    codec, geometry = get(name), Geometry(2, 3, dim, dtype)
    page = gaussian_page(geometry)
    codes, largest, values = by_bitsandbytes(name, torch.from_numpy(page_values(geometry, page)).flatten())
    packed = pack(codec, geometry, page)
    header = 4 * len(largest)
    np.testing.assert_array_equal(packed[:header].view(np.float32), largest)
    np.testing.assert_array_equal(packed[header:], codes.flatten())
    rounded = exact_page(geometry, values.numpy())
    np.testing.assert_array_equal(unpack(codec, geometry, packed), page_values(geometry, rounded))


@pytest.mark.parametrize(("name", "bits"), [("int8", 8.5), ("nf4", 4.5)])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_a_scale_for_64_values_costs_half_a_bit(name: str, bits: float, dim: int) -> None:
    assert get(name).bits_per_value(Geometry(2, 3, dim, "bfloat16")) == bits


def test_the_normal_float_map_is_bitsandbytes_own() -> None:
    np.testing.assert_array_equal(NORMAL_FLOAT_MAP, functional.get_4bit_type("nf4", device="cpu").numpy())


@pytest.mark.parametrize(("name", "levels"), [("int8", DYNAMIC_MAP), ("nf4", NORMAL_FLOAT_MAP)])
def test_each_value_goes_to_the_nearest_level(name: str, levels: NDArray[np.float32]) -> None:
    """Up to 2**-15 of the block's largest: bitsandbytes looks 8-bit codes up in a table of that step."""
    codec, geometry = get(name), Geometry(2, 2, 64, "float32")
    page = gaussian_page(geometry)
    exact = page_values(geometry, page).astype(np.float64)
    largest = abs(exact).max(-1, keepdims=True)  # at head_dim 64 a token is a block
    nearest = abs(exact[..., None] - levels.astype(np.float64) * largest[..., None]).min(-1)
    error = abs(unpack(codec, geometry, pack(codec, geometry, page)) - exact)
    assert ((error - nearest) <= 2**-15 * largest + 1e-6).all()


def test_a_token_far_above_the_others_spoils_only_its_own_blocks() -> None:
    codec, geometry = get("nf4"), Geometry(1, 1, 64, "float32")
    exact = page_values(geometry, gaussian_page(geometry))
    exact[:, :, :, 5] *= 1e6
    decoded = unpack(codec, geometry, pack(codec, geometry, exact_page(geometry, exact)))
    others = np.arange(16) != 5
    error = ((decoded - exact)[:, :, :, others] ** 2).mean() / (exact[:, :, :, others] ** 2).mean()
    assert error < 0.02


def test_a_page_of_two_tokens_packs_as_the_docstring_says() -> None:
    geometry = Geometry(1, 1, 4, "float32", page_tokens=2)
    # Levels of 2 * .7230 = 1.4459 (code 14), 2 * .4407 (12: 1 is .5 of the largest) and 2 * -.2844 (4).
    values = np.array([[[2.0, -2.0, 0.0, 1.4459], [1.0, 0.0, 0.0, -0.5689]]] * 2)
    packed = pack(get("nf4"), geometry, exact_page(geometry, values))
    assert packed[:8].view(np.float32).tolist() == [2.0, 2.0]
    assert packed[8:].tolist() == [0xF0, 0x7E, 0xC7, 0x74] * 2


def test_subnormal_blocks_alone_are_zeroed() -> None:
    values = np.full(64 * 3 + 10, 2.0**-127, np.float32)
    values[70] = 2.0**-126
    np.testing.assert_array_equal(normal_blocks(values)[64:128], values[64:128])
    assert not normal_blocks(values)[:64].any() and not normal_blocks(values)[128:].any()


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_without_bitsandbytes_encoding_names_the_extra(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    geometry = Geometry(1, 1, 64, "float32")
    with pytest.raises(ConfigError, match=r"\[kivi\]"):
        pack(get(name), geometry, gaussian_page(geometry))
