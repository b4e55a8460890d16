"""The scenarios are what the study says: of two sizes, with facts stated once, each variant in its own order."""

from __future__ import annotations

import re
from collections import Counter

import msgspec
import pytest

from tierkv.regions import Region
from tierkv.study.episodes import QUESTION
from tierkv.study.memdecay.scenarios import (
    CLOSING,
    OPENING,
    PROBED,
    STAGES,
    TIERS,
    TOKENS,
    VARIANTS,
    Episode,
    Scenario,
    Tier,
    build,
    episodes,
    load_scenarios,
    order,
)
from tierkv.study.model import load_tokenizer

SCENARIOS = load_scenarios()
QUOTED_WORDS = 12
"""The closing thoughts repeat at least that many words of an earlier block, as agents quote what they have read."""

each_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
each_tier = pytest.mark.parametrize("tier", TIERS)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def variants(scenario: Scenario, tier: Tier, tokenizer) -> list[Episode]:
    return [build(scenario, variant, tier, tokenizer) for variant in range(VARIANTS)]


def written(scenario: Scenario) -> str:
    """All that a scenario says in any variant or tier but its facts' values."""
    return " ".join(f"{block.text} {block.more}" for block in scenario.block)


def values(scenario: Scenario) -> list[str]:
    return [value for fact in scenario.facts.values() for value in fact.values]


def holding(scenario: Scenario) -> list[bool]:
    """Of each block: whether a fact stands in it."""
    return [any(f"{{{name}}}" in block.text for name in scenario.facts) for block in scenario.block]


def quoted(scenario: Scenario) -> list[int]:
    """The earlier blocks that the closing thoughts quote."""
    *earlier, closing = scenario.block
    thoughts = f"{closing.text} {closing.more}".split()
    spans = [" ".join(thoughts[at : at + QUOTED_WORDS]) for at in range(len(thoughts) - QUOTED_WORDS + 1)]
    texts = [" ".join(f"{block.text} {block.more}".split()) for block in earlier]
    return [i for i, text in enumerate(texts) if any(span in text for span in spans)]


def test_sixteen_scenarios_are_to_tune_on_and_eight_only_to_report_on():
    assert Counter(scenario.split for scenario in SCENARIOS) == {"dev": 16, "report": 8}
    assert {s.name for s in load_scenarios("dev")} | {s.name for s in load_scenarios("report")} == {
        s.name for s in SCENARIOS
    }
    assert len({s.name for s in SCENARIOS}) == len({s.title for s in SCENARIOS}) == 24


@each_scenario
def test_a_scenario_asks_for_one_fact_in_each_probed_region(scenario):
    assert set(scenario.facts) == {region.label for region in PROBED}
    assert {block.region for block in scenario.block} == {region.label for region in Region}


@each_scenario
def test_every_fact_has_three_values_and_no_two_facts_share_one(scenario):
    assert {len(fact.values) for fact in scenario.facts.values()} == {VARIANTS}
    assert len(set(values(scenario))) == VARIANTS * len(PROBED)
    assert all(re.fullmatch(r"\d{2,4}|[A-Z]?[a-z]+", value) for value in values(scenario))


@each_scenario
def test_a_value_stands_nowhere_but_where_its_fact_is_stated(scenario):
    text = written(scenario)
    for name, fact in scenario.facts.items():
        assert text.count(f"{{{name}}}") == text.count(f"{fact.probe} {{{name}}}") == 1
        assert text.count(fact.probe) == 1
    assert [value for value in values(scenario) if value in text] == []


@each_scenario
def test_a_fact_is_stated_in_both_tiers(scenario):
    for name in scenario.facts:
        assert [(b.region, b.long) for b in scenario.block if f"{{{name}}}" in b.text] == [(name, False)]


@each_scenario
@each_tier
def test_each_variant_orders_the_movable_parts_differently(scenario, tier):
    orders = [order(scenario, variant, tier) for variant in range(VARIANTS)]
    assert len({tuple(parts) for parts in orders}) == VARIANTS
    assert len({frozenset(parts) for parts in orders}) == 1
    assert {(parts[0], parts[-1], len(parts)) for parts in orders} == {(OPENING, CLOSING, STAGES[tier])}


@each_scenario
def test_a_plan_rests_on_movable_parts(scenario):
    (plan,) = [block for block in scenario.block if block.region == "plan"]
    assert plan.evidence
    assert set(plan.evidence) <= {block.part for block in scenario.block} - {OPENING, CLOSING}


def test_what_plans_rest_on_holds_every_fact_or_some_or_none():
    """So that keeping what a plan rests on is not the same as keeping the facts."""
    kinds = set()
    for scenario in load_scenarios("dev"):
        facts = {
            block.part
            for block, holds in zip(scenario.block, holding(scenario), strict=True)
            if holds and block.part != OPENING
        }
        (plan,) = [block for block in scenario.block if block.region == "plan"]
        kinds.add(
            "every" if facts <= set(plan.evidence) else "some" if facts & set(plan.evidence) else "none"
        )
    assert kinds == {"every", "some", "none"}


@each_scenario
def test_every_tool_result_names_its_call_and_one_call_at_most_is_answered_twice(scenario):
    asked = [block.text for block in scenario.block if block.region == "tool_in"]
    answered = [block.call for block in scenario.block if block.region == "tool_out"]
    assert all(f'"tool": "{call}"' in text for call, text in zip(answered, asked, strict=True))
    *once, most = sorted(Counter(answered).values())
    assert set(once) == {1}
    assert most in (1, 2)


def test_a_call_answered_twice_gives_the_fact_or_does_not_and_some_agents_make_none():
    kinds = set()
    for scenario in load_scenarios("dev"):
        answers = Counter(block.call for block in scenario.block if block.call)
        (fact,) = [
            block.call
            for block, holds in zip(scenario.block, holding(scenario), strict=True)
            if holds and block.call
        ]
        kinds.add("none" if max(answers.values()) == 1 else "fact" if answers[fact] == 2 else "no fact")
    assert kinds == {"none", "fact", "no fact"}


@each_scenario
def test_the_closing_thoughts_quote_an_earlier_block(scenario):
    closing = scenario.block[-1]
    assert (closing.part, closing.region) == (CLOSING, "scratchpad")
    assert quoted(scenario)


def test_some_closing_thoughts_quote_a_block_without_a_fact():
    """So that keeping what is looked at again is not the same as keeping the facts."""
    kinds = {holding(scenario)[at] for scenario in load_scenarios("dev") for at in quoted(scenario)}
    assert kinds == {True, False}


@pytest.mark.model
@each_tier
def test_every_variant_has_the_tokens_and_stages_of_its_tier(tier, tokenizer):
    least, most = TOKENS[tier]
    sizes = {e.name: len(e.tokens) for e in episodes(SCENARIOS, tier, tokenizer)}
    assert len(sizes) == VARIANTS * len(SCENARIOS)
    assert {name: size for name, size in sizes.items() if not least <= size <= most} == {}
    for episode in episodes(SCENARIOS, tier, tokenizer):
        assert len(episode.stages) == STAGES[tier]
        assert list(episode.stages) == sorted(set(episode.stages))
        assert episode.stages[-1] == len(episode.tokens)


@pytest.mark.model
@each_scenario
@each_tier
def test_blocks_lie_end_to_end_and_a_stage_ends_with_a_block(scenario, tier, tokenizer):
    for episode in variants(scenario, tier, tokenizer):
        assert [b.start for b in episode.blocks] == [0, *(b.stop for b in episode.blocks[:-1])]
        assert episode.blocks[-1].stop == len(episode.tokens)
        assert set(episode.stages) <= {b.stop for b in episode.blocks}


@pytest.mark.model
@each_scenario
@each_tier
def test_a_fact_stands_at_its_tokens_once_and_its_probe_leads_up_to_it(scenario, tier, tokenizer):
    for episode in variants(scenario, tier, tokenizer):
        words = Counter(re.findall(r"\w+", tokenizer.decode(episode.tokens)))
        assert {value: words[value] for value in values(scenario) if words[value]} == {
            fact.gold: 1 for fact in episode.facts
        }
        for fact in episode.facts:
            block = episode.blocks[fact.block]
            assert block.region == fact.region
            assert block.start < fact.start < fact.stop < block.stop
            assert tokenizer.decode(episode.tokens[fact.start : fact.stop]).strip() == fact.gold
            said = tokenizer.decode(episode.tokens[block.start : fact.stop])
            assert said.endswith(f"{fact.prompt.removeprefix(QUESTION)} {fact.gold}")


@pytest.mark.model
@each_scenario
def test_a_prompts_tokens_begin_those_of_prompt_and_answer(scenario, tokenizer):
    """So that greedy decoding can continue a prompt as the fact is stated."""
    for episode in variants(scenario, "short", tokenizer):
        for fact in episode.facts:
            alone = tokenizer(fact.prompt).input_ids
            assert tokenizer(f"{fact.prompt} {fact.gold}").input_ids[: len(alone)] == alone


def test_of_two_answers_to_a_call_either_may_give_the_fact():
    """So that neither the age of an answer nor its being superseded tells of a fact."""
    answers = [
        (s.name, b.call, any(f"{{{name}}}" in b.text for name in s.facts))
        for s in load_scenarios("dev")
        for b in s.block
        if b.call
    ]
    given: dict[tuple[str, str], list[bool]] = {}
    for scenario, call, fact in answers:
        given.setdefault((scenario, call), []).append(fact)
    assert {(True, False), (False, True), (False, False)} == {tuple(g) for g in given.values() if len(g) == 2}


@pytest.mark.model
@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        ("No limit is known.", "no block holds the fact system"),
        ("The limit is {system}, as was said: {user}.", "the fact user stands in more than one block"),
    ],
)
def test_a_scenario_whose_facts_are_lost_or_astray_is_refused(said, refusal, tokenizer):
    whole = SCENARIOS[0]
    first, *others = whole.block
    changed = msgspec.structs.replace(whole, block=[msgspec.structs.replace(first, text=said), *others])
    with pytest.raises(ValueError, match=refusal):
        build(changed, 0, "short", tokenizer)
