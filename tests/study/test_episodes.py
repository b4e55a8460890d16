"""The episodes are what the study says they are: long enough, labelled, with facts stated once and early."""

from __future__ import annotations

from collections import Counter

import pytest

from tierkv.regions import Region
from tierkv.study.episodes import (
    NAMES,
    PROBED,
    QUESTION,
    Episode,
    load_episode,
    load_episodes,
    recalled,
    settled,
    spans,
)
from tierkv.study.model import load_tokenizer

ENOUGH_TOKENS = 1_250

each_episode = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def stated_at(episode: Episode, statement: str, gold: str) -> tuple[int, str]:
    """Index of the block that says `statement gold`, and that block's text."""
    found = [(i, b.text) for i, b in enumerate(episode.blocks) if f"{statement} {gold}" in b.text]
    assert len(found) == 1, f"{statement!r} {gold!r} is in {len(found)} blocks"
    return found[0]


def test_six_episodes_ask_for_twenty_four_facts():
    episodes = load_episodes()
    assert [e.name for e in episodes] == list(NAMES)
    assert sum(len(e.probes) for e in episodes) == 24


@each_episode
def test_an_episode_has_every_region_and_one_fact_in_each_probed_one(name):
    episode = load_episode(name)
    assert {b.region for b in episode.blocks} == set(Region)
    assert Counter(p.region for p in episode.probes) == Counter(PROBED)
    assert 12 <= len(episode.blocks) <= 20


@each_episode
def test_a_fact_is_stated_once_in_its_region_and_in_the_words_of_its_probe(name):
    episode = load_episode(name)
    for probe in episode.probes:
        assert episode.text.count(probe.gold) == 1
        index, _ = stated_at(episode, probe.prompt.removeprefix(QUESTION), probe.gold)
        assert episode.blocks[index].region == probe.region


@each_episode
def test_facts_lie_well_before_the_end(name):
    episode = load_episode(name)
    for probe in episode.probes:
        assert episode.text.index(probe.gold) < 0.7 * len(episode.text)


@each_episode
def test_no_block_is_said_twice(name):
    sentences = [s.strip() for b in load_episode(name).blocks for s in b.text.split(". ") if len(s) > 20]
    assert len(set(sentences)) == len(sentences)


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (" 4750 euros.", "4750", True),
        ("\n4750", "4750", True),
        (' "Maxifort". Pla', "Maxifort", True),
        (" \u201cMaxifort\u201d", "Maxifort", True),
        (" '4750'", "4750", True),
        (" about 4750", "4750", False),
        (" 475", "4750", False),
        (' "not 4750"', "4750", False),
        ("", "4750", False),
    ],
)
def test_an_answer_is_right_when_it_starts_with_the_gold_quoted_or_not(answer, gold, right):
    assert recalled(answer, gold) is right


@pytest.mark.model
@each_episode
def test_an_episode_is_long_and_mostly_not_what_is_asked_for(name, tokenizer):
    tokens: Counter[Region] = Counter()
    for span in spans(load_episode(name), tokenizer):
        tokens[span.region] += len(span.tokens)
    assert tokens.total() >= ENOUGH_TOKENS
    forgettable = tokens[Region.SCRATCHPAD] + tokens[Region.TOOL_IN] + tokens[Region.PLAN]
    assert forgettable >= 0.25 * tokens.total()


@pytest.mark.model
@each_episode
def test_blocks_tokenized_alone_read_as_the_episode(name, tokenizer):
    episode = load_episode(name)
    tokens = [token for span in spans(episode, tokenizer) for token in span.tokens]
    assert tokenizer.decode(tokens) == episode.text


@pytest.mark.model
@each_episode
def test_a_gold_answer_begins_and_ends_at_token_borders(name, tokenizer):
    episode = load_episode(name)
    for probe in episode.probes:
        _, text = stated_at(episode, probe.prompt.removeprefix(QUESTION), probe.gold)
        start = text.index(f" {probe.gold}")
        borders = {
            edge for pair in tokenizer(text, return_offsets_mapping=True).offset_mapping for edge in pair
        }
        assert {start, start + 1 + len(probe.gold)} <= borders
        # The prompt's own tokens are a prefix of prompt and answer: greedy decoding can continue it as stated.
        alone = tokenizer(probe.prompt).input_ids
        assert tokenizer(f"{probe.prompt} {probe.gold}").input_ids[: len(alone)] == alone
        assert len(tokenizer(f" {probe.gold}").input_ids) <= 8


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("", False),
        (' "', False),
        (" Max", False),
        (" Maxifort", False),  # "Maxiforts" would be wrong
        (" Maxifort\n", True),
        (" Maxiforts", True),
        (" Min", True),
        (" \ufffd", False),  # the first of two tokens that may be a curly quotation mark
    ],
)
def test_an_answer_is_settled_when_nothing_that_follows_can_change_it(answer: str, expected: bool) -> None:
    assert settled(answer, "Maxifort") is expected
