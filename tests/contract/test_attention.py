"""The contract of `tierkv.attention.contract`, which every implementation passes.

Expected values come from a dense float64 softmax in this file, over the K/V that were put into the pages (or, for
packed pages, over what the codec's torch reference reads back).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierkv import quant
from tierkv.attention.contract import PagedAttention, Pages, PoolView
from tierkv.geometry import DTypeName, Geometry
from tierkv.quant.whole_products import WHOLE
from tierkv.table import Kind

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
LAYERED = ["k3v2,0=kivi2", "k3v2,-1=kivi2", "k3v2,0=exact", "rotated2,0=nf4,1=int8", "k3v2,0=klt2"]
SHAPES = [
    *(("k3v2", dim) for dim in (64, 80, 96, 128, 256)),
    ("rotated2", 64), ("rotated2", 80), ("kivi2", 64), ("kivi2", 80), ("kivi2", 96), ("kivi2", 128),
    ("int8", 64), ("int8", 96), ("nf4", 80), ("nf4", 128), ("exact", 64), ("exact", 80), ("klt2", 64), ("klt2", 96),
    *((name, 64) for name in LAYERED),  # codecs of their own for the two layers
]  # fmt: skip
MIDDLES = [
    ("k3v2", "nf4"), ("k3v2", "int8"), ("klt2", "nf4"), ("rotated2", "kivi2"), ("kivi2", "nf4"), ("nf4", "int8"),
    ("k3v2,0=exact", "nf4"), ("rotated2,0=nf4,1=klt2", "int8"),
]  # fmt: skip
BENT = [(1.5, False), (0.0, True), (1.5, True)]
"""Soft-capping and sinks, each alone and both."""
MASS_CLOSE = {"rtol": 1e-4, "atol": 1e-6}
ROUNDED = {"rtol": 1e-3, "atol": 4e-4} if WHOLE else CLOSE
"""Where low-bit pages are multiplied in whole numbers, queries and weights are rounded."""
MASS_ROUNDED = {"rtol": 2e-3, "atol": 1e-5} if WHOLE else MASS_CLOSE


@dataclass
class Case:
    """Some rows of pages in a pool, and the dense float64 `[2, layers, kv_heads, tokens, head_dim]` of each row."""

    view: PoolView
    pages: Pages
    dense: list[torch.Tensor]

    def tokens_of(self, row: int) -> NDArray[np.int64]:
        """Where the row's tokens lie in a mass array."""
        spans = [np.arange(0)]
        for page in range(self.pages.row_starts[row], self.pages.row_starts[row + 1]):
            start = self.pages.token_starts[page]
            spans.append(np.arange(start, start + self.pages.counts[page]))
        return np.concatenate(spans).astype(np.int64)


def make_case(
    seed: int,
    *,
    dtype: DTypeName = "bfloat16",
    head_dim: int = 64,
    kv_heads: int = 3,
    page_tokens: int = 16,
    row_pages: tuple[int, ...] = (9,),
    low: float = 0.5,
    codec_name: str = "k3v2",
    middle_name: str = "",
    state: NDArray[np.float32] | None = None,
    full: bool = False,
) -> Case:
    """Pages of random tokens in shuffled places of a pool; a share `low` of them packed, most of them partly filled.

    With a middle form, half of the rest is of it. Without a `state` the codec is fitted to the pages.
    """
    rng = np.random.default_rng(seed)
    geometry = Geometry(2, kv_heads, head_dim, dtype, page_tokens)
    codec = quant.get(codec_name)
    count = sum(row_pages)
    frame = -(-geometry.page_bytes // 64) * 64
    data = np.zeros(max(1, count) * frame, np.uint8)
    offsets = rng.permutation(count).astype(np.int64) * frame
    counts = rng.integers(1, page_tokens + 1, count).astype(np.int32)
    if full:
        counts[:] = page_tokens
    kinds = np.where(rng.random(count) < low, Kind.QUANTIZED, Kind.EXACT).astype(np.int8)
    middle = quant.get(middle_name) if middle_name else None
    if middle is not None:
        kinds[(kinds == Kind.EXACT) & (rng.random(count) < 0.5)] = Kind.MIDDLE
    pages = torch.from_numpy(rng.standard_normal((count, *geometry.shape), np.float32)).to(DTYPES[dtype])
    exact = [page.contiguous().view(torch.uint8).numpy().reshape(-1) for page in pages]
    if state is None:
        state = codec.fit_state(geometry, exact, counts.tolist()) if count else np.zeros(0, np.float32)
    held = []
    for page in range(count):
        place = data[offsets[page] :]
        if kinds[page] == Kind.EXACT:
            place[: geometry.page_bytes] = exact[page]
            tokens = pages[page].double()
        else:
            form = codec if middle is None or kinds[page] == Kind.QUANTIZED else middle
            packed = place[: form.page_bytes(geometry)]
            form.encode(geometry, exact[page], int(counts[page]), state, packed)
            tokens = torch.from_numpy(
                form.reference_decode(geometry, packed, int(counts[page]), state)
            ).double()
        held.append(tokens[..., : counts[page], :].transpose(0, 1))  # [2, layers, kv_heads, tokens, head_dim]
    row_starts = np.cumsum([0, *row_pages]).astype(np.int64)
    empty = torch.zeros(2, 2, kv_heads, 0, head_dim, dtype=torch.float64)
    dense = [torch.cat([empty, *held[first:last]], 3) for first, last in pairwise(row_starts)]
    token_starts = np.cumsum(counts, dtype=np.int64) - counts
    return Case(
        PoolView(data, geometry, codec, state, middle=middle),
        Pages(offsets, kinds, counts, token_starts, row_starts, int(counts.sum())),
        dense,
    )


def softmax_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    causal_from: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Dense float64 attention: output `[q_heads, queries, head_dim]`, log-sum-exp, probabilities.

    With `causal_from`, key `causal_from + i` is hidden from queries before `i`. A sink is one more key, of that logit
    and with a value of zeros, whose probability is left out.
    """
    out, logs, probabilities = [], [], []
    group = query.shape[0] // keys.shape[0]
    for head, rows in enumerate(query.double()):
        logits = rows @ keys[head // group].T * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if causal_from is not None:
            for i in range(len(rows)):
                logits[i, causal_from + i + 1 :] = -math.inf
        all_logits = logits
        if sinks is not None:
            all_logits = torch.cat([sinks[head].double().expand(len(rows), 1), logits], 1)
        logs.append(torch.log(torch.exp(all_logits - all_logits.max()).sum(-1)) + all_logits.max())
        probabilities.append(torch.exp(logits - logs[-1].unsqueeze(-1)))
        out.append(probabilities[-1] @ values[head // group])
    return torch.stack(out), torch.stack(logs), torch.stack(probabilities)


def random_query(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_sinks(q_heads: int) -> torch.Tensor:
    """From next to nothing to nearly everything."""
    return torch.linspace(-3.0, 9.0, q_heads)


def check_decode(
    implementation: PagedAttention,
    case: Case,
    ratio: int,
    seed: int,
    softcap: float = 0.0,
    sunk: bool = False,
) -> None:
    """Output, log-sum-exp and both masses of every row against the dense softmax, in both layers."""
    geometry, pages = case.view.geometry, case.pages
    rows, scale = len(case.dense), geometry.head_dim**-0.5
    rounded = (pages.kinds == Kind.QUANTIZED).any()
    close, mass_close = (ROUNDED, MASS_ROUNDED) if rounded else (CLOSE, MASS_CLOSE)
    query = random_query(seed, rows, geometry.num_kv_heads * ratio, geometry.head_dim)
    if softcap:
        query *= 3  # so that it bends
    sinks = random_sinks(query.shape[1]) if sunk else None
    for layer in range(geometry.num_layers):
        page_mass = np.zeros(len(pages.offsets), np.float32)
        token_mass = np.zeros(pages.total_tokens, np.float32)
        got = implementation.decode(
            query, case.view, pages, layer, scale, page_mass, token_mass, softcap=softcap, sinks=sinks
        )
        for row, dense in enumerate(case.dense):
            if dense.shape[3] == 0:
                nothing = torch.full((query.shape[1],), -math.inf) if sinks is None else sinks
                assert not got.out[row].any()
                torch.testing.assert_close(got.log_sum_exp[row], nothing, **close)
                continue
            out, logs, probabilities = softmax_attention(
                query[row].unsqueeze(1), *dense[:, layer], scale, None, softcap, sinks
            )
            torch.testing.assert_close(got.out[row], out[:, 0].float(), **close)
            torch.testing.assert_close(got.log_sum_exp[row], logs[:, 0].float(), **close)
            expected = probabilities.mean((0, 1)).numpy()
            mine = slice(pages.row_starts[row], pages.row_starts[row + 1])
            firsts = np.cumsum(pages.counts[mine]) - pages.counts[mine]
            np.testing.assert_allclose(token_mass[case.tokens_of(row)], expected, **mass_close)
            np.testing.assert_allclose(page_mass[mine], np.add.reduceat(expected, firsts), **mass_close)
            assert page_mass[mine].sum() == pytest.approx(1.0 if sinks is None else expected.sum(), abs=1e-5)


class TestEveryAttention:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("ratio", [1, 3, 8])
    def test_decode_equals_softmax_over_exact_pages(
        self, implementation: PagedAttention, dtype: DTypeName, ratio: int
    ) -> None:
        case = make_case(ratio, dtype=dtype, row_pages=(7, 0, 12), low=0.0)
        check_decode(implementation, case, ratio, seed=ratio)

    @pytest.mark.parametrize("codec_name", quant.NAMES)
    @pytest.mark.parametrize("ratio", [1, 3, 8])
    def test_decode_equals_softmax_over_packed_pages(
        self, implementation: PagedAttention, codec_name: str, ratio: int
    ) -> None:
        case = make_case(ratio, row_pages=(5, 9), low=1.0, codec_name=codec_name)
        check_decode(implementation, case, ratio, seed=ratio)

    @pytest.mark.parametrize(("codec_name", "head_dim"), SHAPES)
    def test_decode_equals_softmax_over_mixed_pages(
        self, implementation: PagedAttention, codec_name: str, head_dim: int
    ) -> None:
        case = make_case(head_dim, head_dim=head_dim, kv_heads=2, row_pages=(6, 1, 8), codec_name=codec_name)
        check_decode(implementation, case, 3, seed=head_dim)

    @pytest.mark.parametrize("codec_name", quant.NAMES)
    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_decode_reads_packed_pages_of_every_dtype(
        self, implementation: PagedAttention, dtype: DTypeName, codec_name: str
    ) -> None:
        case = make_case(9, dtype=dtype, kv_heads=2, row_pages=(4, 3), codec_name=codec_name)
        check_decode(implementation, case, 2, seed=9)

    @pytest.mark.parametrize(("codec_name", "middle_name"), MIDDLES)
    def test_decode_equals_softmax_over_three_forms_at_once(
        self, implementation: PagedAttention, codec_name: str, middle_name: str
    ) -> None:
        case = make_case(31, row_pages=(9, 2, 12), low=0.4, codec_name=codec_name, middle_name=middle_name)
        assert set(case.pages.kinds) == {Kind.EXACT, Kind.QUANTIZED, Kind.MIDDLE}
        check_decode(implementation, case, 3, seed=31)

    def test_decode_equals_softmax_over_middle_pages_alone(self, implementation: PagedAttention) -> None:
        case = make_case(32, kv_heads=1, row_pages=(5,), low=0.0, middle_name="nf4")
        mine = np.flatnonzero(case.pages.kinds == Kind.MIDDLE)
        counts = case.pages.counts[mine]
        alone = Pages(
            case.pages.offsets[mine], case.pages.kinds[mine], counts, np.cumsum(counts, dtype=np.int64) - counts,
            np.array([0, len(mine)], np.int64), int(counts.sum()),
        )  # fmt: skip
        kept = np.repeat(case.pages.kinds == Kind.MIDDLE, case.pages.counts)
        check_decode(implementation, Case(case.view, alone, [case.dense[0][:, :, :, kept]]), 20, seed=32)

    def test_more_query_heads_share_a_key_than_a_fused_kernel_takes_at_once(
        self, implementation: PagedAttention
    ) -> None:
        check_decode(implementation, make_case(5, kv_heads=1, row_pages=(6, 3)), 20, seed=5)

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        seed=st.integers(0, 2**31),
        row_pages=st.lists(st.integers(0, 11), min_size=1, max_size=6),
        low=st.sampled_from([0.0, 0.3, 1.0]),
        kv_heads=st.integers(1, 4),
        ratio=st.integers(1, 5),
    )
    def test_decode_equals_softmax_for_any_rows(
        self,
        implementation: PagedAttention,
        seed: int,
        row_pages: list[int],
        low: float,
        kv_heads: int,
        ratio: int,
    ) -> None:
        case = make_case(seed, kv_heads=kv_heads, row_pages=tuple(row_pages), low=low)
        check_decode(implementation, case, ratio, seed)

    def test_masses_are_added_and_page_mass_alone_is_the_same(self, implementation: PagedAttention) -> None:
        case = make_case(11, row_pages=(8, 5))
        query = random_query(11, 2, 9, 64)
        token_mass = np.zeros(case.pages.total_tokens, np.float32)
        both, alone = (np.zeros(13, np.float32) for _ in range(2))
        implementation.decode(query, case.view, case.pages, 0, 0.125, both, token_mass)
        implementation.decode(query, case.view, case.pages, 0, 0.125, alone)
        np.testing.assert_allclose(alone, both, **MASS_CLOSE)
        implementation.decode(query, case.view, case.pages, 0, 0.125, alone)
        np.testing.assert_allclose(alone, 2 * both, **MASS_CLOSE)
        once = token_mass.copy()
        implementation.decode(query, case.view, case.pages, 0, 0.125, token_mass=token_mass)
        np.testing.assert_allclose(token_mass, 2 * once, **MASS_CLOSE)

    def test_rows_that_share_pages_add_up_their_mass(self, implementation: PagedAttention) -> None:
        case = make_case(12, row_pages=(4,))
        shared = Pages(
            *(np.tile(column, 2) for column in case.pages[:4]),
            np.array([0, 4, 8], np.int64),
            case.pages.total_tokens,
        )
        token_mass = np.zeros(case.pages.total_tokens, np.float32)
        implementation.decode(random_query(12, 2, 9, 64), case.view, shared, 0, 0.125, token_mass=token_mass)
        assert token_mass.sum() == pytest.approx(2.0, abs=1e-5)

    @pytest.mark.parametrize(("softcap", "sunk"), BENT)
    @pytest.mark.parametrize("ratio", [1, 3, 20])
    def test_decode_caps_logits_and_feeds_sinks(
        self, implementation: PagedAttention, ratio: int, softcap: float, sunk: bool
    ) -> None:
        case = make_case(ratio, kv_heads=2, row_pages=(7, 0, 12), low=0.4, middle_name="nf4")
        check_decode(implementation, case, ratio, ratio, softcap, sunk)

    @pytest.mark.parametrize("codec_name", quant.NAMES)
    def test_decode_caps_logits_of_every_form(self, implementation: PagedAttention, codec_name: str) -> None:
        check_decode(implementation, make_case(8, row_pages=(5,), codec_name=codec_name), 2, 8, 1.5, True)

    def test_capped_logits_of_any_size_are_at_most_the_cap(self, implementation: PagedAttention) -> None:
        """One token's log-sum-exp is its logit: that of logit `x` is `30 tanh(x / 30)`, of either sign."""
        case = make_case(15, dtype="float32", kv_heads=1, row_pages=(1,), low=0.0, full=True)
        one = case.pages._replace(counts=np.ones(1, np.int32))
        key = case.dense[0][0, 0, 0, 0]
        for wanted in (0.0, 1e-3, -0.5, 20.0, -60.0, 1e4, -1e6):
            query = (key / (key @ key) * wanted).float().expand(1, 1, -1)
            got = implementation.decode(query, case.view, one, 0, 1.0, softcap=30.0)
            assert float(got.log_sum_exp) == pytest.approx(30 * math.tanh(wanted / 30), abs=2e-5)

    def test_a_sink_as_large_as_all_logits_takes_half(self, implementation: PagedAttention) -> None:
        case = make_case(16, row_pages=(6,))
        query, mass = random_query(16, 1, 9, 64), np.zeros(case.pages.total_tokens, np.float32)
        plain = implementation.decode(query, case.view, case.pages, 0, 0.125)
        sinks = plain.log_sum_exp[0]
        got = implementation.decode(query, case.view, case.pages, 0, 0.125, None, mass, sinks=sinks)
        torch.testing.assert_close(got.out, plain.out / 2, **CLOSE)
        torch.testing.assert_close(got.log_sum_exp, plain.log_sum_exp + math.log(2), **CLOSE)
        assert mass.sum() == pytest.approx(0.5, abs=1e-5)

    def test_large_logits_neither_overflow_nor_drown_the_rest(self, implementation: PagedAttention) -> None:
        case = make_case(13, row_pages=(10,), low=0.5)
        query = 1e4 * random_query(13, 1, 9, 64)
        got = implementation.decode(query, case.view, case.pages, 1, 1.0)
        out, logs, _ = softmax_attention(query[0].unsqueeze(1), *case.dense[0][:, 1], 1.0)
        assert logs.max() > 1e5
        torch.testing.assert_close(got.log_sum_exp[0], logs[:, 0].float(), rtol=1e-4, atol=0.0)
        # One token takes all: which one is certain unless float32 cannot tell the two best logits apart.
        torch.testing.assert_close(got.out[0], out[:, 0].float(), rtol=1e-2, atol=5e-2)

    def test_logits_far_below_the_others_get_no_weight(self, implementation: PagedAttention) -> None:
        case = make_case(14, dtype="float32", kv_heads=1, row_pages=(2,), low=0.0, full=True)
        keys = case.view.data[case.pages.offsets[0] :][: case.view.geometry.page_bytes].view(np.float32)
        keys.reshape(case.view.geometry.shape)[0, 0] *= 1e6  # the first page's logits: about +-1e6
        case.dense[0][0, 0, :, :16] *= 1e6
        check_decode(implementation, case, 1, seed=14)

    def test_pages_whose_logits_all_overflow_downwards_get_no_weight(
        self, implementation: PagedAttention
    ) -> None:
        """They come first, and are more than are attended at once: so far nothing is a maximum."""
        case = make_case(16, dtype="float32", kv_heads=1, row_pages=(20,), low=0.0, full=True)
        for offset in case.pages.offsets[:18].tolist():
            keys = case.view.data[offset:][: case.view.geometry.page_bytes].view(np.float32)
            keys.reshape(case.view.geometry.shape)[0, 0] = -1e38
        query, mass = torch.full((1, 2, 64), 100.0), np.zeros(320, np.float32)
        got = implementation.decode(query, case.view, case.pages, 0, 1e-3, None, mass)
        rest = case.dense[0][:, 0, :, 18 * 16 :]
        out, logs, probabilities = softmax_attention(query[0].unsqueeze(1), *rest, 1e-3)
        torch.testing.assert_close(got.out[0], out[:, 0].float(), **CLOSE)
        torch.testing.assert_close(got.log_sum_exp[0], logs[:, 0].float(), **CLOSE)
        assert not mass[: 18 * 16].any()
        np.testing.assert_allclose(mass[18 * 16 :], probabilities.mean((0, 1)).numpy(), **MASS_CLOSE)

    @pytest.mark.parametrize(("softcap", "sunk"), [(0.0, False), (8.0, True)])
    def test_a_mass_counts_larger_logits_that_came_after_it(
        self, implementation: PagedAttention, softcap: float, sunk: bool
    ) -> None:
        """And the sinks, which come last: one head's is next to nothing, the other's above every capped logit."""
        case = make_case(15, dtype="float32", kv_heads=1, row_pages=(4,), low=0.0, full=True)
        for page, offset in enumerate(case.pages.offsets.tolist()):
            factor = 2.0**page  # the largest logit grows with nearly every page
            keys = case.view.data[offset:][: case.view.geometry.page_bytes].view(np.float32)
            keys.reshape(case.view.geometry.shape)[:, 0] *= factor
            case.dense[0][0, :, :, 16 * page : 16 * (page + 1)] *= factor
        check_decode(implementation, case, 2, 15, softcap, sunk)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("source", DTYPES)
    @pytest.mark.parametrize("strided", [False, True])
    def test_written_tokens_are_rounded_to_nearest_even(
        self, implementation: PagedAttention, dtype: DTypeName, source: str, strided: bool
    ) -> None:
        geometry = Geometry(3, 2, 8, dtype, 4)
        data = np.full(3 * geometry.page_bytes, 0x55, np.uint8)
        view = PoolView(data, geometry, quant.get("k3v2"), np.zeros(0, np.float32))
        scale = torch.logspace(-6, 4, 5).view(-1, 1, 1)
        keys, values = (random_query(seed, 5, 2, 8) * scale for seed in (1, 2))
        keys, values = keys.to(DTYPES[source]), values.to(DTYPES[source])
        if strided:  # as a model hands them over: [heads, tokens, head_dim] transposed
            keys, values = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (keys, values))
        offsets = np.array([0, 0, 2, 2, 1], np.int64) * geometry.page_bytes
        slots = np.array([0, 3, 1, 2, 0], np.int32)
        expected = torch.from_numpy(data.copy()).view(DTYPES[dtype]).view(3, *geometry.shape)
        for token, (page, slot) in enumerate(zip((0, 0, 2, 2, 1), slots.tolist(), strict=True)):
            expected[page, 1, 0, :, slot] = keys[token].to(DTYPES[dtype])
            expected[page, 1, 1, :, slot] = values[token].to(DTYPES[dtype])
        implementation.write(view, 1, offsets, slots, keys, values)
        np.testing.assert_array_equal(data, expected.view(torch.uint8).numpy().reshape(-1))

    def test_a_written_token_is_attended(self, implementation: PagedAttention) -> None:
        geometry = Geometry(2, 3, 64, "bfloat16", 16)
        view = PoolView(
            np.zeros(geometry.page_bytes, np.uint8), geometry, quant.get("k3v2"), np.zeros(0, np.float32)
        )
        values = random_query(3, 1, 3, 64).bfloat16()
        implementation.write(
            view, 1, np.zeros(1, np.int64), np.zeros(1, np.int32), random_query(4, 1, 3, 64), values.float()
        )
        one = Pages(
            np.zeros(1, np.int64), np.ones(1, np.int8), np.ones(1, np.int32), np.zeros(1, np.int64),
            np.array([0, 1], np.int64), 1,
        )  # fmt: skip
        got = implementation.decode(random_query(5, 1, 9, 64), view, one, 1, 0.125)
        torch.testing.assert_close(got.out, values.float().repeat_interleave(3, 1))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("pages", "chunk"), [(0, 1), (0, 70), (6, 1), (9, 33)])
    def test_prefill_equals_dense_causal_attention(
        self, implementation: PagedAttention, dtype: DTypeName, pages: int, chunk: int
    ) -> None:
        self.check_prefill(
            implementation, make_case(chunk, dtype=dtype, row_pages=(pages,)), chunk, window=16
        )

    @pytest.mark.parametrize(("codec_name", "head_dim"), SHAPES)
    def test_prefill_reads_packed_pages(
        self, implementation: PagedAttention, codec_name: str, head_dim: int
    ) -> None:
        case = make_case(
            head_dim, head_dim=head_dim, kv_heads=2, row_pages=(7,), low=0.7, codec_name=codec_name
        )
        self.check_prefill(implementation, case, 20, window=50)

    @pytest.mark.parametrize(("codec_name", "middle_name"), MIDDLES)
    def test_prefill_reads_three_forms_at_once(
        self, implementation: PagedAttention, codec_name: str, middle_name: str
    ) -> None:
        case = make_case(33, row_pages=(14,), low=0.4, codec_name=codec_name, middle_name=middle_name)
        assert set(case.pages.kinds) == {Kind.EXACT, Kind.QUANTIZED, Kind.MIDDLE}
        self.check_prefill(implementation, case, 20, window=50)

    @pytest.mark.usefixtures("small_blocks")
    def test_prefill_joins_many_blocks(self, implementation: PagedAttention) -> None:
        """Longer than two blocks of earlier tokens, and a chunk longer than one."""
        case = make_case(21, kv_heads=1, row_pages=(40,), low=0.1, full=True)
        self.check_prefill(implementation, case, 300, window=5)

    @pytest.mark.parametrize(("softcap", "sunk"), BENT)
    @pytest.mark.parametrize(("pages", "chunk"), [(0, 1), (0, 40), (6, 1), (9, 300)])
    def test_prefill_caps_logits_and_feeds_sinks(
        self, implementation: PagedAttention, pages: int, chunk: int, softcap: float, sunk: bool
    ) -> None:
        case = make_case(chunk, row_pages=(pages,), kv_heads=2)
        self.check_prefill(implementation, case, chunk, 16, softcap, sunk)

    @staticmethod
    def check_prefill(
        implementation: PagedAttention, case: Case, chunk: int, window: int, softcap: float = 0.0, sunk: bool = False
    ) -> None:  # fmt: skip
        geometry, old = case.view.geometry, case.pages.total_tokens
        heads, dim, scale = geometry.num_kv_heads, geometry.head_dim, geometry.head_dim**-0.5
        query = random_query(chunk, chunk, heads * 3, dim).transpose(0, 1)
        keys, values = (random_query(chunk + i, chunk, heads, dim).transpose(0, 1) for i in (1, 2))
        keys, values = keys.to(DTYPES[geometry.dtype]), values.to(DTYPES[geometry.dtype])
        token_mass = np.ones(old + chunk, np.float32)
        if softcap:
            query = 3 * query
        bent: dict[str, Any] = {"softcap": softcap, "sinks": random_sinks(len(query)) if sunk else None}
        got = implementation.prefill(
            query, keys, values, case.view, case.pages, 1, scale, token_mass, window, **bent
        )
        old_keys, old_values = case.dense[0][:, 1]
        out, logs, probabilities = softmax_attention(
            query,
            torch.cat([old_keys, keys.double()], 1),
            torch.cat([old_values, values.double()], 1),
            scale,
            old,
            **bent,
        )
        torch.testing.assert_close(got.out, out.float(), **CLOSE)
        torch.testing.assert_close(got.log_sum_exp, logs.float(), **CLOSE)
        expected = probabilities[:, -window:].mean((0, 1)).numpy()
        np.testing.assert_allclose(token_mass - 1.0, expected, rtol=1e-4, atol=1e-6)
        silent = implementation.prefill(query, keys, values, case.view, case.pages, 1, scale, **bent)
        torch.testing.assert_close(silent.out, got.out, rtol=0.0, atol=0.0)
