"""`tierkv study recall`: what is still known after eviction (the paper's Tables III and IV), and beside it the tiers.

An episode is read once; every policy then keeps what it keeps of the same context, and all their questions are asked in
one batch. Answers go to a file as they come, so an interrupted run goes on where it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from tierkv import model_support
from tierkv.errors import ConfigError
from tierkv.study.memdecay import tiered
from tierkv.study.memdecay.arms import Arm, compared
from tierkv.study.memdecay.ask import Question, ask
from tierkv.study.memdecay.attention import StudyAttention
from tierkv.study.memdecay.record import record_episode
from tierkv.study.memdecay.results import Key, Probed, Results, fingerprint
from tierkv.study.memdecay.scenarios import TIERS, Episode, Tier, episodes, load_scenarios

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

Split = Literal["dev", "report"]

BUDGETS = (0.25, 0.5)
FULL = 1.0


class Work(NamedTuple):
    """What is to be asked of one episode: policies at budgets, or tiered arms at one budget."""

    episode: Episode
    arms: tuple[tuple[Arm, float], ...] = ()
    tiered: tuple[str, ...] = ()
    budget: float = 0.0


class Plan(NamedTuple):
    """Which cells a run fills.

    Args:
        variants: of each scenario.
        tiered: arms that need a daemon; none where it is empty.
    """

    split: Split = "report"
    tiers: tuple[Tier, ...] = TIERS
    variants: tuple[int, ...] = (0, 1, 2)
    arms: tuple[Arm, ...] = compared()
    budgets: tuple[float, ...] = BUDGETS
    tiered: tuple[str, ...] = tuple(tiered.ARMS)
    tiered_scenarios: int | None = None  # the first so many of the split; None: all
    tiered_budgets: tuple[float, ...] | None = None  # None: all that there are


QUICK = Plan(variants=(0,), tiered=("tiered",), tiered_scenarios=4, tiered_budgets=(0.25, 0.1, 0.05))
"""Every scenario once; the daemon's arms on four of them, in the long tier at the budgets that have targets."""


def choose(plan: Plan, any_tiered: bool, arms: Sequence[str] | None, budgets: Sequence[float] | None) -> Plan:
    """The plan with these tiered arms and budgets; None leaves the plan's.

    Raises:
        ConfigError: an arm or a budget does not exist.
    """
    for arm in arms or ():
        if arm not in tiered.ARMS:
            raise ConfigError(f"the tiered arm {arm!r} does not exist; use one of {', '.join(tiered.ARMS)}")
    for budget in budgets or ():
        if budget not in tiered.SETTINGS["long"]:
            known = ", ".join(map(str, tiered.SETTINGS["long"]))
            raise ConfigError(f"no tiered arm has the budget {budget:g}; use one of {known}")
    if not any_tiered:
        return plan._replace(tiered=())
    return plan._replace(
        tiered=tuple(arms or plan.tiered), tiered_budgets=tuple(budgets) if budgets else plan.tiered_budgets
    )


def missing(plan: Plan, tokenizer: PreTrainedTokenizerBase, results: Results) -> list[Work]:
    """What the results lack: policies episode by episode, then the tiered arms budget by budget."""
    scenarios = load_scenarios(plan.split)
    work: list[Work] = []
    for tier in plan.tiers:
        chosen = [e for e in episodes(scenarios, tier, tokenizer) if e.variant in plan.variants]
        for episode in chosen:
            wanted = [
                (arm, budget)
                for arm in plan.arms
                for budget in ((FULL,) if arm.name == "full" else plan.budgets)
                if _key(episode, arm.name, budget, arm.settings) not in results
            ]
            if wanted:
                work.append(Work(episode, tuple(wanted)))
    for tier in plan.tiers:
        few = {s.name for s in scenarios[: plan.tiered_scenarios]}
        chosen = [e for e in episodes(scenarios, tier, tokenizer) if e.variant in plan.variants]
        for budget in tiered.SETTINGS[tier]:
            if plan.tiered_budgets is not None and (budget not in plan.tiered_budgets or tier == "short"):
                continue
            for episode in chosen:
                names = tuple(
                    name
                    for name in plan.tiered
                    if tiered.can(name, tier, budget)
                    and _key(episode, name, budget, tiered.settings_of(tier, budget, name)) not in results
                )
                if names and episode.scenario in few:
                    work.append(Work(episode, (), names, budget))
    return work


def _key(episode: Episode, name: str, budget: float, settings: str) -> Key:
    return (episode.tier, name, budget, episode.scenario, episode.variant, fingerprint(settings))


def run(
    plan: Plan,
    results: Results,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    told: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> None:
    """Fill what is missing. `told` hears of each piece of work before it starts.

    Raises:
        TierKVError: a daemon could not start or serve.
    """
    work = missing(plan, tokenizer, results)
    attention = StudyAttention(model)
    done = 0
    for one in work:
        if one.arms:
            told(done, len(work), f"{one.episode.name}, {len(one.arms)} policies and budgets")
            results.add(evicted(model, tokenizer, attention, one.episode, one.arms))
            done += 1
    geometry = model_support.geometry(model, tiered.DTYPE)
    daemons: dict[tuple[Tier, float], list[Work]] = defaultdict(list)
    for one in work:
        if one.tiered:
            daemons[one.episode.tier, one.budget].append(one)
    for (tier, budget), batch in daemons.items():
        least = min(len(one.episode.tokens) for one in batch)
        with tiered.serving(tier, budget, least, geometry) as client:
            for one in batch:
                told(done, len(work), f"{one.episode.name}, {', '.join(one.tiered)} at {budget:.0%}")
                results.add(tiered.answer(model, tokenizer, client, one.episode, budget, one.tiered))
                done += 1
    told(done, len(work), "done")


def evicted(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    attention: StudyAttention,
    episode: Episode,
    arms: Sequence[tuple[Arm, float]],
) -> Iterable[Probed]:
    """The episode's probes under each arm and budget."""
    context, trace = record_episode(model, attention, episode)
    questions: list[Question] = []
    asked: list[tuple[Arm, float, int]] = []
    for arm, budget in arms:
        kept = arm.kept(trace, budget)
        for fact in episode.facts:
            questions.append(Question(fact, torch.from_numpy(kept)))
            asked.append((arm, budget, int(kept.sum())))
    for right, question, (arm, budget, tokens) in zip(
        ask(model, tokenizer, attention, context, questions), questions, asked, strict=True
    ):
        yield Probed(
            episode.tier, arm.name, budget, episode.scenario, episode.variant, question.fact.region.label, right,
            tokens, len(episode.tokens), fingerprint(arm.settings),
        )  # fmt: skip


def open_results(folder: Path, split: Split) -> Results:
    return Results(folder / f"probes-{split}.jsonl")
