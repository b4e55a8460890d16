"""Cold pages in the contract of `tierkv.attention.contract`, which every implementation passes.

Expected values come from the dense float64 arithmetic in `dense_cold.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract import dense_cold
from tests.contract.dense_cold import (
    audit_of,
    check_decode,
    check_prefill,
    check_row,
    make_both,
    shares,
    softmax,
)
from tests.contract.test_attention import BENT, DTYPES, MASS_ROUNDED, ROUNDED, random_query
from tierkv import quant
from tierkv.attention.contract import READ_ALL, ColdSeen, PagedAttention
from tierkv.geometry import DTypeName
from tierkv.table import Kind

SHAPES = [
    ("k3v2", 64), ("k3v2", 80), ("k3v2", 128), ("rotated2", 80), ("kivi2", 64), ("kivi2", 80), ("kivi2", 128),
    ("int8", 96), ("nf4", 64), ("exact", 64),
]  # fmt: skip


class TestEveryAttentionOverColdPages:
    @pytest.fixture(autouse=True, params=["deviation", "transform-20"])
    def digest_form(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dense_cold, "DIGEST", request.param)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("ratio", [1, 3, 8])
    def test_decode_equals_softmax_over_exact_cold_pages(
        self, implementation: PagedAttention, dtype: DTypeName, ratio: int
    ) -> None:
        both = make_both(ratio, (4, 0, 6, 3), (7, 5, 0, 9), dtype=dtype, low=0.0)
        check_decode(implementation, both, ratio, seed=ratio)

    @pytest.mark.parametrize(("codec_name", "head_dim"), SHAPES)
    def test_decode_equals_softmax_over_mixed_cold_pages(
        self, implementation: PagedAttention, codec_name: str, head_dim: int
    ) -> None:
        both = make_both(head_dim, (3, 2), (8, 6), head_dim=head_dim, kv_heads=2, codec_name=codec_name)
        check_decode(implementation, both, 3, seed=head_dim)

    @pytest.mark.parametrize(("codec_name", "middle_name"), [("k3v2", "nf4"), ("klt2,0=exact", "int8")])
    def test_decode_equals_softmax_over_cold_pages_of_three_forms(
        self, implementation: PagedAttention, codec_name: str, middle_name: str
    ) -> None:
        both = make_both(41, (6, 4), (9, 8), low=0.4, codec_name=codec_name, middle_name=middle_name)
        assert set(both.cold.pages.kinds) == {Kind.EXACT, Kind.QUANTIZED, Kind.MIDDLE}
        check_decode(implementation, both, 3, seed=41)
        check_prefill(
            implementation, make_both(42, (5,), (9,), low=0.4, middle_name=middle_name), 6, window=4
        )

    @pytest.mark.parametrize(("softcap", "sunk"), BENT)
    def test_estimates_and_reads_have_capped_logits_and_sinks(
        self, implementation: PagedAttention, softcap: float, sunk: bool
    ) -> None:
        both = make_both(43, (6, 4, 0, 3), (9, 8, 5, 0), low=0.4, middle_name="nf4", digest_layers=2)
        check_decode(implementation, both, 3, 43, 2 * softcap, sunk)
        chunk = make_both(44, (5,), (9,), low=0.4, digest_layers=2)
        check_prefill(implementation, chunk, 6, 4, 2 * softcap, sunk)

    def test_one_kv_head_serves_more_query_heads_than_a_fused_kernel_takes(
        self, implementation: PagedAttention
    ) -> None:
        check_decode(implementation, make_both(5, (2,), (6,), kv_heads=1), 20, seed=5)

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        seed=st.integers(0, 2**31),
        rows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), min_size=1, max_size=4),
        read=st.integers(0, 8),
        digest_layers=st.integers(0, 2),
        kv_heads=st.integers(1, 3),
        ratio=st.integers(1, 4),
        without=st.sets(st.integers(0, 20)),
    )
    def test_decode_equals_softmax_for_any_rows(
        self, implementation: PagedAttention, seed: int, rows: list[tuple[int, int]], read: int, digest_layers: int,
        kv_heads: int, ratio: int, without: set[int],
    ) -> None:  # fmt: skip
        row_pages, cold_pages = zip(*rows, strict=True)
        both = make_both(
            seed, row_pages, cold_pages, read=read, digest_layers=digest_layers, kv_heads=kv_heads,
            without=tuple(without),
        )  # fmt: skip
        check_decode(implementation, both, ratio, seed)

    @pytest.mark.parametrize(("pages", "cold_pages", "chunk"), [(4, 12, 20), (0, 8, 1), (3, 6, 3), (2, 0, 5)])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_chunk_attends_what_any_head_names(
        self, implementation: PagedAttention, dtype: DTypeName, pages: int, cold_pages: int, chunk: int
    ) -> None:
        both = make_both(chunk, (pages,), (cold_pages,), read=2, dtype=dtype)
        check_prefill(implementation, both, chunk, window=4)

    @pytest.mark.parametrize("codec_name", [*quant.NAMES, "kivi2,0=k3v2"])
    def test_a_chunk_reads_packed_cold_pages(self, implementation: PagedAttention, codec_name: str) -> None:
        both = make_both(7, (3,), (9,), read=2, low=1.0, kv_heads=2, head_dim=128, codec_name=codec_name)
        check_prefill(implementation, both, 6, window=9)

    @pytest.mark.parametrize("ratio", [1, 4])
    def test_reading_every_page_is_attention_over_everything(
        self, implementation: PagedAttention, ratio: int
    ) -> None:
        both = make_both(31, (5, 0, 3), (6, 8, 1), read=8)
        query, scale = random_query(31, 3, 3 * ratio, 64), 0.125
        token_mass, seen = np.zeros(both.pages.total_tokens, np.float32), audit_of(both)
        got = implementation.decode(
            query, both.case.view, both.pages, 1, scale, None, token_mass, both.cold, seen
        )
        for row in range(3):
            here, there = both.part(False, row, 1), both.part(True, row, 1)
            logits = [both.logits(query[row], part, scale) for part in (here, there)]
            check_row(got, row, torch.cat(logits, -1), here, there, ratio, token_mass)
        np.testing.assert_allclose(seen.attended, 1.0, atol=1e-5)

    @pytest.mark.parametrize("layer", [0, 1])
    def test_all_pages_are_read_without_digests_too(self, implementation: PagedAttention, layer: int) -> None:
        """Only the last layer has digests, and half of the pages have none."""
        both = make_both(41, (5, 0, 3), (6, 8, 1), read=READ_ALL, without=(0, 2, 7, 9))
        query, scale = random_query(41, 3, 9, 64), 0.125
        token_mass, seen = np.zeros(both.pages.total_tokens, np.float32), audit_of(both)
        got = implementation.decode(
            query, both.case.view, both.pages, layer, scale, None, token_mass, both.cold, seen
        )
        for row in range(3):
            here, there = both.part(False, row, layer), both.part(True, row, layer)
            logits = [both.logits(query[row], part, scale) for part in (here, there)]
            check_row(got, row, torch.cat(logits, -1), here, there, 3, token_mass)
        np.testing.assert_allclose(seen.attended, 1.0, atol=1e-5)
        assert (seen.estimates.max() > 0) == (layer == 1)

    def test_a_chunk_reads_all_pages(self, implementation: PagedAttention) -> None:
        both, read = (make_both(42, (4,), (7,), read=count, digest_layers=2) for count in (READ_ALL, 7))
        query = random_query(42, 5, 9, 64).transpose(0, 1)
        keys, values = (random_query(42 + i, 5, 3, 64).transpose(0, 1) for i in (1, 2))
        outs = [
            implementation.prefill(query, keys, values, b.case.view, b.pages, 0, 0.125, cold=b.cold).out
            for b in (both, read)
        ]
        torch.testing.assert_close(outs[0], outs[1], **ROUNDED)

    def test_what_was_attended_and_what_was_not_sum_to_one(self, implementation: PagedAttention) -> None:
        """With one KV head all query heads read the same pages, so that unread pages are the same for all."""
        both = make_both(32, (4,), (12,), read=5, kv_heads=1)
        query, token_mass, seen = (
            random_query(32, 1, 6, 64),
            np.zeros(both.pages.total_tokens, np.float32),
            audit_of(both),
        )
        implementation.decode(query, both.case.view, both.pages, 1, 0.5, None, token_mass, both.cold, seen)
        read = token_mass[both.cold.pages.token_starts] > 0
        assert read.sum() == 5 and seen.true is not None and seen.attended is not None
        assert seen.attended[0] + seen.true[~read].sum() == pytest.approx(1.0, abs=1e-5)
        assert token_mass.sum() == pytest.approx(1.0, abs=1e-5)

    def test_what_was_seen_is_added(self, implementation: PagedAttention) -> None:
        both = make_both(33, (4,), (6,), digest_layers=2)
        query, once, twice = random_query(33, 1, 9, 64), audit_of(both), audit_of(both)
        for layer, seen in [(0, once), (1, once), (0, twice), (1, twice), (0, twice), (1, twice)]:
            implementation.decode(query, both.case.view, both.pages, layer, 0.5, cold=both.cold, seen=seen)
        for a, b in zip(once, twice, strict=True):
            assert a is not None and b is not None
            np.testing.assert_allclose(b, 2 * a, **MASS_ROUNDED)

    def test_without_an_audit_only_pages_that_are_read_are_touched(
        self, implementation: PagedAttention
    ) -> None:
        both = make_both(34, (4,), (9,), read=2, low=0.0, kv_heads=1)
        query, scale = random_query(34, 1, 3, 64), 0.5
        share = shares(
            both, query[0], softmax(both.logits(query[0], both.part(False, 0, 1), scale))[1], 0, 1, scale
        )[1]
        unread = sorted(range(9), key=lambda page: float(share[:, page].sum()))[:-2]
        before = implementation.decode(query, both.case.view, both.pages, 1, scale, cold=both.cold)
        host = both.cold.host.data.copy()
        for page in unread:
            start = both.cold.pages.offsets[page]
            host[start : start + both.case.view.geometry.page_bytes] = 0xFF  # NaN in any float type
        spoiled = both.cold._replace(host=both.cold.host._replace(data=host))
        after = implementation.decode(query, both.case.view, both.pages, 1, scale, cold=spoiled)
        torch.testing.assert_close(after.out, before.out, rtol=0.0, atol=0.0)

    def test_cold_pages_that_are_not_read_change_nothing(self, implementation: PagedAttention) -> None:
        both = make_both(35, (4,), (6,), read=0)
        query, masses = (
            random_query(35, 1, 9, 64),
            [np.zeros(both.pages.total_tokens, np.float32) for _ in range(2)],
        )
        plain = implementation.decode(query, both.case.view, both.pages, 1, 0.125, None, masses[0])
        seen = ColdSeen(np.zeros(6, np.float32))
        got = implementation.decode(
            query, both.case.view, both.pages, 1, 0.125, None, masses[1], both.cold, seen
        )
        torch.testing.assert_close(got.out, plain.out, rtol=0.0, atol=0.0)
        np.testing.assert_array_equal(*masses)
        assert seen.estimates.min() > 0

    def test_a_page_whose_keys_are_not_finite_is_never_read(self, implementation: PagedAttention) -> None:
        both = make_both(36, (4,), (3,), read=3, dtype="float32", low=0.0)
        digests = both.case.view.digests
        assert digests is not None
        start = both.cold.pages.digests[1]
        page = np.full(both.case.view.geometry.page_bytes, 0xFF, np.uint8)  # NaN
        digests.write(page, 16, both.case.view.data[start : start + digests.shape.nbytes])
        token_mass, seen = np.zeros(both.pages.total_tokens, np.float32), ColdSeen(np.zeros(3, np.float32))
        implementation.decode(
            random_query(36, 1, 9, 64),
            both.case.view,
            both.pages,
            1,
            0.125,
            None,
            token_mass,
            both.cold,
            seen,
        )
        starts = both.cold.pages.token_starts
        assert token_mass[starts[1]] == 0 and token_mass[starts[0]] > 0 and token_mass[starts[2]] > 0
        assert seen.estimates[1] == 0 and seen.estimates[0] > 0

    def test_equal_pages_are_read_in_order(self, implementation: PagedAttention) -> None:
        both = make_both(37, (4,), (6,), read=2, low=0.0, kv_heads=1)
        cold = both.cold.pages
        alike = cold._replace(
            digests=np.full(6, cold.digests[0]), counts=np.full(6, cold.counts.min(), np.int32)
        )
        token_mass = np.zeros(both.pages.total_tokens, np.float32)
        implementation.decode(
            random_query(37, 1, 3, 64), both.case.view, both.pages, 1, 0.125, None, token_mass,
            both.cold._replace(pages=alike),
        )  # fmt: skip
        assert (token_mass[cold.token_starts] > 0).tolist() == [True, True, False, False, False, False]

    def test_huge_estimates_explode_no_share(self, implementation: PagedAttention) -> None:
        both = make_both(38, (4,), (6,))
        seen = audit_of(both)
        got = implementation.decode(
            1e4 * random_query(38, 1, 9, 64), both.case.view, both.pages, 1, 1.0, cold=both.cold, seen=seen
        )
        assert torch.isfinite(got.out).all() and all(
            np.isfinite(array).all() for array in seen if array is not None
        )
        assert 0.0 <= seen.estimates.sum() <= 1.0 + 1e-5
