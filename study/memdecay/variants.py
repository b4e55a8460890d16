"""`tierkv study variants`: ideas beyond the paper, each beside `memdecay-lift` as it is, and a verdict on each.

Measured by survival of facts (see `survival`), which is not recall; the rule is in `variants_tables`. Each idea's
formula is in its docstring (`variants_memory`, `variants_links`), its constants were chosen on scenarios to develop on:
figures of those flatter it. Two rows are no ideas, but tell what an idea's gain is not: lift with four times the weight
on attention, and shared fate with evidence that the plan does not name.

Weights of layers and heads need traces by head (`run_weighted`). They are fitted on half the scenarios and tested on
the other half, both ways: a layer (or head) is the better, the more far pages a fact's page outranks by its far mass
alone, and the best quarter of them is averaged instead of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon import policy
from tierkv.daemon.policy import Policy
from tierkv.daemon.policy.lift import LEAST_MASS, MemDecayLift
from tierkv.errors import ConfigError
from tierkv.regions import Region
from tierkv.study.memdecay.arms import Arm, compared
from tierkv.study.memdecay.evict import pages_of
from tierkv.study.memdecay.scenarios import Episode
from tierkv.study.memdecay.survival import Case, Keeps, Pair, Told, survival, unheard
from tierkv.study.memdecay.traces import Trace
from tierkv.study.memdecay.variants_links import (
    CopyRefresh,
    SharedFate,
    Supersede,
    evidence_of,
    other_evidence,
    quotes_of,
    superseded_of,
)
from tierkv.study.memdecay.variants_memory import (
    AdaptiveRates,
    BiasCorrected,
    FastMemory,
    PhaseConditioned,
    RegionFloors,
    Reuse,
)
from tierkv.study.memdecay.variants_tables import Report, judge

LIFT = "memdecay-lift"

BEST_SHARE = 0.25
"""Of the layers, or of the heads, that are averaged."""


class Idea(NamedTuple):
    name: str
    policy: Callable[[Episode], Policy]


IDEAS = (
    Idea("alpha 96 (control)", lambda episode: policy.get(LIFT, alpha=96.0)),
    Idea("fast memory", lambda episode: FastMemory()),
    Idea("bias-corrected", lambda episode: BiasCorrected()),
    Idea("region floors", lambda episode: RegionFloors()),
    Idea("adaptive rates", lambda episode: AdaptiveRates()),
    Idea("future reuse", lambda episode: Reuse()),
    Idea("phase", lambda episode: PhaseConditioned()),
    Idea("shared fate", lambda episode: SharedFate(links=evidence_of(episode.blocks))),
    Idea("other fate (control)", lambda episode: SharedFate(links=other_evidence(episode.blocks))),
    Idea("supersede", lambda episode: Supersede(links=superseded_of(episode.blocks))),
    Idea("copy refresh", lambda episode: CopyRefresh(links=quotes_of(episode.tokens, episode.blocks))),
)


def run(pairs: Iterable[Pair], told: Told = unheard) -> Report:
    """Every idea on every pair, evicting as lift does.

    Raises:
        ConfigError: see `survival.survival` and `variants_tables.judge`.
    """
    lift = _lift()
    cases = [
        Case(LIFT, "lift as it is", "", lambda episode, trace, budget: lift.kept(trace, budget)),
        *(Case(LIFT, idea.name, "", _by(lift, idea)) for idea in IDEAS),
    ]
    found = survival(pairs, cases, told)
    return Report(found, judge(found))


def _lift() -> Arm:
    (arm,) = (arm for arm in compared() if arm.name == LIFT)
    return arm


def _by(lift: Arm, idea: Idea) -> Keeps:
    def keeps(episode: Episode, trace: Trace, budget: float) -> NDArray[np.bool_]:
        return lift._replace(policy=idea.policy(episode)).kept(trace, budget)

    return keeps


Parts = Callable[[Trace], NDArray[np.float16]]
"""The masses of a trace's layers, or of its heads, `[parts, ...]`."""


def run_weighted(pairs: Iterable[Pair], layers: int, told: Told = unheard) -> Report:
    """The best layers, and the best heads, beside the average over all. layers: of the model.

    The traces hold every head of every layer. They stay in memory: 30 MB an episode of the long tier, where the last
    eight queries of each stage are recorded, which is all that is observed.

    Raises:
        ConfigError: a trace is not by head, or does not hold the same number of heads for each layer; there are fewer
            than two scenarios; see `run`.
    """
    known = list(pairs)
    for _, trace in known:
        if trace.mass.ndim != 2 or len(trace.mass) % layers:
            raise ConfigError(
                f"the trace {trace.name} does not hold all heads of {layers} layers; record it by head, each of them"
            )
    names = sorted({episode.scenario for episode, _ in known})
    if len(names) < 2:
        raise ConfigError(
            f"{len(names)} scenarios cannot be halved; weights are fitted on one half and tested on the other"
        )
    halves = (names[::2], names[1::2])
    kinds: dict[str, Parts] = {"layers": lambda trace: by_layer(trace, layers), "heads": by_head}
    cases = [Case(LIFT, "all heads alike", "", _averaged(lambda episode, trace: by_head(trace)))]
    chosen: dict[str, list[int]] = {}
    for done, (kind, parts) in enumerate(kinds.items()):
        told(done, len(kinds), f"which {kind} rank facts' pages best")
        fits = [best([pair for pair in known if pair[0].scenario in half], parts) for half in halves]
        chosen |= {f"best {kind} of {', '.join(h)}": f.tolist() for h, f in zip(halves, fits, strict=True)}
        tested = {name: fit for half, fit in zip(halves, reversed(fits), strict=True) for name in half}
        cases.append(Case(LIFT, f"best {kind}", "", _averaged(_only(parts, tested))))
    found = survival(known, cases, told)
    return Report(found, judge(found), chosen)


def by_head(trace: Trace) -> NDArray[np.float16]:
    return trace.mass


def by_layer(trace: Trace, layers: int) -> NDArray[np.float16]:
    """Averaged over each layer's heads, which stand together."""
    each: NDArray[np.float32] = trace.mass.reshape(layers, -1, trace.mass.shape[-1]).mean(1, dtype=np.float32)
    return each.astype(np.float16)


def best(pairs: Iterable[Pair], parts: Parts) -> NDArray[np.intp]:
    """The best `BEST_SHARE` of the parts, ascending."""
    ranks = np.concatenate(
        [outranked(episode, replace(trace, mass=parts(trace))) for episode, trace in pairs]
    )
    order = np.argsort(-ranks.mean(0), kind="stable")
    return np.sort(order[: math.ceil(BEST_SHARE * len(order))])


def outranked(episode: Episode, trace: Trace) -> NDArray[np.float64]:
    """The share of other far pages that the page of each fact outranks, `[facts, parts]`; what is not system, and far.

    A page's rank is its most used token's, and a token's use the sum of its saturated lifts (see `lift`).
    """
    lift = _lift()
    assert isinstance(lift.policy, MemDecayLift)
    first, last = lift.policy.sink_tokens, len(trace) - lift.policy.near_tokens
    use = np.zeros((len(trace.mass), len(trace)), np.float32)
    for _, mass in trace.rows():
        far = mass[:, first : max(first, mass.shape[1] - lift.policy.near_tokens)]
        if far.size:
            level = np.maximum(far.sum(1, keepdims=True), LEAST_MASS) / far.shape[1]
            use[:, first : first + far.shape[1]] += far / (far + level)
    starts = pages_of(trace, lift.unit, lift.page_tokens).starts
    pages = np.maximum.reduceat(use, starts, axis=1)
    there = (starts >= first) & (starts < last)
    ranks = []
    for fact in episode.facts:
        if fact.region != Region.SYSTEM and first <= fact.start < last:
            own = np.searchsorted(starts, fact.start, side="right") - 1
            others = there & (np.arange(len(starts)) != own)
            ranks.append((pages[:, others] < pages[:, own, None]).mean(1))
    return np.array(ranks).reshape(len(ranks), len(trace.mass))


def _only(
    parts: Parts, tested: dict[str, NDArray[np.intp]]
) -> Callable[[Episode, Trace], NDArray[np.float16]]:
    return lambda episode, trace: parts(trace)[tested[episode.scenario]]


def _averaged(masses: Callable[[Episode, Trace], NDArray[np.float16]]) -> Keeps:
    """What lift keeps by the average of these masses."""
    lift = _lift()

    def keeps(episode: Episode, trace: Trace, budget: float) -> NDArray[np.bool_]:
        mean = masses(episode, trace).mean(0, dtype=np.float32).astype(np.float16)
        return lift.kept(replace(trace, mass=mean), budget)

    return keeps
