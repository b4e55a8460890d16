"""Twenty-four scenarios of agents, each in three value variants and two lengths: the study's episodes.

A scenario is a list of blocks, each of one region, grouped into parts. The opening (system, plan, user) comes first
and the closing scratchpad last; the parts between them (tool exchanges, documents, follow-up turns) are movable and
each variant orders them differently. Four facts are planted, in a system, user, tool_out and retrieval block; a
variant gives each its own value. The short tier uses each block's `text`; the long tier adds `more` to it, and the
parts marked `long`. Every block is tokenized on its own, so a region's border is a token's border.

Sixteen scenarios (`split = "dev"`) are there to develop and tune on; eight (`"report"`) only to report on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from tierkv.regions import Region, parse_region
from tierkv.study.episodes import HEADINGS, QUESTION

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER = Path(__file__).parent / "scenarios"
PROBED = (Region.SYSTEM, Region.USER, Region.TOOL_OUT, Region.RETRIEVAL)
VARIANTS = 3
OPENING, CLOSING = "opening", "closing"

Tier = Literal["short", "long"]
TIERS: tuple[Tier, ...] = ("short", "long")
TOKENS: dict[Tier, tuple[int, int]] = {"short": (405, 507), "long": (1656, 1723)}
"""Tokens of an episode, least and most (the paper's tiers)."""

STAGES: dict[Tier, int] = {"short": 5, "long": 8}


class _Fact(msgspec.Struct, forbid_unknown_fields=True):
    probe: str
    values: list[str]


class _Block(msgspec.Struct, forbid_unknown_fields=True):
    part: str
    region: str
    text: str
    more: str = ""
    long: bool = False
    call: str = ""
    evidence: list[str] = []


class Scenario(msgspec.Struct, forbid_unknown_fields=True):
    """As it is written in its TOML file."""

    name: str
    title: str
    split: Literal["dev", "report"]
    facts: dict[str, _Fact]
    block: list[_Block]


class Block(NamedTuple):
    """The tokens of one block: `[start, stop)` of the episode."""

    part: str
    region: Region
    start: int
    stop: int
    call: str
    """Of a tool result: the call it answers. A later result of the same call supersedes an earlier one."""
    evidence: tuple[str, ...]
    """Of a plan: the parts it rests on."""


class Fact(NamedTuple):
    """`prompt` is to be continued with `gold`, whose value stands in block `block` at tokens `[start, stop)`."""

    region: Region
    prompt: str
    gold: str
    block: int
    start: int
    stop: int


class Episode(NamedTuple):
    """One variant of one scenario in one tier."""

    scenario: str
    variant: int
    tier: Tier
    tokens: list[int]
    blocks: tuple[Block, ...]
    stages: tuple[int, ...]  # tokens up to which each stage reaches
    facts: tuple[Fact, ...]

    @property
    def name(self) -> str:
        return f"{self.scenario}-{self.variant}-{self.tier}"


def load_scenarios(split: Literal["dev", "report"] | None = None) -> tuple[Scenario, ...]:
    """Every scenario, or those of one split, by name."""
    read = (msgspec.toml.decode(f.read_bytes(), type=Scenario) for f in sorted(FOLDER.glob("*.toml")))
    return tuple(scenario for scenario in read if split in (None, scenario.split))


def episodes(
    scenarios: Sequence[Scenario], tier: Tier, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Episode]:
    """Every variant of each scenario."""
    for scenario in scenarios:
        for variant in range(VARIANTS):
            yield build(scenario, variant, tier, tokenizer)


def order(scenario: Scenario, variant: int, tier: Tier) -> list[str]:
    """The parts of an episode, first to last: the movable ones rotate by a third of their number a variant."""
    used = [block for block in scenario.block if tier == "long" or not block.long]
    parts = list(dict.fromkeys(block.part for block in used))
    movable = [part for part in parts if part not in (OPENING, CLOSING)]
    turn = variant * len(movable) // VARIANTS
    return [OPENING, *movable[turn:], *movable[:turn], CLOSING]


def build(scenario: Scenario, variant: int, tier: Tier, tokenizer: PreTrainedTokenizerBase) -> Episode:
    """The tokens of an episode, and where its blocks, stages and facts are.

    Raises:
        ValueError: a fact's value does not stand in exactly one block of the fact's region.
    """
    values = {region: fact.values[variant] for region, fact in scenario.facts.items()}
    tokens: list[int] = []
    blocks: list[Block] = []
    stages: list[int] = []
    found: dict[str, tuple[int, int, int]] = {}
    for part in order(scenario, variant, tier):
        for written in scenario.block:
            if written.part != part or (written.long and tier == "short"):
                continue
            region = parse_region(written.region)
            template = written.text.strip() + (
                f" {written.more.strip()}" if tier == "long" and written.more else ""
            )
            body = template
            for name, value in values.items():
                body = body.replace(f"{{{name}}}", value)
            text = f"{HEADINGS[region]}\n{body}\n\n"
            coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            begin = len(tokens)
            for name, value in values.items():
                if f"{{{name}}}" in template:
                    if name in found or region.label != name:
                        raise ValueError(f"{scenario.name}: the fact {name} stands in more than one block")
                    at = text.index(value)
                    inside = [
                        i for i, (a, b) in enumerate(coded.offset_mapping) if a < at + len(value) and b > at
                    ]
                    found[name] = (len(blocks), begin + inside[0], begin + inside[-1] + 1)
            tokens += coded.input_ids
            blocks.append(
                Block(written.part, region, begin, len(tokens), written.call, tuple(written.evidence))
            )
        stages.append(len(tokens))
    if missing := set(values) - set(found):
        raise ValueError(f"{scenario.name}: no block holds the fact {', '.join(sorted(missing))}")
    facts = tuple(
        Fact(parse_region(name), QUESTION + scenario.facts[name].probe, value, *found[name])
        for name, value in values.items()
    )
    return Episode(scenario.name, variant, tier, tokens, tuple(blocks), tuple(stages), facts)
