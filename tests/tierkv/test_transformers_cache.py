"""A model over pages says what it says over DynamicCache: same tokens, same logits, nothing computed twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from tests.tierkv.local_session import LocalPool, LocalSession
from tests.tierkv.tiny_models import (
    CACHE,
    NEW,
    build,
    count_forward_tokens,
    expected,
    greedy,
    local_sessions,
    longer,
    prompt,
    tiered,
)
from tierkv.errors import GeometryMismatch, OutOfCapacity
from tierkv.model import attach
from tierkv.transformers_cache import TieredCache


@pytest.fixture(params=["llama", "qwen2", "mistral"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


@pytest.fixture
def llama() -> PreTrainedModel:
    return build("llama")


# Same tokens ---------------------------------------------------------------------------------------------------------


def test_a_single_prompt_gives_the_same_tokens(model: PreTrainedModel) -> None:
    inputs = prompt(37)
    want = expected(model, inputs)
    assert len(set(want[0, -NEW:].tolist())) > 4, "a model in a loop would prove nothing"
    assert torch.equal(greedy(model, inputs, tiered(attach(model))), want)


def test_a_left_padded_batch_gives_the_same_tokens_and_writes_no_padding(model: PreTrainedModel) -> None:
    inputs = prompt(5, 37, 18)
    want = expected(model, inputs)
    cache = tiered(attach(model), rows=3)
    assert torch.equal(greedy(model, inputs, cache), want)
    # The last token was generated, not fed.
    assert [session.length for session in cache.sessions] == [5 + NEW - 1, 37 + NEW - 1, 18 + NEW - 1]
    assert cache.get_seq_length() == 37 + NEW - 1


@pytest.mark.parametrize("chunk", [16, 48])
def test_a_prompt_in_slices_gives_the_same_tokens(model: PreTrainedModel, chunk: int) -> None:
    inputs = prompt(131, 70)
    want = expected(model, inputs)
    counts = count_forward_tokens(model)
    cache = tiered(attach(model), rows=2, chunk_tokens=chunk)
    assert torch.equal(greedy(model, inputs, cache), want)
    assert max(counts) <= chunk
    assert sum(counts) == 131 + NEW - 1


def test_a_slice_that_is_all_padding_is_skipped_over(llama: PreTrainedModel) -> None:
    """Batches are often padded to a multiple; the first slice then holds no token at all."""
    inputs = {name: torch.nn.functional.pad(tensor, (40, 0)) for name, tensor in prompt(23, 9).items()}
    want = expected(llama, inputs)
    cache = tiered(attach(llama), rows=2, chunk_tokens=16)
    assert torch.equal(greedy(llama, inputs, cache), want)
    assert [session.length for session in cache.sessions] == [23 + NEW - 1, 9 + NEW - 1]


def test_transformers_own_prefill_chunks_give_the_same_tokens(model: PreTrainedModel) -> None:
    inputs = prompt(50, 33)
    want = expected(model, inputs)
    assert torch.equal(greedy(model, inputs, tiered(attach(model), rows=2), prefill_chunk_size=16), want)


def test_several_turns_compute_only_what_is_new(model: PreTrainedModel) -> None:
    inputs = prompt(30, 21)
    more = prompt(9, 9, seed=2)["input_ids"]
    first = expected(model, inputs)
    second = longer({"input_ids": first, "attention_mask": inputs["attention_mask"]}, more)
    want = expected(model, second)
    counts = count_forward_tokens(model)
    cache = tiered(attach(model), rows=2)
    assert torch.equal(greedy(model, inputs, cache), first)
    assert sum(counts) == 30 + NEW - 1
    counts.clear()
    assert torch.equal(greedy(model, second, cache), want)
    # The first turn's last token, the new ones, and all generated but the last.
    assert sum(counts) == 1 + 9 + NEW - 1


def test_four_beams_from_one_session_give_the_same_tokens(model: PreTrainedModel) -> None:
    inputs = prompt(19)
    want = expected(model, inputs, num_beams=4, num_return_sequences=4)
    cache = tiered(attach(model))
    pool = local_sessions(cache)[0]._pool
    got = greedy(model, inputs, cache, num_beams=4, num_return_sequences=4)
    assert torch.equal(got, want)
    assert len(cache.sessions) == 4
    # Beams that were dropped gave their pages back.
    assert sum(not session.closed for session in pool.sessions) == 4
    cache.close()
    assert len(pool.free) == 256


def test_beams_over_a_left_padded_batch_give_the_same_tokens(llama: PreTrainedModel) -> None:
    inputs = prompt(19, 8)
    want = expected(llama, inputs, num_beams=2)
    assert torch.equal(greedy(llama, inputs, tiered(attach(llama), rows=2), num_beams=2), want)


def test_a_beam_that_keeps_its_row_keeps_its_session(llama: PreTrainedModel) -> None:
    attached, cache = attach(llama), None
    cache = tiered(attached, rows=3)
    llama(**prompt(6, 6, 6), **{CACHE: cache})
    before = list(cache.sessions)
    cache.reorder_cache(torch.tensor([2, 1, 1]))
    assert cache.sessions[1] is before[1]
    assert cache.sessions[0] is before[2]
    assert cache.sessions[2] not in before
    assert local_sessions(cache)[2].token_ids == local_sessions(cache)[1].token_ids
    assert before[0].closed


def test_a_batch_over_one_session_forks_its_prefix(llama: PreTrainedModel) -> None:
    """Three questions about one text: the text is computed once."""
    text, questions = prompt(40), prompt(7, 7, 7, seed=3)["input_ids"]
    whole = longer(
        {"input_ids": text["input_ids"].expand(3, -1), "attention_mask": torch.ones(3, 40)}, questions
    )
    want = expected(llama, whole)
    cache = tiered(attach(llama))
    llama(**text, **{CACHE: cache})
    assert torch.equal(greedy(llama, whole, cache), want)
    assert len(cache.sessions) == 3


def test_prompt_lookup_gives_the_same_tokens_and_commits_no_draft(llama: PreTrainedModel) -> None:
    inputs = prompt(12)
    inputs = {name: tensor.repeat(1, 4) for name, tensor in inputs.items()}
    want = expected(llama, inputs)
    cache = tiered(attach(llama))
    counts = count_forward_tokens(llama)
    assert torch.equal(greedy(llama, inputs, cache, prompt_lookup_num_tokens=4), want)
    assert sum(counts) > 48 + NEW - 1, "no draft was rejected: nothing was tested"
    session = local_sessions(cache)[0]
    # Every committed token is one that the model said; rejected drafts stayed tentative.
    assert session.token_ids == want[0, : session.horizon].tolist()
    assert session.cropped == 0


def test_cropping_committed_tokens_and_going_on_gives_the_same_tokens(model: PreTrainedModel) -> None:
    inputs = prompt(20, 13)
    want = expected(model, inputs)
    cache = tiered(attach(model), rows=2)
    more = longer(inputs, prompt(6, 6, seed=5)["input_ids"])
    # As generate counts them: padding has no position.
    model(**more, position_ids=more["attention_mask"].cumsum(-1).sub(1).clamp(min=0), **{CACHE: cache})
    cache.crop(-7)
    assert cache.get_seq_length() == 19
    assert [session.length for session in cache.sessions] == [19, 12]
    assert torch.equal(greedy(model, inputs, cache), want)


def test_cropping_into_the_padding_leaves_an_empty_row(llama: PreTrainedModel) -> None:
    inputs = prompt(20, 4)
    cache = tiered(attach(llama), rows=2)
    llama(**inputs, **{CACHE: cache})
    cache.crop(-10)
    assert [session.length for session in cache.sessions] == [10, 0]
    want = expected(llama, inputs)
    assert torch.equal(greedy(llama, inputs, cache), want)


def test_a_session_that_holds_tokens_is_continued_by_a_new_cache(llama: PreTrainedModel) -> None:
    inputs = prompt(30)
    want = expected(llama, inputs)
    cache = tiered(attach(llama))
    llama(**{name: tensor[:, :25] for name, tensor in inputs.items()}, **{CACHE: cache})
    counts = count_forward_tokens(llama)
    assert torch.equal(greedy(llama, inputs, TieredCache(cache.sessions[0])), want)
    assert sum(counts) == 5 + NEW - 1


def test_reset_forgets_everything_and_keeps_the_sessions(llama: PreTrainedModel) -> None:
    cache = tiered(attach(llama))
    greedy(llama, prompt(11, seed=7), cache)
    cache.reset()
    assert (cache.get_seq_length(), cache.sessions[0].length) == (0, 0)
    inputs = prompt(14)
    assert torch.equal(greedy(llama, inputs, cache), expected(llama, inputs))


def test_the_cache_works_under_its_older_argument_name(llama: PreTrainedModel) -> None:
    inputs = prompt(14)
    want = expected(llama, inputs, max_new_tokens=4)
    cache = tiered(attach(llama))
    got = llama.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(got, want)
    assert cache.get_seq_length() == 14 + 3


# Same logits ---------------------------------------------------------------------------------------------------------


def logits(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: Any, **options: Any
) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(**inputs, **{CACHE: cache}, **options).logits
    return out


@pytest.mark.parametrize("chunk", [256, 16])
def test_logits_of_every_real_token_are_the_same(model: PreTrainedModel, chunk: int) -> None:
    inputs = prompt(45, 29)
    want = logits(model, inputs, DynamicCache(config=model.config))
    got = logits(model, inputs, tiered(attach(model), rows=2, chunk_tokens=chunk))
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[real], want[real], atol=1e-4, rtol=0)


@pytest.mark.parametrize("keep", [1, 5, 20, torch.tensor([0, 17, 44])])
def test_slices_keep_the_logits_that_were_asked_for(llama: PreTrainedModel, keep: int | torch.Tensor) -> None:
    inputs = prompt(45)
    want = logits(llama, inputs, DynamicCache(), logits_to_keep=keep)
    got = logits(llama, inputs, tiered(attach(llama), chunk_tokens=16), logits_to_keep=keep)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_slices_return_hidden_states_of_every_token(llama: PreTrainedModel) -> None:
    inputs = prompt(45)
    want = llama(**inputs, output_hidden_states=True).hidden_states
    cache = tiered(attach(llama), chunk_tokens=16)
    got = llama(**inputs, **{CACHE: cache}, output_hidden_states=True).hidden_states
    assert len(got) == len(want) == 4
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_embeddings_in_slices_give_the_same_logits(llama: PreTrainedModel) -> None:
    inputs = prompt(45)
    embedded = {"inputs_embeds": llama.get_input_embeddings()(inputs["input_ids"])}
    want = logits(llama, inputs, DynamicCache())
    got = logits(llama, embedded, tiered(attach(llama), chunk_tokens=16))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_positional_arguments_and_tuples_work_in_slices(llama: PreTrainedModel) -> None:
    ids = prompt(45)["input_ids"]
    want = logits(llama, {"input_ids": ids}, DynamicCache())
    got = attach(llama).model(ids, None, None, tiered(attach(llama), chunk_tokens=16), return_dict=False)
    torch.testing.assert_close(got[0], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16])
def test_the_pool_has_its_own_dtype(
    llama: PreTrainedModel, model_dtype: torch.dtype, pool_dtype: Any
) -> None:
    llama.to(model_dtype)
    inputs = prompt(45)
    want = logits(llama, inputs, DynamicCache())
    pool = LocalPool(attach(llama).geometry(pool_dtype))
    got = logits(llama, inputs, TieredCache(pool.open(), chunk_tokens=16))
    assert got.dtype == model_dtype
    # bfloat16 keeps 8 bits: an error of 2**-8 a value, a few times that after three layers.
    exact = model_dtype == torch.float32 and pool_dtype == "float32"
    spread = float(want.float().std())
    assert float((got - want).float().abs().mean()) < (1e-5 if exact else 8 * 2**-8) * spread


# What the sessions are told ------------------------------------------------------------------------------------------


def test_commits_carry_token_ids_and_count_decode_steps(llama: PreTrainedModel) -> None:
    inputs = prompt(40, 7)
    cache = tiered(attach(llama), rows=2, chunk_tokens=16)
    tokens = greedy(llama, inputs, cache, max_new_tokens=6)
    first, second = local_sessions(cache)
    assert first.token_ids == tokens[0, :-1].tolist()
    assert second.token_ids == tokens[1, 33:-1].tolist()
    assert first.commits == [(13, 0), (13, 0), (14, 0)] + [(1, 1)] * 5
    assert (first.step, second.step) == (5, 5)


def eager_mass(model: PreTrainedModel, ids: torch.Tensor, queries: int) -> np.ndarray:
    """Attention probability of each token, mean over layers, heads and the last `queries` queries."""
    previous = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(ids, output_attentions=True).attentions
    model.set_attn_implementation(previous)
    return torch.stack(layers)[:, 0, :, -queries:].mean((0, 1, 2)).numpy()


def test_observations_are_the_attention_that_eager_computes(llama: PreTrainedModel) -> None:
    inputs = prompt(40)
    cache = tiered(attach(llama), chunk_tokens=20)
    tokens = greedy(llama, inputs, cache, max_new_tokens=10)
    (session,) = local_sessions(cache)
    # Each slice of the prompt, then every fourth decode step.
    assert [(step, len(mass)) for step, mass in session.observations] == [(0, 20), (0, 40), (4, 44), (8, 48)]
    for (_, mass), queries in zip(session.observations, (16, 16, 1, 1), strict=True):
        want = eager_mass(llama, tokens[:, : len(mass)], queries)
        np.testing.assert_allclose(mass, want, atol=1e-5)


def test_observations_of_a_padded_batch_are_each_rows_own(llama: PreTrainedModel) -> None:
    inputs = prompt(21, 12)
    cache = tiered(attach(llama), rows=2)
    tokens = greedy(llama, inputs, cache, max_new_tokens=5)
    for session, ids in zip(local_sessions(cache), (tokens[:1], tokens[1:, 9:]), strict=True):
        for (_, mass), queries in zip(session.observations, (min(16, ids.shape[1] - 5), 1), strict=True):
            np.testing.assert_allclose(mass, eager_mass(llama, ids[:, : len(mass)], queries), atol=1e-5)


class OnePageHidden(LocalSession):
    """The second page is in host memory: attention does not see it."""

    def rows(self, stop: int) -> Any:
        shown = super().rows(stop)
        return type(shown)(*(np.delete(column, slice(1, 2)) for column in shown))


def test_tokens_that_are_not_attended_are_observed_as_nan(llama: PreTrainedModel) -> None:
    pool = LocalPool(attach(llama).geometry("float32"))
    session = OnePageHidden(pool, 0)
    greedy(llama, prompt(40), TieredCache(session, chunk_tokens=40), max_new_tokens=6)
    (_, whole), (step, mass) = session.observations
    assert not np.isnan(whole).any(), "the prompt attended itself while it was new"
    assert step == 4
    assert np.flatnonzero(np.isnan(mass)).tolist() == list(range(16, 32))
    assert np.nansum(mass) == pytest.approx(1, abs=1e-5)


# What goes wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 9, 40])
def test_an_exception_in_forward_leaves_the_session_at_its_horizon(
    llama: PreTrainedModel, columns: int
) -> None:
    inputs = prompt(25 + columns)
    want = expected(llama, inputs)
    cache = tiered(attach(llama), chunk_tokens=20)
    llama(**{name: tensor[:, :25] for name, tensor in inputs.items()}, **{CACHE: cache})
    session = local_sessions(cache)[0]

    def explode(*_: Any) -> None:
        raise KeyboardInterrupt

    # After the first layers wrote their pages; in slices, during the first.
    hook = llama.model.layers[2].register_forward_hook(explode)
    with pytest.raises(KeyboardInterrupt):
        llama(inputs["input_ids"][:, 25:], **{CACHE: cache})
    hook.remove()
    assert (session.length, session.horizon, cache.get_seq_length()) == (25, 25, 25)
    assert not session.running
    assert torch.equal(greedy(llama, inputs, cache), want)


def test_a_row_that_gets_no_pages_rolls_the_others_back(llama: PreTrainedModel) -> None:
    pool = LocalPool(attach(llama).geometry("float32"), pages=5)
    cache = TieredCache([pool.open(), pool.open()], chunk_tokens=64)
    with pytest.raises(OutOfCapacity):
        llama(**prompt(40, 40), **{CACHE: cache})
    assert [session.length for session in cache.sessions] == [0, 0]
    assert len(pool.free) == 5
    llama(**prompt(32, 40 - 32), **{CACHE: cache})
    assert [session.horizon for session in cache.sessions] == [32, 8]


def test_a_mask_that_hides_cached_tokens_is_refused(llama: PreTrainedModel) -> None:
    cache = tiered(attach(llama))
    inputs = prompt(20)
    llama(**inputs, **{CACHE: cache})
    more = prompt(4, seed=3)["input_ids"]
    mask = torch.ones(1, 24, dtype=torch.long)
    mask[0, 3] = 0
    with pytest.raises(ValueError, match="hides or shows"):
        llama(more, attention_mask=mask, **{CACHE: cache})
    with pytest.raises(ValueError, match="2-D mask"):
        llama(more, attention_mask=torch.ones(1, 4), **{CACHE: cache})
    with pytest.raises(ValueError, match="2-D mask"):
        llama(more, attention_mask=torch.ones(1, 1, 4, 24), **{CACHE: cache})
    assert cache.sessions[0].length == 20


def test_a_batch_that_does_not_fit_the_sessions_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="3 rows does not fit a TieredCache of 2 sessions"):
        llama(**prompt(4, 4, 4), **{CACHE: tiered(attach(llama), rows=2)})


def test_a_loss_over_slices_is_refused(llama: PreTrainedModel) -> None:
    inputs = prompt(40)
    with pytest.raises(ValueError, match="labels"):
        llama(**inputs, labels=inputs["input_ids"], **{CACHE: tiered(attach(llama), chunk_tokens=16)})


def test_a_cache_on_a_model_that_is_not_attached_says_so(llama: PreTrainedModel) -> None:
    cache = tiered(attach(llama))
    attach(llama).detach()
    with pytest.raises(RuntimeError, match="attach"):
        llama(**prompt(4), **{CACHE: cache})


def test_pages_of_another_depth_are_refused(llama: PreTrainedModel) -> None:
    cache = tiered(attach(build("llama", num_hidden_layers=2)))
    attach(llama)
    with pytest.raises(GeometryMismatch, match="pages hold 2 layers, the model has 3"):
        llama(**prompt(4), **{CACHE: cache})


def test_sessions_of_two_clients_make_no_batch(llama: PreTrainedModel) -> None:
    pools = [LocalPool(attach(llama).geometry("float32"), pages=2) for _ in range(2)]
    with pytest.raises(ValueError, match="one client"):
        TieredCache([pool.open() for pool in pools])
    other = LocalPool(attach(llama).geometry("float16"), pages=2)
    with pytest.raises(GeometryMismatch, match="share a geometry"):
        TieredCache([pools[0].open(), other.open()])
    with pytest.raises(ValueError, match="at least one"):
        TieredCache([])


def test_one_cache_serves_one_model(llama: PreTrainedModel) -> None:
    cache = tiered(attach(llama))
    llama(**prompt(4), **{CACHE: cache})
    other = attach(build("llama")).model
    with pytest.raises(ValueError, match="another model"):
        other(**prompt(4), **{CACHE: cache})


# How much a forward takes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool_pages", "rows", "want"), [(1100, 1, 4096), (40, 1, 160), (40, 2, 80), (3, 1, 16)]
)
def test_a_slice_takes_a_quarter_of_the_pool_at_most(
    llama: PreTrainedModel, pool_pages: int, rows: int, want: int
) -> None:
    """Pages hold 16 tokens: a pool of 40 pages holds 640, a quarter is 160, shared by the rows; never below a page."""
    pool = LocalPool(attach(llama).geometry("float32"), pages=pool_pages)
    cache = TieredCache([pool.open() for _ in range(rows)])
    assert cache.slices(rows, want) == [(0, want)]
    assert max(stop - start for start, stop in cache.slices(rows, 3 * want)) == want


def test_slices_are_of_one_length_so_that_none_is_a_decode_step(llama: PreTrainedModel) -> None:
    counts = count_forward_tokens(llama)
    llama(**prompt(33), **{CACHE: tiered(attach(llama), chunk_tokens=16)})
    assert counts == [11, 11, 11]


def test_room_for_the_next_slice_is_asked_for_before_the_current_one_ends(llama: PreTrainedModel) -> None:
    """33 tokens in three slices of 11. `LocalSession.expect` itself requires that a step runs."""
    cache = tiered(attach(llama), chunk_tokens=16)
    llama(**prompt(33), **{CACHE: cache})
    assert local_sessions(cache)[0].expected == [(11, 11), (11, 22)]
    llama(prompt(4)["input_ids"], **{CACHE: cache})  # one slice: nobody knows what will follow
    assert len(local_sessions(cache)[0].expected) == 2


def test_a_row_whose_slice_holds_padding_asks_for_nothing_ahead(llama: PreTrainedModel) -> None:
    """Rows of 33 and 20 tokens in slices of 11: the second row's padding ends in its second slice."""
    cache = tiered(attach(llama), rows=2, chunk_tokens=16)
    llama(**prompt(33, 20), **{CACHE: cache})
    assert [session.expected for session in local_sessions(cache)] == [[(11, 11), (11, 22)], []]
