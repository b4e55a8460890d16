"""A cache that is given markers labels what nobody labelled, however its rows are run, dropped, copied and cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.tierkv.local_session import LocalPool, LocalSession
from tests.tierkv.tiny_models import CACHE, NEW, build, greedy, local_sessions, longer, prompt, tiered
from tierkv.errors import OutOfCapacity
from tierkv.markers import Marker, Markers
from tierkv.model import attach
from tierkv.regions import Region
from tierkv.transformers_cache import TieredCache

BY_REST = {1: Region.SYSTEM, 2: Region.TOOL_OUT, 3: Region.SCRATCHPAD}
"""Every token opens a message of the region of its number's rest by four, but those without rest: these are inside."""

MARKERS = Markers(Marker((token,), BY_REST[token % 4]) for token in range(97) if token % 4)
INSIDE = [4, 8, 12, 16, 20]
"""How each prompt begins: so the first message has more tokens than would join the one after it."""


def by_definition(token_ids: list[int]) -> list[Region]:
    region, found = Region.USER, []
    for token in token_ids:
        region = BY_REST.get(token % 4, region)
        found.append(region)
    return found


def held(session: LocalSession) -> list[Region]:
    return [page.region for page in session.pages for _ in range(page.count)]


def assert_marked(cache: TieredCache) -> None:
    for session in local_sessions(cache):
        assert len(set(held(session))) > 2, "too few regions to prove anything"
        assert held(session) == by_definition(session.token_ids)


def inputs(*lengths: int) -> dict[str, torch.Tensor]:
    made = prompt(*lengths)
    for row, length in enumerate(lengths):
        start = max(lengths) - length
        made["input_ids"][row, start : start + len(INSIDE)] = torch.tensor(INSIDE)
    return made


@pytest.fixture
def llama() -> PreTrainedModel:
    model = build("llama")
    attach(model)
    return model


def marked(model: PreTrainedModel, rows: int = 1, **options: Any) -> TieredCache:
    return tiered(attach(model), rows=rows, markers=MARKERS, **options)


@pytest.mark.parametrize("chunk", [256, 16])
def test_prompts_and_answers_of_a_padded_batch_have_the_regions_of_their_messages(
    llama: PreTrainedModel, chunk: int
) -> None:
    cache = marked(llama, rows=2, chunk_tokens=chunk)
    greedy(llama, inputs(70, 41), cache)
    assert [session.length for session in cache.sessions] == [70 + NEW - 1, 41 + NEW - 1]
    assert_marked(cache)


def test_the_next_turn_goes_on_where_the_answer_ended(llama: PreTrainedModel) -> None:
    cache = marked(llama)
    first = inputs(30)
    said = greedy(llama, first, cache)
    greedy(
        llama,
        longer({"input_ids": said, "attention_mask": first["attention_mask"]}, prompt(20)["input_ids"]),
        cache,
    )
    assert cache.sessions[0].length == 30 + NEW + 20 + NEW - 1
    assert_marked(cache)


def test_beams_have_the_regions_of_what_each_of_them_said(llama: PreTrainedModel) -> None:
    cache = marked(llama)
    greedy(llama, inputs(30), cache, num_beams=4, num_return_sequences=4)
    assert len(cache.sessions) == 4
    assert_marked(cache)


def test_tokens_of_a_rejected_draft_open_nothing(llama: PreTrainedModel) -> None:
    cache = marked(llama)
    greedy(llama, inputs(40), cache, assistant_model=build("llama", num_hidden_layers=1))
    assert_marked(cache)


def test_what_is_cropped_is_forgotten(llama: PreTrainedModel) -> None:
    cache = marked(llama)
    ids = torch.tensor([[*INSIDE, 5, 9, 4, 4, 4, 6, 4, 4]])
    llama(input_ids=ids, **{CACHE: cache})
    cache.crop(-3)  # the message that 6 opened
    llama(input_ids=torch.tensor([[4, 4, 7]]), **{CACHE: cache})
    assert_marked(cache)
    cache.reset()
    llama(input_ids=ids[:, :5], **{CACHE: cache})
    assert held(local_sessions(cache)[0]) == [Region.USER] * 5


def test_labels_win(llama: PreTrainedModel) -> None:
    cache = marked(llama)
    session = local_sessions(cache)[0]
    session.label("plan", 8)
    llama(input_ids=torch.tensor([[*INSIDE, 5, 9, 4, 4, 4, 6, 4, 4]]), **{CACHE: cache})
    assert held(session) == [Region.PLAN] * 8 + [Region.SYSTEM] * 2 + [Region.TOOL_OUT] * 3


def test_a_forward_that_failed_has_opened_nothing(llama: PreTrainedModel) -> None:
    attached = attach(llama)
    pool = LocalPool(attached.geometry("float32"), pages=16)
    cache = TieredCache([pool.open(), pool.open()], markers=MARKERS, chunk_tokens=256)
    taken, pool.free = pool.free[:10], pool.free[10:]
    ids = inputs(30, 30)["input_ids"]
    with pytest.raises(OutOfCapacity):
        llama(input_ids=ids, **{CACHE: cache})
    pool.free += taken
    first = ids[:, :12].clone()
    first[:, 5:] = torch.tensor([4, 4, 4, 4, 4, 4, 4])  # inside of whatever the failed one opened
    llama(input_ids=first, **{CACHE: cache})
    assert [held(session) for session in local_sessions(cache)] == [[Region.USER] * 12] * 2


def test_tokens_without_ids_go_on_with_the_message(llama: PreTrainedModel) -> None:
    cache = marked(llama)
    llama(input_ids=torch.tensor([[*INSIDE, 6, 4]]), **{CACHE: cache})
    embeds = llama.get_input_embeddings()(torch.tensor([[5, 7, 9]]))
    llama(inputs_embeds=embeds, **{CACHE: cache})
    assert held(local_sessions(cache)[0]) == [Region.USER] * 5 + [Region.TOOL_OUT] * 5


def test_a_cache_over_tokens_it_did_not_see_waits_for_the_next_marker(llama: PreTrainedModel) -> None:
    before = marked(llama)
    llama(input_ids=torch.tensor([[*INSIDE, 6, 4]]), **{CACHE: before})
    cache = TieredCache(before.sessions, markers=MARKERS)
    llama(input_ids=torch.tensor([[4, 4, 5, 4]]), **{CACHE: cache})
    regions = held(local_sessions(cache)[0])[7:]
    assert regions == [Region.USER] * 2 + [Region.SYSTEM] * 2
