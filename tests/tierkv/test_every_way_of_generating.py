"""Every way of generating, for every architecture, says over pages what it says over transformers' own cache."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from tests.tierkv.local_session import LocalPool
from tests.tierkv.tiny_models import CACHE, build, count_forward_tokens
from tests.tierkv.ways import NEW, SEED, WAYS, Way, attached, generate, wanted
from tierkv.model import attach
from tierkv.transformers_cache import TieredCache

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "qwen2-windows", "gemma2-uncapped"]
PAGES = 256


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_the_tokens_are_the_same_and_every_page_comes_back(way: Way, name: str) -> None:
    pool = LocalPool(attached(name).geometry("float32"), PAGES)
    cache = TieredCache([pool.open() for _ in way.lengths], chunk_tokens=way.chunk_tokens)
    assert torch.equal(generate(way, name, attached(name).model, cache), wanted(way, name))
    cache.close()
    assert len(pool.free) == PAGES
    assert all(session.closed for session in pool.sessions)


# Were a way not what it says, the matrix would prove nothing. ---------------------------------------------------------


def named(name: str) -> Way:
    return next(way for way in WAYS if way.name == name)


def tails(way: str, name: str) -> list[list[int]]:
    """What each row says after the prompt."""
    tokens = wanted(named(way), name)
    return tokens[:, named(way).inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_model_says_one_thing_only(name: str) -> None:
    (greedy,) = tails("greedy", name)
    assert len(greedy) == NEW and len(set(greedy)) > NEW // 2
    beams = tails("four beams, three returned", name)
    samples = tails("three samples", name)
    assert len({tuple(tail) for tail in beams + samples}) == 6
    assert len({tuple(tail) for tail in tails("two samples of each row", name)}) == 4


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_that_end_are_padded_and_others_go_on(name: str) -> None:
    first, *_, last = tails("rows that end one by one", name)
    assert len(last) == NEW and 0 not in first[:4] and first[-4:] == [0] * 4 != last[-4:]
    assert len(tails("a stop string", name)[0]) == NEW // 2 + 1
    *others, last = tails("a stop string in one row", name)
    assert last[NEW // 2 + 1 :] == [0] * (NEW - NEW // 2 - 1)
    assert any(row[-1] != 0 for row in others)
    assert len(tails("an assistant and an end of text", name)[0]) < NEW


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("way", ["an assistant", "an assistant, sampled"])
def test_some_drafts_are_right_and_some_wrong(way: str, name: str) -> None:
    """A forward says one token more than it accepts: fewer forwards than tokens mean that drafts were right."""
    counts = count_forward_tokens(attached(name).model)
    cache = TieredCache(LocalPool(attached(name).geometry("float32"), PAGES).open())
    tokens = generate(named(way), name, attached(name).model, cache)
    fed = named(way).inputs["input_ids"].shape[1]
    assert len(counts) < NEW
    assert sum(counts) > cache.sessions[0].horizon == fed + NEW - 1 == tokens.shape[1] - 1


def test_some_lookups_are_right() -> None:
    counts = [count_forward_tokens(attached(name).model) for name in ARCHITECTURES]
    for name in ARCHITECTURES:
        cache = TieredCache(LocalPool(attached(name).geometry("float32"), PAGES).open())
        generate(named("prompt lookup"), name, attached(name).model, cache)
    assert sum(map(len, counts)) < NEW * len(ARCHITECTURES)


def test_the_assistant_keeps_transformers_own_cache() -> None:
    """A TieredCache is the target's: the assistant drafts over a DynamicCache of its own, attached or not."""
    way, seen = named("an assistant"), []
    helper = attach(build("llama"))
    hook = helper.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(type(kwargs[CACHE])), with_kwargs=True
    )
    pool = LocalPool(attached("llama").geometry("float32"), PAGES)
    torch.manual_seed(SEED)
    tokens = attached("llama").model.generate(
        **way.inputs, **{CACHE: TieredCache(pool.open())}, max_new_tokens=NEW, assistant_model=helper.model
    )
    hook.remove()
    assert torch.equal(tokens, wanted(named("greedy"), "llama"))
    assert set(seen) == {DynamicCache}
    assert len(pool.sessions) == 1
