"""Attention in place for every number of query heads and for pages that are no multiple of the vector width."""

from __future__ import annotations

import numpy as np
import pytest

from tests.quant.pages import assert_products, example_state, gaussian_page
from tierkv.geometry import DTypeName, Geometry
from tierkv.quant import NAMES, fused, get
from tierkv.quant.rows_fused import BUFFER


def check(name: str, geometry: Geometry, count: int, groups: int) -> None:
    """One layer and head of a page that lies anywhere in a pool, against the decoded page."""
    codec = get(name)
    _, _, _, tokens, dim = geometry.shape
    state = example_state(codec, geometry)
    size, code = codec.page_bytes(geometry), codec.kernel_code(geometry)
    pool = np.full(size + 77, 0xEE, np.uint8)
    page = pool[64 + 13 :][:size]  # no alignment is needed
    exact_bytes = gaussian_page(geometry)
    codec.encode(geometry, exact_bytes, count, state, page)
    np.testing.assert_array_equal(page, codec.reference_encode(geometry, exact_bytes, count, state))
    exact = codec.reference_decode(geometry, page, count, state).astype(np.float64)
    rng = np.random.default_rng(tokens)
    shape, layer, head = (geometry.num_layers, geometry.num_kv_heads, tokens, dim), 1, 2
    query = rng.standard_normal((groups, dim)).astype(np.float32)
    weights = rng.random((groups, tokens)).astype(np.float32)
    prepared, bias = np.empty_like(query), np.empty(groups, np.float32)
    logits, sums, out = np.empty((groups, tokens), np.float32), np.zeros_like(query), np.zeros_like(query)
    fused.prepare_query(code, query, layer, head, *shape, state, prepared, bias)
    fused.page_logits(code, pool[64 + 13 :], layer, head, *shape, count, state, prepared, bias, logits)
    fused.page_values(code, pool[64 + 13 :], layer, head, *shape, count, state, weights, sums)
    fused.finish_values(code, sums, layer, head, *shape, state, out)
    assert_products(logits[:, :count], query, exact[layer, 0, head, :count].T)
    assert_products(out, weights[:, :count], exact[layer, 1, head, :count])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("tokens", "count"), [(3, 3), (8, 7), (16, 9), (16, 16), (40, 40), (40, 33)])
@pytest.mark.parametrize("groups", [1, 2, 5, 16])
@pytest.mark.parametrize("dim", [32, 80])
def test_products_in_place_equal_those_with_the_decoded_page(
    name: str, tokens: int, count: int, groups: int, dim: int
) -> None:
    check(name, Geometry(2, 3, dim, "float32", tokens), count, groups)


@pytest.mark.parametrize("name", ["k3v2", "rotated2"])
@pytest.mark.parametrize("dim", [8, 24, 120, 1024])
@pytest.mark.parametrize(("tokens", "count"), [(16, 16), (40, 33)])
def test_the_rotated_family_takes_any_multiple_of_eight_channels(
    name: str, dim: int, tokens: int, count: int
) -> None:
    check(name, Geometry(2, 3, dim, "float32", tokens), count, 3)


@pytest.mark.parametrize("name", ["int8", "nf4", "exact"])
@pytest.mark.parametrize("dim", [2, 6, BUFFER // 2 + 2, BUFFER, BUFFER + 30])
def test_rows_of_any_even_length_are_read(name: str, dim: int) -> None:
    """Several tokens, one token, and a part of one token in the buffer at once."""
    check(name, Geometry(2, 3, dim, "float32", 5), 4, 3)


@pytest.mark.parametrize("name", ["int8", "nf4", "exact"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_pages_are_read(name: str, dtype: DTypeName) -> None:
    check(name, Geometry(2, 3, 48, dtype, 16), 13, 3)


@pytest.mark.parametrize("name", NAMES)
def test_sums_of_several_pages_add_up(name: str) -> None:
    codec, geometry = get(name), Geometry(1, 1, 64, "float32")
    state, shape = example_state(codec, geometry), (1, 1, 16, 64)
    weights = np.full((2, 16), 0.5, np.float32)
    sums, out, expected = np.zeros((2, 64), np.float32), np.zeros((2, 64), np.float32), np.zeros(64)
    for seed in range(3):
        page = np.empty(codec.page_bytes(geometry), np.uint8)
        codec.encode(geometry, gaussian_page(geometry, seed), 16, state, page)
        fused.page_values(codec.kernel_code(geometry), page, 0, 0, *shape, 16, state, weights, sums)
        expected += 0.5 * codec.reference_decode(geometry, page, 16, state)[0, 1, 0].sum(0)
    fused.finish_values(codec.kernel_code(geometry), sums, 0, 0, *shape, state, out)
    np.testing.assert_allclose(out, np.stack([expected, expected]), rtol=1e-4, atol=2e-4)


def test_a_query_is_prepared_before_any_state_exists() -> None:
    """Attention prepares queries even while no page is packed and k3v2 has no mean yet."""
    query = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    ways = []
    for state in (np.zeros(0, np.float32), np.zeros(2 * 2 * 64, np.float32)):
        prepared, bias = np.empty_like(query), np.full(3, np.nan, np.float32)
        fused.prepare_query(get("k3v2").code, query, 1, 1, 2, 2, 16, 64, state, prepared, bias)
        np.testing.assert_array_equal(bias, 0)
        ways.append(prepared.view(np.uint32))
    np.testing.assert_array_equal(*ways)
