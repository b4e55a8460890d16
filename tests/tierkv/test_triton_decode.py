"""Decode attention on a device, in triton's interpreter where there is none, against the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.contract.test_attention import BENT, Case, make_case, random_query, random_sinks
from tests.quant.pages import example_state
from tests.triton_device import DEVICE  # skips the module where kernels cannot run
from tierkv import quant
from tierkv.attention.contract import Pages
from tierkv.attention.reference import ReferenceAttention
from tierkv.attention.triton_decode import LEAST_PAGES, PROGRAMS, decode, plan_pages
from tierkv.errors import ConfigError
from tierkv.geometry import DTypeName, Geometry
from tierkv.quant.klt_triton import KltPages
from tierkv.quant.rotated_triton import RotatedPages
from tierkv.table import Kind
from tierkv.triton_setup import interpreting

# The interpreter multiplies in float32; tensor cores take halves, and eleven bits of packed products.
CLOSE = {"rtol": 1e-5, "atol": 2e-6} if interpreting() else {"rtol": 2e-2, "atol": 2e-3}
MASS_CLOSE = {"rtol": 1e-4, "atol": 2e-6} if interpreting() else {"rtol": 2e-2, "atol": 2e-3}
"""A log of 1,000 in float32 is off by 6e-5, and so is what is weighed by it."""


def check(
    case: Case, ratio: int, seed: int, layer: int = 1, scale: float = 0.0, softcap: float = 0.0, sunk: bool = False
) -> None:  # fmt: skip
    """Output, log-sum-exp and page mass; the mass is added to what was there."""
    view, pages = case.view, case.pages
    geometry = view.geometry
    scale = scale or geometry.head_dim**-0.5
    rows, kv_heads = len(case.dense), geometry.num_kv_heads
    query = random_query(seed, rows, kv_heads * ratio, geometry.head_dim)
    query = query.to(getattr(torch, geometry.dtype)).float()
    sinks = random_sinks(query.shape[1]) if sunk else None
    before = np.linspace(0, 1, len(pages.offsets), dtype=np.float32)
    expected_mass = before.copy()
    expected = ReferenceAttention().decode(
        query, view, pages, layer, scale, expected_mass, softcap=softcap, sinks=sinks
    )

    device_codec = KltPages if view.codec.name == "klt2" else RotatedPages
    codec = device_codec(geometry, view.codec_state, DEVICE)
    pool, plan = torch.from_numpy(view.data).to(DEVICE), plan_pages(pages, kv_heads, DEVICE)
    mass = torch.from_numpy(before).to(DEVICE)
    there = None if sinks is None else sinks.to(DEVICE)
    got = decode(query.to(DEVICE), pool, plan, codec, layer, scale, mass, softcap, there)
    torch.testing.assert_close(got.out.cpu(), expected.out, **CLOSE)
    torch.testing.assert_close(got.log_sum_exp.cpu(), expected.log_sum_exp, **CLOSE)
    np.testing.assert_allclose(mass.cpu().numpy(), expected_mass, **MASS_CLOSE)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "ratio", "low"),
    [
        ("float32", 64, 1, 0.0),
        ("float32", 64, 1, 1.0),
        ("float16", 96, 3, 0.5),
        ("bfloat16", 64, 4, 0.5),
        ("bfloat16", 80, 3, 0.5),
        ("bfloat16", 128, 4, 0.5),
        ("bfloat16", 256, 1, 0.5),
    ],
)
def test_decode_is_the_softmax_over_pages_exact_and_packed(
    dtype: DTypeName, head_dim: int, ratio: int, low: float
) -> None:
    case = make_case(head_dim + ratio, dtype=dtype, head_dim=head_dim, kv_heads=2, row_pages=(5, 1), low=low)
    check(case, ratio, seed=ratio)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "ratio", "low", "tokens"),
    [
        ("float32", 16, 1, 1.0, 8),
        ("float32", 64, 4, 1.0, 16),
        ("bfloat16", 80, 3, 0.5, 16),
        ("float16", 96, 2, 0.5, 32),
        ("bfloat16", 128, 4, 0.5, 16),
        ("float32", 48, 20, 0.5, 4),
    ],
)
def test_klt2_pages_of_any_bits_are_attended_among_exact_ones(
    dtype: DTypeName, head_dim: int, ratio: int, low: float, tokens: int
) -> None:
    state = example_state(quant.get("klt2"), Geometry(2, 2, head_dim, dtype, tokens))
    case = make_case(
        head_dim, dtype=dtype, head_dim=head_dim, kv_heads=2, page_tokens=tokens, row_pages=(4, 0, 2), low=low,
        codec_name="klt2", state=state,
    )  # fmt: skip
    assert (case.pages.kinds == Kind.QUANTIZED).any()
    check(case, ratio, seed=ratio)


def test_long_rows_of_klt2_pages_are_cut_in_items_and_merged() -> None:
    case = make_case(9, dtype="float32", kv_heads=1, row_pages=(3 * LEAST_PAGES, 5), codec_name="klt2")
    assert len(plan_pages(case.pages, 1, DEVICE).packed_items) >= 2
    check(case, 2, seed=9, layer=0)


def test_a_row_without_pages_gives_zeros_and_minus_infinity() -> None:
    check(make_case(1, row_pages=(3, 0, 2), kv_heads=1), 3, seed=1)
    check(make_case(1, row_pages=(0,), kv_heads=1), 3, seed=1)


def test_more_query_heads_share_a_key_than_a_tile_has_rows_at_least() -> None:
    check(make_case(5, kv_heads=1, row_pages=(4,)), 20, seed=5)


def test_long_rows_are_cut_in_items_and_merged() -> None:
    case = make_case(9, dtype="float32", kv_heads=1, row_pages=(3 * LEAST_PAGES, 5), low=0.5)
    plan = plan_pages(case.pages, 1, DEVICE)
    assert len(plan.exact_items) >= 2 and len(plan.packed_items) >= 2
    check(case, 2, seed=9)


@pytest.mark.parametrize("page_tokens", [4, 128])
def test_pages_may_be_shorter_or_longer_than_a_tile(page_tokens: int) -> None:
    check(make_case(2, kv_heads=1, page_tokens=page_tokens, row_pages=(5,)), 2, seed=2)


@pytest.mark.parametrize(("softcap", "sunk"), BENT)
@pytest.mark.parametrize("codec_name", ["k3v2", "klt2"])
def test_logits_are_capped_and_sinks_fed(codec_name: str, softcap: float, sunk: bool) -> None:
    case = make_case(7, dtype="float32", kv_heads=2, row_pages=(6, 0, 3), low=0.5, codec_name=codec_name)
    check(case, 3, seed=7, scale=0.5, softcap=softcap, sunk=sunk)


def test_capped_logits_of_any_size_are_at_most_the_cap() -> None:
    check(make_case(4, dtype="float32", kv_heads=1, row_pages=(9, 2)), 2, seed=4, scale=1e4, softcap=30.0)


def test_large_logits_neither_overflow_nor_lose_the_largest() -> None:
    check(make_case(4, dtype="float32", kv_heads=1, row_pages=(9, 2)), 2, seed=4, scale=25.0)


def test_without_a_state_there_is_no_bias() -> None:
    case = make_case(6, dtype="float32", kv_heads=1, row_pages=(4,), low=1.0)
    zero = np.zeros(case.view.codec_state.size, np.float32)
    view = case.view._replace(codec_state=zero)
    codec = RotatedPages(view.geometry, np.zeros(0, np.float32), DEVICE)
    query = random_query(6, 1, 2, 64)
    expected = ReferenceAttention().decode(query, view, case.pages, 0, 0.1)
    pool, plan = torch.from_numpy(view.data).to(DEVICE), plan_pages(case.pages, 1, DEVICE)
    got = decode(query.to(DEVICE), pool, plan, codec, 0, 0.1)
    torch.testing.assert_close(got.out.cpu(), expected.out, **CLOSE)


def test_two_bit_keys_are_attended_as_they_decode() -> None:
    """No pool of theirs here: the kernels encode the pages, and what they decode to is attended exactly."""
    geometry, heads = make_case(0, dtype="float32", kv_heads=2).view.geometry, 4
    codec = RotatedPages(geometry, np.zeros(0, np.float32), DEVICE, key_bits=2)
    count, frame = 3, geometry.page_bytes
    exact = torch.randn(count * frame // 4, generator=torch.Generator().manual_seed(3)).view(torch.uint8)
    pool = torch.cat([exact, torch.zeros(2 * count * frame, dtype=torch.uint8)]).to(DEVICE)
    places = torch.arange(3 * count, device=DEVICE) * frame
    counts = torch.tensor([16, 5, 1], dtype=torch.int32, device=DEVICE)
    flags = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    codec.encode(pool, places[:count], counts, pool, places[count : 2 * count], flags)
    codec.decode(pool, places[count : 2 * count], counts, pool, places[2 * count :])

    def attend(first: int, kind: Kind) -> torch.Tensor:
        starts = np.array([0, count], np.int64)
        pages = Pages(
            places[first : first + count].cpu().numpy(), np.full(count, kind, np.int8), counts.cpu().numpy(),
            np.array([0, 16, 21], np.int64), starts, 22,
        )  # fmt: skip
        query = random_query(2, 1, heads, geometry.head_dim).to(DEVICE)
        return decode(query, pool, plan_pages(pages, 2, DEVICE), codec, 1, 0.125).out

    torch.testing.assert_close(attend(count, Kind.QUANTIZED), attend(2 * count, Kind.EXACT), **CLOSE)


def test_a_plan_has_each_page_once_exact_ones_first_and_no_more_programs_than_are_worth_having() -> None:
    rng = np.random.default_rng(0)
    lengths = np.array([0, 5000, 3, 40_000])
    total = int(lengths.sum())
    kinds = rng.choice([Kind.QUANTIZED, Kind.EXACT, Kind.MIDDLE], total, p=[0.6, 0.3, 0.1]).astype(np.int8)
    row_starts = np.cumsum([0, *lengths])
    offsets = rng.permutation(total).astype(np.int64) * 64
    counts = np.full(total, 16, np.int32)
    pages = Pages(offsets, kinds, counts, np.arange(total) * 16, row_starts, total * 16)
    plan = plan_pages(pages, 8, "cpu")
    order = plan.order.numpy()
    np.testing.assert_array_equal(np.sort(order), np.arange(total))
    np.testing.assert_array_equal(plan.offsets.numpy(), offsets[order])
    seen = np.zeros(total, int)
    forms = (
        (plan.exact_items, Kind.EXACT),
        (plan.middle_items, Kind.MIDDLE),
        (plan.packed_items, Kind.QUANTIZED),
    )
    for items, kind in forms:
        for number, row, first, last in items.tolist():
            assert (kinds[order[first:last]] == kind).all()
            assert ((row_starts[row] <= order[first:last]) & (order[first:last] < row_starts[row + 1])).all()
            begin, middle, end = plan.spans[row].tolist()
            assert (middle <= number < end) if kind == Kind.QUANTIZED else (begin <= number < middle)
            seen[first:last] += 1
    assert (seen == 1).all()
    items_count = sum(len(items) for items, _ in forms)
    assert (
        PROGRAMS // 2 < items_count * 8 < PROGRAMS + 8 * 3 * len(lengths)
    )  # a remainder for each row and form


def test_a_page_of_a_form_without_a_kernel_is_refused() -> None:
    case = make_case(4, kv_heads=1, row_pages=(3,))
    plan = plan_pages(case.pages._replace(kinds=np.full(3, Kind.MIDDLE, np.int8)), 1, DEVICE)
    codec = RotatedPages(case.view.geometry, case.view.codec_state, DEVICE)
    with pytest.raises(ConfigError, match="MIDDLE"):
        decode(
            torch.zeros(1, 1, 64, device=DEVICE),
            torch.from_numpy(case.view.data).to(DEVICE),
            plan,
            codec,
            0,
            1.0,
        )


def test_a_query_that_does_not_fit_is_a_config_error() -> None:
    case = make_case(0, kv_heads=2, row_pages=(1,))
    codec = RotatedPages(case.view.geometry, case.view.codec_state, DEVICE)
    plan, pool = plan_pages(case.pages, 2, DEVICE), torch.from_numpy(case.view.data).to(DEVICE)
    with pytest.raises(ConfigError, match="3, 64"):
        decode(torch.zeros(1, 3, 64, device=DEVICE), pool, plan, codec, 0, 1.0)
