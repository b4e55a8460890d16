"""Estimators against closed forms, what a cold view lets attention see against SDPA, and ranks counted by hand."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from tierkv.attention.contract import READ_ALL
from tierkv.prefetch.deviation import log_mass
from tierkv.regions import Region, Run
from tierkv.study.cold_view import ColdView, ViewedAttention
from tierkv.study.episodes import QUESTION, Block, Episode, Probe
from tierkv.study.estimators import (
    DIGEST,
    ESTIMATORS,
    MEAN_BOX,
    MIN_MAX,
    Layout,
    grouped,
    layout_of,
    offset_of,
    pages_before,
)
from tierkv.study.probe import cache_argument, dynamic_cache, fork_dynamic, forward, replay
from tierkv.study.recall_study import PLANS, Context, Found, Measure, fact_page, report
from tierkv.study.recall_tables import Places, Spread, render

SCALE = 0.5
each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: estimator.name)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pages(*counts: int) -> Layout:
    return Layout(np.array(counts, np.int64))


def estimate(estimator, keys, layout, query, scale=SCALE):
    """Log-masses `[q_heads, queries, pages]` of one layer's keys `[kv_heads, tokens, head_dim]`."""
    summary = estimator.summarize(keys.unsqueeze(0), layout).layer(0, slice(None))
    return estimator.log_mass(query, summary, torch.from_numpy(layout.counts).float(), scale)


def one_page(estimator, keys, query, scale=SCALE):
    """The estimate of one page with these keys, for one query."""
    keys = torch.tensor(keys, dtype=torch.float32)
    return float(estimate(estimator, keys.unsqueeze(0), pages(len(keys)), torch.tensor([[query]]), scale))


# Pages


def test_pages_end_where_a_region_does_and_where_they_are_full():
    runs = [Run(Region.SYSTEM, 5), Run(Region.USER, 4), Run(Region.USER, 1), Run(Region.PLAN, 2)]
    layout = layout_of(runs, page_tokens=4)
    assert layout.counts.tolist() == [4, 1, 4, 1, 2]
    assert layout.starts.tolist() == [0, 4, 5, 9, 10]
    assert layout.ends.tolist() == [4, 5, 9, 10, 12]
    assert layout.page_of.tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 4, 4]


def test_kept_pages_have_a_first_or_a_last_token():
    assert pages(4, 1, 4, 1, 2).ends_kept(5, 3).tolist() == [True, True, False, True, True]
    assert pages(4, 1, 4, 1, 2).ends_kept(4, 2).tolist() == [True, False, False, False, True]


def test_the_mass_of_a_page_is_the_sum_of_its_tokens():
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).log()
    assert torch.allclose(pages(1, 3, 2).log_mass(logits).exp(), torch.tensor([1.0, 9.0, 11.0]))


# Estimators


@each_estimator
def test_identical_keys_are_estimated_exactly(estimator):
    key = [127.0, -3.0, 0.0, 64.0]  # whole numbers up to 127: one byte holds them
    exact = math.log(7) + 0.01 * (127.0 * 0.5 - 3.0 * -2.0 + 64.0 * 0.25)
    assert one_page(estimator, [key] * 7, [0.5, -2.0, 9.0, 0.25], 0.01) == pytest.approx(exact, abs=1e-5)


@each_estimator
def test_pages_of_zeros_tell_only_their_length(estimator):
    assert one_page(estimator, [[0.0, 0.0]] * 3, [5.0, -5.0]) == pytest.approx(math.log(3))


def test_boxes_are_read_at_their_best_corner():
    keys = [[0.0, 1.0], [0.0, 1.0], [3.0, -2.0]]
    # Box: middles 1.5 and -.5, half-widths 1.5 and 1.5; best corner for (2, -1) is (3, -2).
    assert one_page(MIN_MAX, keys, [2.0, -1.0]) == pytest.approx(math.log(3) + SCALE * 8, abs=0.05)
    # Means 1 and 0, mean deviations 4/3 and 4/3: corner (7/3, -4/3).
    assert one_page(MEAN_BOX, keys, [2.0, -1.0]) == pytest.approx(math.log(3) + SCALE * 6, abs=0.05)


@pytest.mark.parametrize("spread", [0.5, 2.0, 8.0])
def test_two_keys_apart_follow_the_cumulant_and_then_the_random_energy_form(spread):
    sigma, a = SCALE * spread, math.sqrt(2 * math.log(2))
    above = sigma**2 / 2 if sigma <= a else a * sigma - a**2 / 2
    assert one_page(DIGEST, [[spread], [-spread]], [1.0]) == pytest.approx(math.log(2) + above, rel=1e-5)


def test_the_vectorized_estimate_is_the_digests_own():
    layout, query = pages(1, 2, 16, 5), 3 * random(2, 3, 8)
    keys = random(1, layout.tokens, 8, seed=1)
    found = estimate(DIGEST, keys, layout, query)
    for page, part in enumerate(layout.pages(keys.unsqueeze(0))):
        mean, deviation = part[0, 0].mean(0), part[0, 0].std(0, unbiased=False)
        for head in range(2):
            for q in range(3):
                one = query[head, q]
                sigma = SCALE * math.sqrt(float(((one * deviation) ** 2).sum()))
                expected = log_mass(SCALE * float(one @ mean), sigma, int(layout.counts[page]))
                assert float(found[head, q, page]) == pytest.approx(expected, abs=0.08)  # a byte a dimension


def test_normal_keys_have_the_mass_of_the_log_normal_mean():
    layout, dim = pages(*[16] * 400), 32
    center, query = random(dim, seed=2), random(dim, seed=3)
    keys = center + 0.4 * random(1, layout.tokens, dim, seed=4)
    found = estimate(DIGEST, keys, layout, query.reshape(1, 1, dim))
    variance = float((0.4 * SCALE * query).square().sum()) * 15 / 16  # of 16 samples about their own mean
    expected = math.log(16) + SCALE * float(query @ center) + variance / 2
    assert float(found.mean()) == pytest.approx(expected, abs=0.06)
    true = layout.log_mass(SCALE * grouped(query.reshape(1, 1, dim), keys))
    assert float(found.mean() - true.mean()) == pytest.approx(0.0, abs=0.06)
    assert float((estimate(MIN_MAX, keys, layout, query.reshape(1, 1, dim)) - true).min()) > 0.5  # a bound


def test_query_heads_read_the_keys_of_their_group():
    query, vectors = random(6, 2, 4), random(3, 5, 4, seed=1)
    expected = torch.einsum("hqd,hnd->hqn", query, vectors.repeat_interleave(2, 0))
    assert torch.allclose(grouped(query, vectors), expected, atol=1e-6)


def test_an_offset_is_what_a_head_lacks():
    true = random(2, 3, 5)
    lacks = torch.tensor([0.7, -1.5]).reshape(2, 1, 1)
    assert torch.allclose(offset_of(true - lacks, true), lacks, atol=1e-6)


# What a view lets attention see


LAYOUT = pages(2, 3, 4, 1, 2)
RESIDENT = torch.tensor([True, False, False, False, True])


def view(keys: torch.Tensor, read: int) -> ColdView:
    """Of a context in one layer."""
    return ColdView(LAYOUT, DIGEST.summarize(keys[:, : LAYOUT.tokens].unsqueeze(0), LAYOUT), RESIDENT, read)


def attention(query, keys, values, hidden_pages=()):
    """SDPA, causal for the queries at the end, without the tokens of some pages."""
    tokens, queries = keys.shape[1], query.shape[1]
    seen = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
    for page in hidden_pages:
        seen[:, : LAYOUT.tokens][:, page == LAYOUT.page_of] = False
    group = len(query) // len(keys)
    wide = (part.repeat_interleave(group, 0) for part in (keys, values))
    return scaled_dot_product_attention(query, *wide, attn_mask=seen, scale=SCALE)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(("read", "hidden"), [(READ_ALL, ()), (3, ()), (0, (1, 2, 3))])
def test_a_view_attends_what_is_resident_and_what_is_read(queries, read, hidden):
    query = random(4, queries, 8)
    keys, values = (
        random(2, LAYOUT.tokens + queries, 8, seed=1),
        random(2, LAYOUT.tokens + queries, 8, seed=2),
    )
    out = view(keys, read).attend(0, query, keys, values, SCALE)
    assert torch.allclose(out, attention(query, keys, values, hidden), atol=1e-5)


def test_heads_of_a_decode_step_choose_for_themselves_and_those_of_a_chunk_together():
    """Page 1's keys please KV head 0 and page 2's KV head 1; one page is read by each."""
    keys, values = torch.zeros(2, LAYOUT.tokens + 1, 4), random(2, LAYOUT.tokens + 1, 4)
    keys[0, 2:5] = keys[1, 5:9] = 4.0
    query = torch.ones(2, 1, 4)
    apart = view(keys, 1).attend(0, query, keys, values, SCALE)
    assert torch.allclose(apart[0], attention(query, keys, values, (2, 3))[0], atol=1e-5)
    assert torch.allclose(apart[1], attention(query, keys, values, (1, 3))[1], atol=1e-5)
    keys, values = (torch.cat([part, part[:, -1:]], 1) for part in (keys, values))
    query = torch.ones(2, 2, 4)
    together = view(keys, 1).attend(0, query, keys, values, SCALE)
    assert torch.allclose(together, attention(query, keys, values, (3,)), atol=1e-5)


def flat_pages() -> torch.Tensor:
    """Keys `[1, tokens + 1, 1]` that are equal within a page, so that digests are exact."""
    return torch.cat([torch.tensor([0.0, 1.0, 3.0, 2.0, 0.0])[LAYOUT.page_of], torch.zeros(1)]).reshape(
        1, -1, 1
    )


def test_estimated_shares_of_flat_pages_are_their_attention_and_the_best_come_back():
    keys = flat_pages()
    seen = view(keys, 0)
    seen.attend(0, torch.ones(1, 1, 1), keys, keys, 1.0)
    masses = np.array([2.0, 3 * math.e, 4 * math.e**3, math.e**2, 2.0])
    shares = masses / (masses.sum() + 1)  # the query's own token: exp(0)
    assert seen.ranking(slice(None))[1:4].tolist() == pytest.approx(shares[1:4].tolist(), rel=1e-4)
    assert seen.ranking(slice(None))[RESIDENT].tolist() == [0.0, 0.0]
    seen.bring_back(2, slice(None))  # 4 e**3, then 3 e > e**2
    assert seen.resident.tolist() == [True, True, True, False, True]
    assert RESIDENT.tolist() == [True, False, False, False, True]
    seen.bring_back(9, slice(None))
    assert seen.cold_pages == 0


def test_estimates_of_flat_pages_have_the_true_mass_with_and_without_an_offset():
    keys = flat_pages()
    summaries = {e.name: e.summarize(keys[:, : LAYOUT.tokens].unsqueeze(0), LAYOUT) for e in ESTIMATORS}
    measure = Measure(Context(None, LAYOUT, summaries, RESIDENT))
    seen = view(keys, 0)
    seen.look = measure.look
    seen.attend(0, torch.ones(1, 1, 1), keys, keys, 1.0)
    assert list(measure.ratios(slice(None)).values()) == pytest.approx([1.0] * 6, rel=1e-4)
    assert set(measure.ranks(1, slice(None)).values()) == {1}
    assert set(measure.ranks(3, slice(None)).values()) == {2}


def test_a_model_whose_view_reads_everything_is_the_model():
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=26, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    context, question = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [9, 7, 9]
    with torch.inference_mode():
        plain = model(torch.tensor([context + question])).logits[0, -1]
        attention = ViewedAttention(model)
        cache = dynamic_cache(model)
        replay(model, cache, context, burst=0)
        keys = torch.stack([layer.keys[0] for layer in cache.layers])
        logits = {}
        for read in (READ_ALL, 0):
            attention.view = ColdView(LAYOUT, DIGEST.summarize(keys, LAYOUT), RESIDENT, read)
            with fork_dynamic(cache)() as fork:
                logits[read] = model(torch.tensor([question]), **{cache_argument(model): fork}).logits[0, -1]
        attention.view = None
        assert forward(model, cache, question) == int(plain.argmax())
    assert torch.allclose(logits[READ_ALL], plain, atol=1e-4)
    assert not torch.allclose(logits[0], plain, atol=1e-2)


# Ranks and figures


def test_the_rank_of_a_page_is_the_pages_with_more():
    shares = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.0])
    assert [pages_before(shares, page) for page in range(5)] == [3, 0, 1, 1, 4]


def test_places_count_ranks_below_four_eight_and_sixteen():
    assert Places.of([0, 3, 4, 7, 8, 15, 16, 40]) == Places({4: 2, 8: 4, 16: 6}, worst=40)


def test_a_spread_is_the_median_and_the_ends():
    assert Spread.of([4.0, 1.0, 2.0, 9.0]) == Spread(3.0, 1.0, 9.0)


class Characters:
    """Token `i` of a text is its `i`-th character."""

    def __call__(
        self, text: str, add_special_tokens: bool = False, return_offsets_mapping: bool = False
    ) -> SimpleNamespace:
        offsets = [(i, i + 1) for i in range(len(text))]
        return SimpleNamespace(input_ids=[ord(c) for c in text], offset_mapping=offsets)


def test_the_facts_page_holds_the_token_after_its_statement():
    blocks = (Block(Region.SYSTEM, "abc"), Block(Region.USER, "xx It is 47."))
    probe = Probe(Region.USER, QUESTION + "It is", "47")
    episode = Episode("some", "", blocks, (probe,))
    # Token 3 + 8 is the blank before 47.
    assert fact_page(episode, probe, Characters(), pages(3, 8, 4)) == 2
    assert fact_page(episode, probe, Characters(), pages(3, 9, 3)) == 1
    with pytest.raises(ValueError, match="no block of some says 'It is' '48'"):
        fact_page(episode, probe._replace(gold="48"), Characters(), pages(15))


def test_a_report_counts_questions():
    way = ("digest", False)

    def found(ratio: float, rank: int, right: bool) -> Found:
        return Found(
            90, {way: ratio}, {way: 2 * ratio}, {way: rank}, {way: 0}, 20, 10, dict.fromkeys(PLANS, right)
        )

    told = report([found(0.9, 5, True), found(1.1, 1, True), found(1.0, 17, False)], 1, 2.0)
    (estimator,) = told.estimators
    assert estimator.ratio == Spread(1.0, 0.9, 1.1)
    assert estimator.ratio_late == Spread(2.0, 1.8, 2.2)
    assert (estimator.places.first, estimator.places.worst) == ({4: 1, 8: 2, 16: 2}, 17)
    assert told.uninformed_late == Places({4: 0, 8: 0, 16: 3}, 10)
    assert [row.answered for row in told.answers] == [2] * len(PLANS)
    assert told.answers[-1].chunk_read is None
    console = Console(file=io.StringIO(), width=120)
    console.print(render(told))
    assert "1.00 (0.90 to 1.10)" in console.file.getvalue()
    assert "1/2/2 (17)" in console.file.getvalue()
