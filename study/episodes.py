"""Agent episodes: what an agent's context looks like, block by block, with facts planted in it and probes for them.

An episode is an ordered list of blocks, each of one region, and four probes: a fact stated once in a system, user,
tool_out and retrieval block well before the end, asked for at the end in the words in which it was stated. The texts
lie in `scenarios/*.toml`. Every block is tokenized on its own, so a region's border is a token's border.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tierkv.regions import Region, parse_region

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCENARIOS = Path(__file__).parent / "scenarios"
NAMES = ("ferry", "greenhouse", "museum", "outage", "expedition", "bridge")
PROBED = (Region.SYSTEM, Region.USER, Region.TOOL_OUT, Region.RETRIEVAL)

HEADINGS = {
    Region.SYSTEM: "Instructions:",
    Region.PLAN: "Plan:",
    Region.USER: "User:",
    Region.TOOL_IN: "Tool call:",
    Region.TOOL_OUT: "Tool result:",
    Region.RETRIEVAL: "Document:",
    Region.SCRATCHPAD: "Thoughts:",
}
QUESTION = "Facts to remember:\n"  # opens the text of each probe
BEFORE_GOLD = " \t\r\n\"'\u201c\u201d\u2018\u2019"
"""What may stand before the gold in an answer: blanks and quotation marks, straight and curly."""


class _Block(msgspec.Struct, forbid_unknown_fields=True):
    region: str
    text: str


class _Probe(msgspec.Struct, forbid_unknown_fields=True):
    region: str
    prompt: str
    gold: str


class _Scenario(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    title: str
    block: list[_Block]
    probe: list[_Probe]


class Block(NamedTuple):
    region: Region
    text: str


class Probe(NamedTuple):
    """`prompt` is to be continued; the answer is right when it names `gold` first. `region` is where the fact is."""

    region: Region
    prompt: str
    gold: str


class Episode(NamedTuple):
    name: str
    title: str
    blocks: tuple[Block, ...]
    probes: tuple[Probe, ...]

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.blocks)


class Span(NamedTuple):
    """The tokens of one block."""

    region: Region
    tokens: list[int]


def load_episode(name: str) -> Episode:
    scenario = msgspec.toml.decode((SCENARIOS / f"{name}.toml").read_bytes(), type=_Scenario)
    blocks = tuple(
        Block(region := parse_region(b.region), f"{HEADINGS[region]}\n{b.text.strip()}\n\n")
        for b in scenario.block
    )
    probes = tuple(Probe(parse_region(p.region), QUESTION + p.prompt, p.gold) for p in scenario.probe)
    return Episode(scenario.name, scenario.title, blocks, probes)


def load_episodes() -> tuple[Episode, ...]:
    """All six, in the order of `NAMES`."""
    return tuple(load_episode(name) for name in NAMES)


def spans(episode: Episode, tokenizer: PreTrainedTokenizerBase) -> list[Span]:
    """One span a block, in order; their tokens, chained, are the episode's context."""
    return [Span(b.region, tokenizer(b.text, add_special_tokens=False).input_ids) for b in episode.blocks]


def recalled(answer: str, gold: str) -> bool:
    """Whether a greedy completion names the fact: it starts with the gold answer and then does something else, leading
    blanks and quotation marks aside (`"Maxifort". Pla` names Maxifort; `2850` does not name 285).
    """
    said = answer.lstrip(BEFORE_GOLD)
    return said.startswith(gold) and not said[len(gold) : len(gold) + 1].isalnum()


def settled(answer: str, gold: str) -> bool:
    """Whether `recalled` stays as it is, however the answer goes on. The last character may still be incomplete."""
    said = answer.lstrip(BEFORE_GOLD)
    return not gold.startswith(said) and not answer.endswith("\ufffd")
