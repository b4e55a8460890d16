"""Products in whole numbers: nothing overflows, nothing is lost, and machines without them give the same."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.quant.pages import IN_PLACE
from tierkv.quant.lloyd import LEVELS_4, LEVELS_8
from tierkv.quant.tile_products import LIMIT, key_tile, ready_factors, ready_query, value_tile
from tierkv.quant.whole_products import WHOLE, whole_levels

FOUR = np.concatenate([LEVELS_4, -LEVELS_4])
"""Of a 2-bit code: magnitude in the lower bit, sign in the upper."""


@pytest.mark.parametrize("levels", [LEVELS_4, LEVELS_8], ids=["4", "8"])
def test_levels_are_whole_numbers_of_a_unit(levels: NDArray[np.float32]) -> None:
    whole = whole_levels(levels.tolist(), 4095)
    assert max(whole.steps) <= 4095
    np.testing.assert_allclose(np.array(whole.steps) * whole.unit, levels, rtol=3e-5)


def key_levels(key_bits: int, page: NDArray[np.uint8], dim: int) -> NDArray[np.float32]:
    """`[dim, 16]` of a tile of keys whose rows are 16 bytes apart, its signs behind its magnitudes."""
    rows = page[: dim * 4].reshape(dim // 4, 1, 16) >> (2 * np.arange(4)[:, None]) & 3
    codes = rows.reshape(dim, 16)
    if key_bits == 2:
        return FOUR[codes]
    signs = page[dim * 4 :][: dim * 2].reshape(dim // 8, 1, 16) >> np.arange(8)[:, None] & 1
    return LEVELS_8[codes] * np.where(signs.reshape(dim, 16), -1, 1)


@pytest.mark.parametrize("key_bits", [2, 3])
@pytest.mark.parametrize("dim", [8, 64, 72, 128, 256, 1024])
@pytest.mark.parametrize("groups", [1, 3, 4, 7])
def test_products_with_keys(key_bits: int, dim: int, groups: int) -> None:
    """The last query and the last key are as large as can be, everywhere of one sign."""
    rng = np.random.default_rng(dim + groups)
    page = rng.integers(0, 256, dim * 6).astype(np.uint8)
    page[15::16] = 0x55 if key_bits == 2 else 0xFF  # all far, or all far and negative
    query = rng.standard_normal((groups, dim)).astype(np.float32)
    query[-1] = -3e4
    wanted = query.astype(np.float64) @ key_levels(key_bits, page, dim)
    ready, sums = query.copy(), np.full(groups * 16, np.nan, np.float32)
    for row in ready:
        ready_query(row)
    key_tile(key_bits, page, 0, dim * 4, 16, ready, sums)
    sizes = np.linalg.norm(query, axis=1)[:, None] * np.linalg.norm(key_levels(key_bits, page, dim), axis=0)
    assert (abs(sums.reshape(groups, 16) - wanted) < IN_PLACE * sizes).all()


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 33, 63, 64])
@pytest.mark.parametrize("groups", [1, 3, 4, 6])
def test_products_with_values(count: int, groups: int) -> None:
    """Whatever lies behind the last token is not read; the first channel's levels are as large as can be."""
    rng, quarter = np.random.default_rng(count), 32
    page = rng.integers(0, 256, count * quarter).astype(np.uint8)
    page[::quarter] = 0x55
    given = rng.random((groups, LIMIT)).astype(np.float32)
    given[0] = 0.75
    codes = page.reshape(count, 1, quarter) >> (2 * np.arange(4)[:, None]) & 3
    levels = FOUR[codes].reshape(count, 4 * quarter)
    wanted = 2.0 + given[:, :count].astype(np.float64) @ levels
    factors, acc = given.copy().reshape(-1), np.full((groups, 4 * quarter), 2.0, np.float32)
    ready_factors(factors, groups, count)
    for byte in (0, 16):
        value_tile(page, 0, byte, count, factors, acc)
    sizes = np.linalg.norm(given[:, :count], axis=1)[:, None] * np.linalg.norm(levels, axis=0)
    assert (abs(acc - wanted) < IN_PLACE * sizes + 1e-6).all()


def test_nothing_times_anything_is_nothing_and_nan_stays_nan() -> None:
    page = np.random.default_rng(0).integers(0, 256, 64 * 6).astype(np.uint8)
    for value, wanted in ((0.0, 0.0), (1e-40, 0.0), (np.nan, np.nan)):
        query, sums = np.full((1, 64), value, np.float32), np.empty(16, np.float32)
        ready_query(query[0])
        key_tile(3, page, 0, 256, 16, query, sums)
        np.testing.assert_allclose(sums, wanted, atol=1e-30)
    for value in (0.0, 1e-40):
        factors, acc = np.full(LIMIT, value, np.float32), np.ones((1, 64), np.float32)
        ready_factors(factors, 1, 16)
        value_tile(page, 0, 0, 16, factors, acc)
        np.testing.assert_array_equal(acc, 1.0)


@pytest.mark.parametrize("size", [1e-29, 1e-12, 1e30])
def test_small_and_large_factors_keep_their_digits(size: float) -> None:
    page, factors = np.full(16 * 16, 0x55, np.uint8), np.full(LIMIT, size, np.float32)
    acc = np.zeros((1, 64), np.float32)
    ready_factors(factors, 1, 16)
    value_tile(page, 0, 0, 16, factors, acc)
    np.testing.assert_allclose(acc, 16 * size * LEVELS_4[1], rtol=IN_PLACE)


CODE = """
import numpy as np
from tierkv.geometry import Geometry
from tierkv.quant import fused, get
from tierkv.quant.whole_products import WHOLE

codec, geometry = get("k3v2"), Geometry(1, 1, 64, "float32")
rng = np.random.default_rng(0)
exact = rng.standard_normal(geometry.shape).astype(np.float32).view(np.uint8).reshape(-1)
state, page = np.zeros(64, np.float32), np.empty(codec.page_bytes(geometry), np.uint8)
codec.encode(geometry, exact, 16, state, page)
query, weights = (rng.random(shape).astype(np.float32) for shape in ((3, 64), (3, 16)))
ready, bias, logits, sums = np.empty((3, 64), "f4"), np.empty(3, "f4"), np.empty((3, 16), "f4"), np.zeros((3, 64), "f4")
fused.prepare_query(codec.code, query, 0, 0, 1, 1, 16, 64, state, ready, bias)
fused.page_logits(codec.code, page, 0, 0, 1, 1, 16, 64, 16, state, ready, bias, logits)
fused.page_values(codec.code, page, 0, 0, 1, 1, 16, 64, 16, state, weights, sums)
print(int(WHOLE), *logits.flatten(), *sums.flatten())
"""


def products(**environment: str) -> NDArray[np.float64]:
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=os.environ | environment, capture_output=True, text=True, timeout=300,
        check=True,
    )  # fmt: skip
    return np.array(done.stdout.split(), np.float64)


@pytest.mark.skipif(not WHOLE, reason="this machine has no AVX-512 VNNI")
def test_machines_without_the_instruction_give_the_same(tmp_path: object) -> None:
    own, plain = products(), products(NUMBA_CPU_NAME="generic", NUMBA_CACHE_DIR=str(tmp_path))
    assert (own[0], plain[0]) == (1, 0) and len(own) == 1 + 3 * 16 + 3 * 64
    assert (abs(own - plain)[1:] < IN_PLACE * 8 * 8).all()
