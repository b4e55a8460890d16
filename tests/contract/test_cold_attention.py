"""Cold pages in the contract of `tierkv.attention.contract`, which every implementation passes.

Expected values come from dense float64 arithmetic in this file, over the K/V that were put into the pages (or, for
packed pages, over what the codec's torch reference reads back) and over the digests' numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.contract.test_attention import CLOSE, DTYPES, MASS_CLOSE, Case, make_case, random_query
from tierkv import attention, quant
from tierkv.attention.contract import (
    CHOOSING_QUERIES,
    READ_ALL,
    Attended,
    Cold,
    ColdPages,
    ColdSeen,
    PagedAttention,
    Pages,
    PoolView,
)
from tierkv.geometry import DTypeName, Geometry
from tierkv.prefetch import digests
from tierkv.table import NOWHERE

SHAPES = [("k3v2", 64), ("k3v2", 80), ("k3v2", 128), ("kivi2", 64), ("kivi2", 128)]


@dataclass
class Part:
    """Some tokens of a row in float64: keys, values `[kv_heads, tokens, head_dim]`; which page each token is of."""

    keys: torch.Tensor
    values: torch.Tensor
    page_of: torch.Tensor  # [tokens] index among the row's pages of this part
    places: NDArray[np.int64]  # [tokens] in a mass array


@dataclass
class Both:
    """Rows with pages in HBM (`case`) and cold ones, whose digests lie behind the former in the HBM pool."""

    case: Case
    host: Case
    cold: Cold
    pages: Pages

    @property
    def layers(self) -> int:
        return self.case.view.digest_layers

    def part(self, cold: bool, row: int, layer: int) -> Part:
        case = self.host if cold else self.case
        pages = self.cold.pages if cold else self.pages
        here = slice(*case.pages.row_starts[row : row + 2])
        counts = torch.from_numpy(pages.counts[here].astype(np.int64))
        starts = pages.token_starts[here]
        spans = [np.arange(start, start + n) for start, n in zip(starts, counts.tolist(), strict=True)]
        return Part(
            *case.dense[row][:, layer],
            torch.arange(len(counts)).repeat_interleave(counts),
            np.concatenate([np.arange(0), *spans]).astype(np.int64),
        )

    @staticmethod
    def logits(query: torch.Tensor, part: Part, scale: float) -> torch.Tensor:
        """`[q_heads, tokens]` of a query `[q_heads, head_dim]`."""
        ratio = query.shape[0] // part.keys.shape[0]
        return torch.stack([q.double() @ part.keys[h // ratio].T * scale for h, q in enumerate(query)])

    def estimates(self, query: torch.Tensor, row: int, layer: int, scale: float) -> torch.Tensor:
        """Log-mass `[q_heads, cold pages]` of a query `[q_heads, head_dim]`, from the digests' numbers."""
        geometry = self.case.view.geometry
        shape = digests.digest_shape(geometry, self.layers)
        group = query.shape[0] // geometry.num_kv_heads
        first, last = self.host.pages.row_starts[row : row + 2]
        found = torch.full((query.shape[0], int(last - first)), -math.inf, dtype=torch.float64)
        for page in range(first, last):
            offset, n = int(self.cold.pages.digests[page]), int(self.cold.pages.counts[page])
            if offset == NOWHERE:
                continue
            digest = digests.read(shape, self.case.view.data[offset : offset + shape.nbytes])
            at = layer - (geometry.num_layers - shape.layers)
            for head in range(query.shape[0]):
                q = query[head].double().numpy()
                mean = float(scale * q @ digest.mean[at, head // group].astype(np.float64))
                sigma = float(abs(scale) * np.linalg.norm(q * digest.deviation[at, head // group]))
                found[head, page - first] = second_cumulant(mean, sigma, n)
        return found


def second_cumulant(mean: float, sigma: float, n: int) -> float:
    """The formula that `tierkv.prefetch.digests` documents."""
    a = math.sqrt(2 * math.log(n))
    return math.log(n) + mean + (sigma**2 / 2 if sigma <= a else a * sigma - a**2 / 2)


def make_both(
    seed: int, row_pages: tuple[int, ...] = (5,), cold_pages: tuple[int, ...] = (9,), *, read: int = 3,
    digest_layers: int = 1, without: tuple[int, ...] = (),
    dtype: DTypeName = "bfloat16", head_dim: int = 64, kv_heads: int = 3, low: float = 0.5, codec_name: str = "k3v2",
) -> Both:  # fmt: skip
    """`without`: cold pages that have no digest."""
    shape = {"dtype": dtype, "head_dim": head_dim, "kv_heads": kv_heads, "codec_name": codec_name}
    case = make_case(seed, row_pages=row_pages, low=low, **shape)
    host = make_case(seed + 1, row_pages=cold_pages, low=low, **shape)
    geometry = case.view.geometry
    form = digests.digest_shape(geometry, digest_layers)
    start = -(-len(case.view.data) // 64) * 64
    hbm = np.zeros(start + sum(cold_pages) * form.nbytes, np.uint8)
    hbm[: len(case.view.data)] = case.view.data
    offsets = np.full(sum(cold_pages), NOWHERE, np.int64)
    token_starts = host.pages.token_starts + case.pages.total_tokens
    for page in range(sum(cold_pages)):
        if page not in without:
            offsets[page] = start + page * form.nbytes
            exact = np.zeros(geometry.page_bytes, np.uint8)
            keys = exact_keys(host, page).to(DTYPES[dtype])
            view = torch.from_numpy(exact).view(DTYPES[dtype]).view(geometry.shape)
            view[:, 0, :, : keys.shape[2]] = keys
            digests.write(form, exact, keys.shape[2], hbm[offsets[page] :][: form.nbytes])
    case.view = case.view._replace(data=hbm, digest_layers=digest_layers)
    host.view.data.flags.writeable = False  # a worker maps the host pool read-only
    pages = case.pages._replace(total_tokens=case.pages.total_tokens + host.pages.total_tokens)
    cold = ColdPages(
        offsets, host.pages.offsets, host.pages.kinds, host.pages.counts, token_starts, host.pages.row_starts
    )
    return Both(case, host, Cold(cold, host.view, read), pages)


def exact_keys(host: Case, page: int) -> torch.Tensor:
    """Keys `[layers, kv_heads, tokens, head_dim]` of a page, as its replica holds them."""
    row = int(np.searchsorted(host.pages.row_starts, page, "right")) - 1
    first = int(host.pages.counts[host.pages.row_starts[row] : page].sum())
    return host.dense[row][0, :, :, first : first + int(host.pages.counts[page])]


def tops(wanted: torch.Tensor, told: torch.Tensor, read: int) -> list[int]:
    """The `read` largest of `wanted` `[pages]` among those that are `told`."""
    order = sorted((page for page in range(len(wanted)) if told[page]), key=lambda page: -float(wanted[page]))
    return order[:read]


def softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and log-sum-exp along the last axis."""
    if torch.isneginf(logits).all():
        return torch.zeros_like(logits), torch.full(logits.shape[:-1], -math.inf, dtype=torch.float64)
    top = logits.max(-1, keepdim=True).values
    total = torch.exp(logits - top).sum(-1, keepdim=True)
    return torch.exp(logits - top) / total, (top + torch.log(total)).squeeze(-1)


def shares(
    both: Both, query: torch.Tensor, hbm_log: torch.Tensor, row: int, layer: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimates and joint shares `[q_heads, cold pages]`; `hbm_log` `[q_heads]`."""
    estimates = both.estimates(query, row, layer, scale)
    probabilities, _ = softmax(torch.cat([hbm_log.unsqueeze(-1), estimates], -1))
    return estimates, probabilities[:, 1:]


def check_decode(implementation: PagedAttention, both: Both, ratio: int, seed: int) -> None:
    """Everything that a decode call returns and adds, in both layers, against dense arithmetic."""
    geometry, pages, cold = both.case.view.geometry, both.pages, both.cold.pages
    rows, scale, heads = len(both.case.dense), geometry.head_dim**-0.5, geometry.num_kv_heads
    query = 3 * random_query(seed, rows, heads * ratio, geometry.head_dim)
    for layer in range(geometry.num_layers):
        page_mass, token_mass = (
            np.zeros(len(pages.offsets), np.float32),
            np.zeros(pages.total_tokens, np.float32),
        )
        seen = audit_of(both)
        got = implementation.decode(
            query, both.case.view, pages, layer, scale, page_mass, token_mass, both.cold, seen
        )
        for row in range(rows):
            here, there = both.part(False, row, layer), both.part(True, row, layer)
            mine, far = (slice(*starts[row : row + 2]) for starts in (pages.row_starts, cold.row_starts))
            count = int(far.stop - far.start)
            hbm_logits, cold_logits = (both.logits(query[row], part, scale) for part in (here, there))
            everything = torch.cat([hbm_logits, cold_logits], -1)
            if everything.shape[1] == 0:
                assert not got.out[row].any() and torch.isneginf(got.log_sum_exp[row]).all()
                assert seen.attended is not None and seen.attended[row] == 1.0
                continue
            estimates, share = shares(both, query[row], softmax(hbm_logits)[1], row, layer, scale)
            digested = layer >= geometry.num_layers - both.layers
            expected = share.mean(0) if digested else torch.zeros(count)
            np.testing.assert_allclose(seen.estimates[far], expected, **MASS_CLOSE)
            wanted = share.reshape(heads, ratio, count).sum(1)
            told = (estimates > -math.inf).reshape(heads, ratio, count).any(1)
            taken = torch.zeros(heads, count, dtype=torch.bool)
            for head in range(heads if digested else 0):
                taken[head, tops(wanted[head], told[head], both.cold.read)] = True
            hidden = ~taken.repeat_interleave(ratio, 0)[:, there.page_of]
            check_row(got, row, torch.cat([hbm_logits, cold_logits.masked_fill(hidden, -math.inf)], -1), here, there,
                      ratio, token_mass)  # fmt: skip
            firsts = np.searchsorted(here.page_of.numpy(), np.arange(mine.stop - mine.start))
            if len(firsts):
                by_page = np.add.reduceat(token_mass[here.places], firsts)
                np.testing.assert_allclose(page_mass[mine], by_page, **MASS_CLOSE)
            truth, _ = softmax(everything)
            cold_truth = truth[:, hbm_logits.shape[1] :]
            assert seen.true is not None and seen.attended is not None
            true = torch.zeros(count, dtype=torch.float64).index_add_(0, there.page_of, cold_truth.mean(0))
            np.testing.assert_allclose(seen.true[far], true, **MASS_CLOSE)
            missed = float((cold_truth * hidden).sum(-1).mean())
            assert seen.attended[row] == pytest.approx(1 - missed, abs=1e-5)


def check_row(
    got: Attended,
    row: int,
    logits: torch.Tensor,
    here: Part,
    there: Part,
    ratio: int,
    mass: NDArray[np.float32],
) -> None:
    """Output, log-sum-exp and token masses of one row, given all its logits (minus infinity: not attended)."""
    if torch.isneginf(logits).all():
        assert not got.out[row].any() and torch.isneginf(got.log_sum_exp[row]).all()
        return
    probabilities, log_sum_exp = softmax(logits)
    values = torch.cat([here.values, there.values], 1)
    out = torch.stack([p @ values[h // ratio] for h, p in enumerate(probabilities)])
    torch.testing.assert_close(got.out[row], out.float(), **CLOSE)
    torch.testing.assert_close(got.log_sum_exp[row], log_sum_exp.float(), **CLOSE)
    places = np.concatenate([here.places, there.places])
    np.testing.assert_allclose(mass[places], probabilities.mean(0), **MASS_CLOSE)


def check_prefill(implementation: PagedAttention, both: Both, chunk: int, window: int) -> None:
    """A chunk of one row, in both layers: what is named, output, masses, and what the last query saw."""
    geometry, pages, cold = both.case.view.geometry, both.pages, both.cold.pages
    heads, ratio, dim, scale = geometry.num_kv_heads, 3, geometry.head_dim, geometry.head_dim**-0.5
    query = 3 * random_query(chunk, chunk, heads * ratio, dim).transpose(0, 1)
    keys, values = (random_query(chunk + i, chunk, heads, dim).transpose(0, 1) for i in (1, 2))
    count = len(cold.offsets)
    for layer in range(2):
        token_mass, seen = np.zeros(pages.total_tokens + chunk, np.float32), audit_of(both)
        got = implementation.prefill(
            query, keys, values, both.case.view, pages, layer, scale, token_mass, window, both.cold, seen
        )
        here, there = both.part(False, 0, layer), both.part(True, 0, layer)
        here = Part(
            torch.cat([here.keys, keys.double()], 1), torch.cat([here.values, values.double()], 1), here.page_of,
            np.concatenate([here.places, pages.total_tokens + np.arange(chunk)]),
        )  # fmt: skip
        masses = []
        digested = layer >= geometry.num_layers - both.layers
        wanted, told = (
            torch.zeros(heads, count, dtype=torch.float64),
            torch.zeros(heads, count, dtype=torch.bool),
        )
        near: list[torch.Tensor] = []
        for t in range(chunk):
            logits = both.logits(query[:, t], here, scale)
            logits[:, logits.shape[1] - (chunk - 1 - t) :] = -math.inf
            near.append(logits)
            if digested and t >= chunk - CHOOSING_QUERIES:
                estimates, share = shares(both, query[:, t], softmax(logits)[1], 0, layer, scale)
                wanted += share.reshape(heads, ratio, count).sum(1)
                told |= (estimates > -math.inf).reshape(heads, ratio, count).any(1)
        np.testing.assert_allclose(
            seen.estimates, share.mean(0) if digested else np.zeros(count), **MASS_CLOSE
        )
        named = sorted(
            {page for head in range(heads) for page in tops(wanted[head], told[head], both.cold.read)}
        )
        hidden = ~torch.isin(there.page_of, torch.tensor(named, dtype=torch.int64))
        joined = torch.cat([here.values, there.values], 1)
        for t in range(chunk):
            far = both.logits(query[:, t], there, scale)
            probabilities, log_sum_exp = softmax(torch.cat([near[t], far.masked_fill(hidden, -math.inf)], -1))
            out = torch.stack([p @ joined[h // ratio] for h, p in enumerate(probabilities)])
            torch.testing.assert_close(got.out[:, t], out.float(), **CLOSE)
            torch.testing.assert_close(got.log_sum_exp[:, t], log_sum_exp.float(), **CLOSE)
            masses.append(probabilities.mean(0))
        places = np.concatenate([here.places, there.places])
        expected = torch.stack(masses[-window:]).mean(0)
        np.testing.assert_allclose(token_mass[places], expected, **MASS_CLOSE)
        truth = softmax(torch.cat([near[-1], far], -1))[0][:, near[-1].shape[1] :]
        assert seen.true is not None and seen.attended is not None
        true = torch.zeros(count, dtype=torch.float64).index_add_(0, there.page_of, truth.mean(0))
        np.testing.assert_allclose(seen.true, true, **MASS_CLOSE)
        assert seen.attended[0] == pytest.approx(1 - float((truth * hidden).sum(-1).mean()), abs=1e-5)


def audit_of(both: Both) -> ColdSeen:
    """Empty arrays for everything that a call may see."""
    pages = len(both.cold.pages.offsets)
    return ColdSeen(*(np.zeros(n, np.float32) for n in (pages, pages, len(both.case.dense))))


@pytest.fixture(scope="module", params=attention.NAMES)
def implementation(request: pytest.FixtureRequest) -> PagedAttention:
    return attention.get(request.param)


class TestEveryAttentionOverColdPages:
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

    @pytest.mark.parametrize("codec_name", quant.NAMES)
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
        torch.testing.assert_close(outs[0], outs[1], **CLOSE)

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
            np.testing.assert_allclose(b, 2 * a, **MASS_CLOSE)

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
        shape = digests.digest_shape(both.case.view.geometry, 1)
        start = both.cold.pages.digests[1]
        page = np.full(both.case.view.geometry.page_bytes, 0xFF, np.uint8)  # NaN
        digests.write(shape, page, 16, both.case.view.data[start : start + shape.nbytes])
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


class TestEstimates:
    """The estimate against the truth, over pages of whose keys something is known."""

    @staticmethod
    def estimated_and_true(
        implementation: PagedAttention, pages: NDArray[np.float32], count: int, scale: float
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Shares of cold pages with keys `[pages, tokens, head_dim]` for one query head, a tenth of attention in all.

        Nine tenths go to one token in HBM, so that no estimate is near the most that a share can be.
        """
        n, tokens, dim = pages.shape
        geometry = Geometry(1, 1, dim, "float32", tokens)
        shape = digests.digest_shape(geometry, 0)
        host = np.zeros((n, *geometry.shape), np.float32)
        host[:, 0, 0, 0] = pages
        host_bytes = host.view(np.uint8).reshape(n, -1)
        hbm = np.zeros(geometry.page_bytes + n * shape.nbytes, np.uint8)
        offsets = geometry.page_bytes + np.arange(n) * shape.nbytes
        for page in range(n):
            digests.write(shape, host_bytes[page], count, hbm[offsets[page] :][: shape.nbytes])
        view = PoolView(hbm, geometry, quant.get("k3v2"), np.zeros(0, np.float32), 1)
        query = random_query(1, 1, 1, dim)
        q = query[0, 0].double()
        _, log_mass = softmax(torch.from_numpy(pages[:, :count]).double().reshape(-1, dim) @ q * scale)
        key = (q / (q @ q) * (log_mass + math.log(9)) / scale).numpy()
        hbm[: 4 * dim] = key.astype(np.float32).view(np.uint8)
        cold = ColdPages(
            offsets, np.arange(n) * geometry.page_bytes, np.ones(n, np.int8), np.full(n, count, np.int32),
            np.arange(n) * tokens + 1, np.array([0, n]),
        )  # fmt: skip
        one = Pages(
            np.zeros(1, np.int64), np.ones(1, np.int8), np.ones(1, np.int32), np.zeros(1, np.int64),
            np.array([0, 1]), 1 + n * tokens,
        )  # fmt: skip
        seen = ColdSeen(np.zeros(n, np.float32), np.zeros(n, np.float32))
        whole = Cold(cold, view._replace(data=host_bytes.reshape(-1)), 0)
        implementation.decode(query, view, one, 0, scale, cold=whole, seen=seen)
        assert seen.true is not None
        return seen.estimates, seen.true

    @pytest.mark.parametrize("count", [1, 5, 16])
    def test_pages_of_identical_keys_are_estimated_exactly(
        self, implementation: PagedAttention, count: int
    ) -> None:
        keys = np.random.default_rng(0).integers(-127, 128, (8, 1, 64)).astype(np.float32)
        keys[:, :, 0] = 127  # then the digest's codes are the keys themselves
        estimated, true = self.estimated_and_true(implementation, keys.repeat(16, 1) / 64, count, 0.125)
        np.testing.assert_allclose(estimated, true, rtol=1e-4)

    def test_pages_of_many_normal_keys_are_estimated_closely(self, implementation: PagedAttention) -> None:
        """4,096 tokens with sigma about 1: the sample's own noise is a few percent."""
        rng = np.random.default_rng(1)
        keys = rng.standard_normal((6, 1, 64)) + rng.standard_normal((6, 4096, 64))
        estimated, true = self.estimated_and_true(implementation, keys.astype(np.float32), 4096, 0.125)
        np.testing.assert_allclose(estimated, true, rtol=0.15)

    @pytest.mark.parametrize("scale", [0.125, 0.25, 0.5])
    def test_estimates_of_clustered_keys_sum_to_about_the_truth(
        self, implementation: PagedAttention, scale: float
    ) -> None:
        """200 pages of two clusters each; the logits' sigma is about .9, 1.7 and 3.5, and a = sqrt(2 ln 16) = 2.4."""
        rng = np.random.default_rng(2)
        clusters = rng.standard_normal((200, 2, 1, 64)) + 0.5 * rng.standard_normal((200, 2, 8, 64))
        estimated, true = self.estimated_and_true(
            implementation, clusters.reshape(200, 16, 64).astype(np.float32), 16, scale
        )
        assert 0.5 < estimated.sum() / true.sum() < 2.0
