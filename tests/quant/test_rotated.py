"""What the rotated family promises beyond the contract: size, error, state, and pages small enough to check by hand.

What the codecs of the family share is tested of k3v2.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests.quant.pages import exact_page, gaussian_page, page_values
from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.quant import NonFiniteValues, get
from tierkv.quant.contract import Codec
from tierkv.quant.lloyd import DISTORTION_4, DISTORTION_8

CODEC = get("k3v2")
SMOLLM2 = Geometry(30, 3, 64, "bfloat16")


def test_six_smollm2_pages_fit_an_exact_frame() -> None:
    assert CODEC.page_bytes(SMOLLM2) == 61_200
    assert SMOLLM2.page_bytes == 368_640
    assert 6 * 61_200 <= 368_640
    assert CODEC.bits_per_value(SMOLLM2) == pytest.approx(2.656, abs=0.001)


def gaussian_error(head_dim: int, codec: Codec = CODEC) -> list[float]:
    """Relative squared error of keys and values of unit Gaussian data."""
    geometry = Geometry(4, 8, head_dim, "float32")
    page, state = gaussian_page(geometry), np.zeros(codec.state_floats(geometry), np.float32)
    packed, out = np.empty(codec.page_bytes(geometry), np.uint8), np.empty(geometry.page_bytes, np.uint8)
    codec.encode(geometry, page, 16, state, packed)
    codec.decode(geometry, packed, 16, state, out)
    exact, decoded = page_values(geometry, page), page_values(geometry, out)
    return [float(((decoded - exact)[:, i] ** 2).mean() / (exact[:, i] ** 2).mean()) for i in (0, 1)]


def test_the_error_on_gaussian_data_is_that_of_the_optimal_quantizer() -> None:
    keys, values = gaussian_error(1024)
    assert keys == pytest.approx(DISTORTION_8, rel=0.02)
    assert values == pytest.approx(DISTORTION_4, rel=0.02)


def test_two_bit_keys_have_the_error_of_two_bit_values() -> None:
    assert gaussian_error(1024, get("rotated2")) == pytest.approx([DISTORTION_4, DISTORTION_4], rel=0.02)


def test_in_short_vectors_the_fitted_gain_gets_below_it() -> None:
    """A gain fitted to 64 values takes up one of 64 degrees of freedom, and more of the error."""
    keys, values = gaussian_error(64)
    assert 0.92 * DISTORTION_8 < keys < DISTORTION_8
    assert 0.92 * DISTORTION_4 < values < DISTORTION_4


def test_the_state_is_the_mean_of_the_written_keys() -> None:
    geometry = Geometry(2, 3, 64, "bfloat16")
    pages, counts = [gaussian_page(geometry, seed) for seed in range(3)], [16, 5, 1]
    written = [
        page_values(geometry, page)[:, 0, :, :count] for page, count in zip(pages, counts, strict=True)
    ]
    expected = np.concatenate(written, axis=2).astype(np.float64).mean(axis=2)
    np.testing.assert_allclose(CODEC.fit_state(geometry, pages, counts), expected.ravel(), rtol=1e-6)


def test_the_state_without_pages_is_zero_and_from_nan_is_refused() -> None:
    geometry = Geometry(1, 1, 8, "float32")
    np.testing.assert_array_equal(CODEC.fit_state(geometry, [], []), np.zeros(8))
    with pytest.raises(NonFiniteValues):
        CODEC.fit_state(geometry, [exact_page(geometry, np.full(geometry.shape, np.nan))], [16])


def test_a_common_offset_of_keys_costs_nothing_once_it_is_in_the_state() -> None:
    geometry = Geometry(2, 3, 64, "float32")
    exact = page_values(geometry, gaussian_page(geometry))
    exact[:, 0] += 100 * np.random.default_rng(5).standard_normal((2, 3, 1, 64)).astype(np.float32)
    page = exact_page(geometry, exact)
    state = CODEC.fit_state(geometry, [page], [16])
    packed, out = np.empty(CODEC.page_bytes(geometry), np.uint8), np.empty(geometry.page_bytes, np.uint8)
    CODEC.encode(geometry, page, 16, state, packed)
    CODEC.decode(geometry, packed, 16, state, out)
    error = ((page_values(geometry, out) - exact)[:, 0] ** 2).mean()
    assert error < 1.05 * DISTORTION_8  # unit variance is left after the offset


def test_a_page_of_one_token_and_eight_channels_packs_as_the_docstring_says() -> None:
    geometry = Geometry(1, 1, 8, "float32", page_tokens=2)
    # H diag(signs) of the impulse e0 is 1/sqrt(8) everywhere; minus e0 is its negative.
    values = np.zeros(geometry.shape)
    values[0, 0, 0, 0, 0], values[0, 1, 0, 0, 0] = -np.sqrt(8.0), np.sqrt(8.0)
    packed = np.empty(CODEC.page_bytes(geometry), np.uint8)
    CODEC.encode(geometry, exact_page(geometry, values), 1, np.zeros(8, np.float32), packed)
    # All rotated channels are 1 in magnitude. Keys: 1 lies in the cell of .7560 (index 1), so the fitted gain is
    # 1/.7560, and 1/gain = .7560 is still index 1. Values: 1 lies above .9816 (index 1): gain 1/1.5104.
    header = packed[:8].view(np.float32)
    np.testing.assert_allclose(header, [1 / 0.7560053, 1 / 1.5104176], rtol=1e-5)
    key_block, value_block = packed[8:16], packed[16:]
    assert key_block.tolist() == [0, 0, 0b01010101, 0, 0b01010101, 0, 0b11111111, 0]
    assert value_block.tolist() == [0, 0, 0b01010101, 0b01010101, 0, 0]


def test_two_bit_keys_of_such_a_page_pack_as_the_docstring_says() -> None:
    geometry, codec = Geometry(1, 1, 8, "float32", page_tokens=2), get("rotated2")
    values = np.zeros(geometry.shape)
    values[0, 0, 0, 0, 0], values[0, 1, 0, 0, 0] = -np.sqrt(8.0), np.sqrt(8.0)
    packed = np.empty(codec.page_bytes(geometry), np.uint8)
    codec.encode(geometry, exact_page(geometry, values), 1, np.zeros(8, np.float32), packed)
    np.testing.assert_allclose(packed[:8].view(np.float32), [1 / 1.5104176, 1 / 1.5104176], rtol=1e-5)
    # Keys: index 1 and negative is code 3. Two bytes of four channels for each token, tokens next to each other.
    assert packed[8:14].tolist() == [0, 0, 0xFF, 0, 0xFF, 0]
    assert packed[14:].tolist() == [0, 0, 0b01010101, 0b01010101, 0, 0]


def test_a_token_far_below_the_others_decodes_to_zero_and_near_ones_do_not() -> None:
    geometry = Geometry(1, 1, 64, "float32")
    exact = page_values(geometry, gaussian_page(geometry))
    exact[:, :, :, 1] *= 2.0**-12
    exact[:, :, :, 2] *= 2.0**-20  # gains reach down to 2**-15.9 of the largest
    packed, out = np.empty(CODEC.page_bytes(geometry), np.uint8), np.empty(geometry.page_bytes, np.uint8)
    state = np.zeros(64, np.float32)
    CODEC.encode(geometry, exact_page(geometry, exact), 16, state, packed)
    CODEC.decode(geometry, packed, 16, state, out)
    decoded = page_values(geometry, out)
    assert (decoded[:, :, :, 2] == 0).all()
    error = ((decoded - exact)[:, :, :, 1] ** 2).mean() / (exact[:, :, :, 1] ** 2).mean()
    assert error < 0.12


def test_a_state_of_another_geometry_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="5760"):
        CODEC.encode(
            SMOLLM2,
            np.zeros(SMOLLM2.page_bytes, np.uint8),
            16,
            np.zeros(0, np.float32),
            np.zeros(61_200, np.uint8),
        )


def test_packing_k3v2_imports_neither_torch_nor_bitsandbytes() -> None:
    program = (
        "import sys, numpy as np, tierkv.quant, tierkv.quant.fused\n"
        "from tierkv.geometry import Geometry\n"
        "codec, g = tierkv.quant.get('k3v2'), Geometry(1, 1, 8, 'bfloat16')\n"
        "page = np.zeros(g.page_bytes, np.uint8)\n"
        "codec.encode(g, page, 16, np.zeros(8, np.float32), np.zeros(codec.page_bytes(g), np.uint8))\n"
        "assert not {'torch', 'bitsandbytes'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_more_channels_than_a_tile_is_padded_for_are_refused() -> None:
    assert get("k3v2").page_bytes(Geometry(1, 1, 1024, "float32", 3)) > 0
    with pytest.raises(ConfigError, match="1024 at most, and head_dim is 1032"):
        get("k3v2").page_bytes(Geometry(1, 1, 1032, "float32", 3))
