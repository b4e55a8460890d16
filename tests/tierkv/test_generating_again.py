"""After a way of generating: another turn, another way, the same again. Right, or refused with nothing lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from tests.tierkv.local_session import LocalPool, LocalSession
from tests.tierkv.tiny_models import (
    CACHE,
    NEW,
    build,
    expected,
    greedy,
    local_sessions,
    longer,
    prompt,
    tiered,
)
from tests.tierkv.ways import Inputs, attached, plain, sampled
from tierkv.errors import OutOfCapacity
from tierkv.model import attach
from tierkv.transformers_cache import TieredCache

WITHOUT_WINDOWS = ["llama", "qwen2", "qwen3", "mistral"]
ARCHITECTURES = [*WITHOUT_WINDOWS, "qwen2-windows", "gemma2-uncapped"]
LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 4}


@pytest.fixture
def llama() -> PreTrainedModel:
    return attach(build("llama")).model


def open_sessions(pool: LocalPool) -> list[LocalSession]:
    return [session for session in pool.sessions if not session.closed]


def held(cache: TieredCache) -> Inputs:
    """The texts that the rows of a cache hold. After beams these are some that ran, in no promised order."""
    ids = torch.tensor([session.token_ids for session in local_sessions(cache)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# Another turn --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_second_turn_goes_on_from_every_beam(name: str) -> None:
    cache = tiered(attached(name))
    greedy(attached(name).model, prompt(19), cache, num_beams=4)
    second = longer(held(cache), prompt(9, 9, 9, 9, seed=2)["input_ids"])
    assert len({tuple(row) for row in second["input_ids"][:, 19:-9].tolist()}) > 1
    assert torch.equal(greedy(attached(name).model, second, cache), expected(plain(name), second))


@pytest.mark.parametrize("name", WITHOUT_WINDOWS)
def test_a_second_turn_after_the_best_beam_goes_on_from_the_prompt(name: str) -> None:
    """transformers does not say which beam a row holds, and the best one may be gone; the prompt is in every row."""
    model, cache = attached(name).model, tiered(attached(name))
    best = greedy(model, prompt(19), cache, num_beams=4)
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(19 - cache.get_seq_length())
    second = longer({"input_ids": best, "attention_mask": torch.ones(1, 19)}, prompt(7, seed=4)["input_ids"])
    assert torch.equal(greedy(model, second, cache), expected(plain(name), second))
    assert open_sessions(local_sessions(cache)[0]._pool) == cache.sessions


@pytest.mark.parametrize("name", WITHOUT_WINDOWS)
def test_the_beam_that_survives_is_sampled_from(name: str) -> None:
    model, cache = attached(name).model, tiered(attached(name))
    greedy(model, prompt(19), cache, num_beams=4)
    kept = local_sessions(cache)[2]
    cache.batch_select_indices(torch.tensor([2]))
    assert cache.sessions == [kept]
    second = longer(held(cache), prompt(7, seed=4)["input_ids"])
    want = sampled(plain(name), second, DynamicCache(config=plain(name).config), 2)
    cache = TieredCache(kept)
    assert torch.equal(sampled(model, second, cache, 2), want)
    assert len(cache.sessions) == 2 == len(open_sessions(kept._pool))


@pytest.mark.parametrize("name", ["llama", "qwen2-windows", "gemma2-uncapped"])
@pytest.mark.parametrize("first", [LOOKUP, {}], ids=["after lookup", "after greedy"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole text", "new text"])
def test_prompt_lookup_goes_on_with_a_session(name: str, first: dict[str, Any], whole: bool) -> None:
    """Given the whole text, transformers feeds it on top of what its own cache holds, and answers wrongly."""
    model, cache = attached(name).model, tiered(attached(name))
    inputs = {key: tensor.repeat(1, 4) for key, tensor in prompt(12).items()}
    said = greedy(model, inputs, cache, **first)
    second = longer(inputs | {"input_ids": said}, prompt(12)["input_ids"])
    want = expected(plain(name), second)[:, -NEW:]
    if not whole:
        second["input_ids"] = second["input_ids"][:, cache.get_seq_length() :]
    assert torch.equal(greedy(model, second, cache, **LOOKUP)[:, -NEW:], want)
    (session,) = local_sessions(cache)
    assert session.horizon == session.length == second["attention_mask"].shape[1] + NEW - 1


def test_prompt_lookup_goes_on_with_a_padded_session(llama: PreTrainedModel) -> None:
    inputs = {name: torch.nn.functional.pad(tensor, (5, 0)) for name, tensor in prompt(30).items()}
    cache = tiered(attach(llama))
    second = longer(inputs | {"input_ids": greedy(llama, inputs, cache)}, prompt(12)["input_ids"])
    assert torch.equal(greedy(llama, second, cache, **LOOKUP), expected(plain("llama"), second))


@pytest.mark.parametrize("new", [1, 2, 8])
def test_generating_without_drafts_after_drafts_leaves_nothing_tentative(
    llama: PreTrainedModel, new: int
) -> None:
    inputs = {name: tensor.repeat(1, 4) for name, tensor in prompt(12).items()}
    cache = tiered(attach(llama))
    said = greedy(llama, inputs, cache, **LOOKUP)
    second = longer(inputs | {"input_ids": said}, prompt(9, seed=2)["input_ids"])
    want = expected(plain("llama"), second, max_new_tokens=new)
    assert torch.equal(greedy(llama, second, cache, max_new_tokens=new), want)
    (session,) = local_sessions(cache)
    if new == 1:  # one call: nothing told the cache that no crop would follow
        with pytest.raises(ValueError, match="tentative"):
            TieredCache(session)
        cache.crop(0)
    assert session.horizon == session.length == second["input_ids"].shape[1] + new - 1
    third = longer(second | {"input_ids": want}, prompt(5, seed=3)["input_ids"])
    assert torch.equal(greedy(llama, third, TieredCache(session)), expected(plain("llama"), third))


def test_a_session_that_holds_tokens_is_sampled_in_three_ways(llama: PreTrainedModel) -> None:
    inputs = prompt(30)
    cache = tiered(attach(llama))
    llama(**{name: tensor[:, :25] for name, tensor in inputs.items()}, **{CACHE: cache})
    want = sampled(plain("llama"), inputs, DynamicCache(), 3)
    assert torch.equal(sampled(llama, inputs, cache, 3), want)


@pytest.mark.parametrize("name", ["qwen2-windows", "gemma2-uncapped"])
def test_a_first_turn_with_windows_is_searched_with_beams(name: str) -> None:
    model, cache = attached(name).model, tiered(attached(name))
    second = longer(
        prompt(19) | {"input_ids": greedy(model, prompt(19), cache)}, prompt(5, seed=8)["input_ids"]
    )
    assert torch.equal(greedy(model, second, cache, num_beams=4), expected(plain(name), second, num_beams=4))


def test_sessions_of_two_lengths_make_one_batch(llama: PreTrainedModel) -> None:
    """Two chats of their own, whose next turns are answered together: the shorter one is padded on the left."""
    inputs = prompt(26, 18)
    pool = LocalPool(attach(llama).geometry("float32"))
    sessions = [pool.open(), pool.open()]
    for row, session, stop in zip(range(2), sessions, (20, 12), strict=True):
        ids = inputs["input_ids"][row : row + 1, inputs["attention_mask"][row] == 1]
        llama(ids[:, :stop], **{CACHE: TieredCache(session)})
    assert torch.equal(greedy(llama, inputs, TieredCache(sessions)), expected(plain("llama"), inputs))


# What transformers answers wrongly -----------------------------------------------------------------------------------


def after_a_refusal(model: PreTrainedModel, cache: TieredCache, first: Inputs, said: torch.Tensor) -> None:
    """Nothing was lost: the next turn is as if nobody had tried."""
    second = longer(first | {"input_ids": said}, prompt(*[9] * len(said), seed=2)["input_ids"])
    assert torch.equal(greedy(model, second, cache), expected(plain("llama"), second))


@pytest.mark.parametrize("rows", [1, 2])
def test_the_same_prompt_again_is_refused(llama: PreTrainedModel, rows: int) -> None:
    """transformers would go on after the first answer with a part of the prompt."""
    inputs = prompt(30, 21) if rows == 2 else prompt(30)
    cache = tiered(attach(llama), rows=rows)
    said = greedy(llama, inputs, cache)
    with pytest.raises(ValueError, match=r"position_ids start below|attention_mask is"):
        greedy(llama, inputs, cache)
    after_a_refusal(llama, cache, inputs, said)
    cache.reset()
    assert torch.equal(greedy(llama, inputs, cache), said)


@pytest.mark.parametrize("lengths", [(30,), (30, 21)])
def test_a_cache_that_is_not_to_be_used_is_refused(llama: PreTrainedModel, lengths: tuple[int, ...]) -> None:
    """transformers would feed the whole text again at every token, on top of what the cache holds."""
    inputs = prompt(*lengths)
    cache = tiered(attach(llama), rows=len(lengths))
    said = greedy(llama, inputs, cache)
    with pytest.raises(ValueError, match="use_cache=False"):
        greedy(llama, inputs, tiered(attach(llama), rows=len(lengths)), use_cache=False)
    with pytest.raises(ValueError, match="use_cache=False"):
        greedy(llama, longer(inputs, said[:, -5:]), cache, use_cache=False)
    after_a_refusal(llama, cache, inputs, said)


def test_padding_on_the_right_is_refused_where_its_logits_count(llama: PreTrainedModel) -> None:
    inputs = prompt(20, 20)
    inputs["attention_mask"][1, 12:] = 0
    cache = tiered(attach(llama), rows=2, chunk_tokens=8)
    with pytest.raises(ValueError, match="pad on the left"):
        greedy(llama, inputs, cache)
    assert [session.length for session in cache.sessions] == [0, 0]
    # Someone who reads the logits of each row's last token may pad on the right.
    with torch.no_grad():
        got, want = (model(**inputs, **{CACHE: c}).logits for model, c in
                     ((llama, cache), (plain("llama"), DynamicCache())))  # fmt: skip
    torch.testing.assert_close(got[1, :12], want[1, :12], atol=1e-4, rtol=0)


def test_padding_that_nobody_masks_is_refused(llama: PreTrainedModel) -> None:
    """transformers would attend to it."""
    inputs = prompt(20, 12)
    cache = tiered(attach(llama), rows=2)
    said = greedy(llama, inputs, cache)
    for columns in (1, 4):
        with pytest.raises(ValueError, match="hold padding"):
            llama(prompt(columns, columns, seed=3)["input_ids"], **{CACHE: cache})
    after_a_refusal(llama, cache, inputs, said)


def test_a_row_that_ended_cannot_hide_its_padding_later(llama: PreTrainedModel) -> None:
    """Rows that ended are fed padding as tokens. A mask that hides it later is refused, one that shows it is right."""
    inputs = prompt(30, 12)
    end = int(expected(plain("llama"), inputs)[0, 30 + 5])
    cache = tiered(attach(llama), rows=2)
    said = greedy(llama, inputs, cache, eos_token_id=end)
    assert said[0, -1] == 0
    second = longer(inputs | {"input_ids": said}, prompt(9, 9, seed=2)["input_ids"])
    hiding = second["attention_mask"].clone()
    hiding[0, 30 + 6 : said.shape[1]] = 0
    with pytest.raises(ValueError, match="hides or shows"):
        greedy(llama, second | {"attention_mask": hiding}, cache)
    after_a_refusal(llama, cache, inputs, said)


# What transformers refuses -------------------------------------------------------------------------------------------

MOVED_OUT = {
    "group beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "constrained beams": {"num_beams": 3, "force_words_ids": [[4]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "DoLa": {"dola_layers": "low"},
}
"""Ways that transformers moved out of its tree, to code that it would download."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{name: (options, "trust_remote_code") for name, options in MOVED_OUT.items()},
    "beams one after another": ({"num_beams": 2, "low_memory": True}, "low_memory"),
    "no room to generate": ({"max_length": 10, "max_new_tokens": None}, "max_length"),
    "drafts for a batch": (LOOKUP, "batch_size = 1"),
    "another cache": ({"cache_implementation": "static"}, "cache_implementation"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_transformers_refuses_leaves_the_sessions_as_they_were(llama: PreTrainedModel, way: str) -> None:
    options, message = REFUSED[way]
    inputs = prompt(30, 21)
    cache = tiered(attach(llama), rows=2)
    said = greedy(llama, inputs, cache)
    with pytest.raises(ValueError, match=message):
        greedy(llama, prompt(60, 40), cache, **options)
    after_a_refusal(llama, cache, inputs, said)


# No room for the forks -----------------------------------------------------------------------------------------------


def test_a_fork_that_gets_no_pages_leaves_no_other_fork_behind(llama: PreTrainedModel) -> None:
    """20 tokens are two pages; four of five beams' forks would need eight more, and six are there."""
    pool = LocalPool(attach(llama).geometry("float32"), pages=8)
    cache = TieredCache(pool.open())
    llama(**prompt(20), **{CACHE: cache})
    second = longer(prompt(20), prompt(4, seed=3)["input_ids"])
    with pytest.raises(OutOfCapacity):
        greedy(llama, second, cache, num_beams=5)
    assert open_sessions(pool) == cache.sessions
    assert len(pool.free) == 6
    assert torch.equal(greedy(llama, second, cache), expected(plain("llama"), second))


def test_beams_whose_tokens_get_no_pages_leave_the_rows_as_they_were(llama: PreTrainedModel) -> None:
    """Two beams fit their two pages each, and the two more of 20 new tokens fit only one of them."""
    pool = LocalPool(attach(llama).geometry("float32"), pages=6)
    cache = TieredCache(pool.open(), chunk_tokens=64)
    llama(**prompt(32), **{CACHE: cache})
    kept = list(cache.sessions)
    second = longer(prompt(32), prompt(20, seed=3)["input_ids"])
    with pytest.raises(OutOfCapacity):
        greedy(llama, second, cache, num_beams=2)
    assert open_sessions(pool) == cache.sessions == kept
    assert torch.equal(
        greedy(llama, second, cache, max_new_tokens=9), expected(plain("llama"), second, max_new_tokens=9)
    )


def test_a_mask_that_does_not_fit_forks_nothing(llama: PreTrainedModel) -> None:
    cache = tiered(attach(llama))
    llama(**prompt(20), **{CACHE: cache})
    with pytest.raises(ValueError, match="2-D mask"):
        llama(prompt(4, 4, seed=3)["input_ids"], attention_mask=torch.ones(2, 4), **{CACHE: cache})
    assert len(cache.sessions) == 1
