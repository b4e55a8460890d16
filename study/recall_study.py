"""How well cold pages are estimated, ranked and read, on SmolLM2 and the demo's episodes.

    python -m tierkv.study.recall_study [--episodes N] [--out out/recall-study.json]

The context lies exact in a DynamicCache, in region-aligned pages; the first page and those of the last `RECENT_TOKENS`
tokens are resident and all others cold (`cold_view.py`); no daemon runs. Each question is asked

- reading every cold page: its last query is informed, and the estimators' masses and ranks are compared with the truth;
- reading none: the ranks of a query that saw resident pages only;
- and answered once for each of `PLANS`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
from rich.console import Console

from tierkv.attention.contract import READ_ALL
from tierkv.attention.reference_cold import shares_of
from tierkv.errors import TierKVError
from tierkv.geometry import PAGE_TOKENS
from tierkv.regions import Run
from tierkv.study.cold_view import ColdView, Look, ViewedAttention
from tierkv.study.episodes import NAMES, QUESTION, Episode, Probe, load_episodes, spans
from tierkv.study.estimators import (
    DIGEST,
    ESTIMATORS,
    Layout,
    Summary,
    layout_of,
    offset_of,
    pages_before,
)
from tierkv.study.model import load_smollm2
from tierkv.study.probe import ask, dynamic_cache, fork_dynamic, forward, replay
from tierkv.study.recall_tables import AnswerReport, EstimatorReport, Places, Spread, StudyReport, render

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

SINK_TOKENS, RECENT_TOKENS = PAGE_TOKENS, 64
EVERY, LATE = slice(None), slice(-10, None)
"""Layers over which shares are averaged."""


class Plan(NamedTuple):
    """Cold pages that a KV head reads in place, of a question and of each decode step, and those that come back."""

    chunk_read: int
    pages: int
    read: int


PLANS = (
    Plan(16, 16, 8), Plan(32, 16, 8), Plan(64, 16, 8), Plan(64, 0, 8), Plan(64, 8, 8), Plan(READ_ALL, 16, 0),
    Plan(READ_ALL, 0, 0),
)  # fmt: skip

Way = tuple[str, bool]
"""An estimator's name, and whether it has an offset for each head."""


class Found(NamedTuple):
    """Of one question: estimated over true mass of all cold pages, and the rank of the page that holds the fact."""

    cold: int
    ratio: dict[Way, float]
    ratio_late: dict[Way, float]
    rank: dict[Way, int]  # over every layer
    rank_late: dict[Way, int]
    uninformed: int
    uninformed_late: int
    answered: dict[Plan, bool]


class Context(NamedTuple):
    """An episode over its cache."""

    cache: Cache
    layout: Layout
    summaries: dict[str, Summary]  # by estimator
    resident: torch.Tensor  # [pages] bool

    def view(self, read: int) -> ColdView:
        return ColdView(self.layout, self.summaries[DIGEST.name], self.resident, read)


class Measure:
    """Means over heads of true and estimated shares `[pages]`, layer by layer, as a question's last query has them."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.true: list[torch.Tensor] = []
        self.shares: dict[Way, list[torch.Tensor]] = {
            (estimator.name, offset): [] for estimator in ESTIMATORS for offset in (False, True)
        }

    def look(self, look: Look) -> None:
        """Add a layer."""
        resident = self.context.resident
        cold, near = ~resident, look.near(resident)[:, -1:]
        counts = torch.from_numpy(self.context.layout.counts).float()
        self._add(self.true, look.pages[:, -1:, cold], near)
        for estimator in ESTIMATORS:
            summary = self.context.summaries[estimator.name].layer(look.layer, torch.ones_like(resident))
            estimates = estimator.log_mass(look.query, summary, counts, look.scale)
            offset = offset_of(estimates[..., resident], look.pages[..., resident])
            self._add(self.shares[estimator.name, False], estimates[:, -1:, cold], near)
            self._add(self.shares[estimator.name, True], estimates[:, -1:, cold] + offset, near)

    def _add(self, to: list[torch.Tensor], log_masses: torch.Tensor, near: torch.Tensor) -> None:
        shares = shares_of(log_masses, near).mean((0, 1))
        to.append(torch.zeros(len(self.context.resident)).masked_scatter_(~self.context.resident, shares))

    def ratios(self, layers: slice) -> dict[Way, float]:
        true = torch.stack(self.true)[layers].sum()
        return {way: float(torch.stack(own)[layers].sum() / true) for way, own in self.shares.items()}

    def ranks(self, page: int, layers: slice) -> dict[Way, int]:
        return {way: pages_before(torch.stack(own)[layers].mean(0), page) for way, own in self.shares.items()}


class Study:
    """A model whose attention goes through views."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.attention = ViewedAttention(model)

    @torch.inference_mode()
    def run(self, episode: Episode) -> list[Found]:
        """One for each probe."""
        context = self.prefill(episode)
        return [
            self.question(context, probe, fact_page(episode, probe, self.tokenizer, context.layout))
            for probe in episode.probes
        ]

    def prefill(self, episode: Episode) -> Context:
        blocks = spans(episode, self.tokenizer)
        layout = layout_of(Run(block.region, len(block.tokens)) for block in blocks)
        self.attention.view = None
        cache = dynamic_cache(self.model)
        replay(self.model, cache, [token for block in blocks for token in block.tokens], burst=0)
        keys = torch.stack([layer.keys[0] for layer in cache.layers]).float()
        summaries = {estimator.name: estimator.summarize(keys, layout) for estimator in ESTIMATORS}
        return Context(cache, layout, summaries, layout.ends_kept(SINK_TOKENS, RECENT_TOKENS))

    def question(self, context: Context, probe: Probe, page: int) -> Found:
        """`page` holds the fact."""
        measure = Measure(context)
        informed, uninformed = context.view(READ_ALL), context.view(0)
        informed.look = measure.look
        prompt = self.tokenizer(probe.prompt, add_special_tokens=False).input_ids
        for view in (informed, uninformed):
            self.attention.view = view
            with fork_dynamic(context.cache)() as cache:
                forward(self.model, cache, prompt)
        return Found(
            informed.cold_pages,
            measure.ratios(EVERY),
            measure.ratios(LATE),
            measure.ranks(page, EVERY),
            measure.ranks(page, LATE),
            pages_before(uninformed.ranking(EVERY), page),
            pages_before(uninformed.ranking(LATE), page),
            {plan: self.answers(context, probe, plan) for plan in PLANS},
        )

    def answers(self, context: Context, probe: Probe, plan: Plan) -> bool:
        """Whether the question is answered: its chunk reads, pages come back, and the decode steps read again."""
        view = self.attention.view = context.view(plan.chunk_read)

        def planned(model: PreTrainedModel, cache: Cache, tokens: Sequence[int]) -> int:
            token = forward(model, cache, tokens)
            if len(tokens) > 1:  # the question
                view.bring_back(plan.pages, LATE)
                view.read = plan.read
            return token

        return ask(self.model, self.tokenizer, fork_dynamic(context.cache), probe, forward=planned).correct


def fact_page(episode: Episode, probe: Probe, tokenizer: PreTrainedTokenizerBase, layout: Layout) -> int:
    """The page of the token that follows the probe's statement in the context: there the answer begins."""
    statement, before = probe.prompt.removeprefix(QUESTION), 0
    for block in episode.blocks:
        found = tokenizer(block.text, add_special_tokens=False, return_offsets_mapping=True)
        at = block.text.find(f"{statement} {probe.gold}")
        if at >= 0:
            stops = [stop for _, stop in found.offset_mapping]
            token = before + next(i for i, stop in enumerate(stops) if stop > at + len(statement))
            return int(layout.page_of[token])
        before += len(found.input_ids)
    raise ValueError(f"no block of {episode.name} says {statement!r} {probe.gold!r}")


def report(found: Sequence[Found], episodes: int, seconds: float) -> StudyReport:
    """Over at least one question."""
    return StudyReport(
        episodes=episodes,
        questions=len(found),
        cold_pages=Spread.of([one.cold for one in found]),
        estimators=[
            EstimatorReport(
                name,
                offset,
                Spread.of([one.ratio[name, offset] for one in found]),
                Spread.of([one.ratio_late[name, offset] for one in found]),
                Places.of([one.rank[name, offset] for one in found]),
                Places.of([one.rank_late[name, offset] for one in found]),
            )
            for name, offset in found[0].ratio
        ],
        uninformed=Places.of([one.uninformed for one in found]),
        uninformed_late=Places.of([one.uninformed_late for one in found]),
        answers=[
            AnswerReport(
                None if plan.chunk_read == READ_ALL else plan.chunk_read,
                plan.pages,
                plan.read,
                sum(one.answered[plan] for one in found),
            )
            for plan in PLANS
        ],
        seconds=seconds,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tierkv.study.recall_study", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--episodes", type=int, default=len(NAMES), choices=range(1, len(NAMES) + 1), help="the first so many"
    )
    parser.add_argument("--out", type=Path, default=Path("out/recall-study.json"), help="where figures go")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    try:
        study = Study(*load_smollm2())
    except TierKVError as error:
        print(f"recall study: {error}", file=sys.stderr)
        return 1
    found: list[Found] = []
    for episode in load_episodes()[: options.episodes]:
        found += study.run(episode)
        print(f"{time.monotonic() - begin:5.0f} s  {episode.name}", file=sys.stderr, flush=True)
    told = report(found, options.episodes, time.monotonic() - begin)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(told)))
    Console().print(render(told), highlight=False)
    print(f"figures: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
