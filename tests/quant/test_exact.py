"""What the exact codec promises beyond the contract: nothing changes but the tokens that are not written."""

from __future__ import annotations

import numpy as np
import pytest

from tests.quant.pages import gaussian_page
from tierkv.geometry import DTypeName, Geometry
from tierkv.quant import get

CODEC, NO_STATE = get("exact"), np.zeros(0, np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_full_page_goes_through_byte_for_byte(dtype: DTypeName) -> None:
    geometry = Geometry(2, 3, 72, dtype)
    page = gaussian_page(geometry)
    packed, out = np.empty_like(page), np.empty_like(page)
    CODEC.encode(geometry, page, 16, NO_STATE, packed)
    CODEC.decode(geometry, packed, 16, NO_STATE, out)
    np.testing.assert_array_equal(packed, page)
    np.testing.assert_array_equal(out, page)
    assert CODEC.bits_per_value(geometry) == 8 * geometry.item_bytes


def test_tokens_that_are_not_written_become_zero_and_the_others_stay() -> None:
    geometry = Geometry(1, 2, 8, "bfloat16", page_tokens=4)
    page = gaussian_page(geometry)
    packed = np.empty_like(page)
    CODEC.encode(geometry, page, 3, NO_STATE, packed)
    tokens, before = packed.reshape(4, 4, 16), page.reshape(4, 4, 16)  # [sides and heads, tokens, bytes]
    np.testing.assert_array_equal(tokens[:, :3], before[:, :3])
    assert not tokens[:, 3].any()
