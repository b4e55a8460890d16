"""Contexts and what is asked of them: which are reported on, and which an aggregate or a state may be fitted on.

demo         the demo's six episodes with four questions each (`tierkv.study.episodes`)
scenarios    the study's scenarios, long, first variant: the eight to report on with four questions each, and of those
             to develop on for fitting (`tierkv.study.memdecay.scenarios`)
tau-airline  runs of 2,848 tokens, then the run's own next tokens (`tierkv.benchmarks.quant.inputs`)

No text of `report` is in `fitting`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tierkv.benchmarks.quant import inputs
from tierkv.regions import Region, Run
from tierkv.study.episodes import Probe, load_episodes, spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORCED = 64
"""Tokens of a run whose queries are recorded."""

WATCHED = 8
"""Last tokens of a question whose queries are recorded, with those of its answer."""

FITTING_SCENARIOS = 8


class Ask(NamedTuple):
    """Tokens that follow the context, of which the last `watched` are recorded."""

    tokens: list[int]
    watched: int
    probe: Probe | None = None


class Input(NamedTuple):
    family: str
    name: str
    runs: list[Run]
    tokens: list[int]
    asks: list[Ask]

    @property
    def title(self) -> str:
        return f"{self.family}: {self.name}"


def report(tokenizer: PreTrainedTokenizerBase, data: Path | None) -> list[Input]:
    """What figures are of. Families take turns, so that the first few inputs are of different ones."""
    turns = zip_longest(
        _tau_airline(inputs.REPORT, tokenizer, data), _demo(tokenizer), _scenarios("report", tokenizer)
    )
    return [given for turn in turns for given in turn if given is not None]


def fitting(tokenizer: PreTrainedTokenizerBase, data: Path | None) -> list[Input]:
    """What may be learned from."""
    return [
        *list(_scenarios("dev", tokenizer))[:FITTING_SCENARIOS],
        *_tau_airline(inputs.CALIBRATION, tokenizer, data),
    ]


def _demo(tokenizer: PreTrainedTokenizerBase) -> Iterator[Input]:
    for episode in load_episodes():
        blocks = spans(episode, tokenizer)
        yield Input(
            "demo",
            episode.name,
            [Run(block.region, len(block.tokens)) for block in blocks],
            [token for block in blocks for token in block.tokens],
            [_ask(probe, tokenizer) for probe in episode.probes],
        )


def _scenarios(split: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[Input]:
    from tierkv.study.memdecay.scenarios import build, load_scenarios

    for scenario in load_scenarios("report" if split == "report" else "dev"):
        episode = build(scenario, 0, "long", tokenizer)
        yield Input(
            "scenarios",
            episode.scenario,
            [Run(block.region, block.stop - block.start) for block in episode.blocks],
            episode.tokens,
            [_ask(Probe(fact.region, fact.prompt, fact.gold), tokenizer) for fact in episode.facts],
        )


def _ask(probe: Probe, tokenizer: PreTrainedTokenizerBase) -> Ask:
    """The question and all but the last token of its answer: each query is one whose output matters."""
    question = tokenizer(probe.prompt, add_special_tokens=False).input_ids
    answer = tokenizer(f" {probe.gold}", add_special_tokens=False).input_ids[:-1]
    return Ask(question + answer, WATCHED + len(answer), probe)


def _tau_airline(
    names: inputs.Names, tokenizer: PreTrainedTokenizerBase, data: Path | None
) -> Iterator[Input]:
    if data is None:
        return
    of_family = {"tau-airline": names["tau-airline"]}
    for text in inputs.read(of_family, tokenizer, data, inputs.CONTEXT):
        context, forced = text.tokens[: text.context], text.tokens[text.context :][:FORCED]
        yield Input(
            "tau-airline", text.name, [Run(Region.USER, text.context)], context, [Ask(forced, FORCED)]
        )
