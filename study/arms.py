"""The three ways to keep an episode's KV that the demo compares, each over the same tokens and the same questions.

full     transformers' DynamicCache: every token exact, as much memory as it takes
drop     a session that may only drop pages, within the HBM pool; system pages pinned exact (what MemDecay does)
tiered   a session that may keep pages exact, low-bit or in host memory, within the same pool
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from tierkv.geometry import DTypeName, Geometry
from tierkv.study.episodes import Episode, Span, spans
from tierkv.study.probe import Answer, Replay, ask, dynamic_cache, fork_dynamic, replay

if TYPE_CHECKING:
    from transformers import Cache, LlamaForCausalLM, PreTrainedTokenizerBase

    from tierkv import Client, Session

ARMS = ("full", "drop", "tiered")

POOL_DTYPE: DTypeName = "bfloat16"
"""Element type of exact pages, whatever the model computes in."""

CHUNK_TOKENS = 96
"""Prompt tokens a forward: six pages of a pool of 25. A longer slice pushes more old pages out while it is written."""

TIERS = {"hbm": "hbm", "quantized": "quantized", "host": "host"}
"""Tier in the report: its name in the daemon's numbers."""


class TierUse(NamedTuple):
    """Pages by what attention reads; bytes by where replicas are (a backup in host counts there as well)."""

    pages: dict[str, int]
    bytes: dict[str, int]


class EpisodeResult(NamedTuple):
    episode: str
    arm: str
    replay: Replay
    answers: list[Answer]
    tiers: TierUse | None  # after the replay, before the questions; None for the full arm


class Worker(NamedTuple):
    """What every arm runs on."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerBase
    client: Client


def pool_bytes(episodes: Iterable[Episode], tokenizer: PreTrainedTokenizerBase, fraction: float) -> int:
    """`fraction` of the exact KV bytes of the shortest episode, so that no episode has a larger share."""
    token_bytes = Geometry(30, 3, 64, POOL_DTYPE).token_bytes  # SmolLM2-135M
    shortest = min(sum(len(span.tokens) for span in spans(episode, tokenizer)) for episode in episodes)
    return int(fraction * shortest * token_bytes)


def run_episode(
    worker: Worker, episode: Episode, arm: str, told: Callable[[], None] = lambda: None
) -> EpisodeResult:
    """Replay `episode` and ask its probes. `told` is called after the replay and after each answer.

    Raises:
        ValueError: there is no such arm.
        TierKVError: the daemon cannot serve the arm.
    """
    if arm == "full":
        return _run_full(worker, episode, told)
    if arm in ("drop", "tiered"):
        return _run_paged(worker, episode, arm, told)
    raise ValueError(f"arm {arm!r} does not exist; use one of {', '.join(ARMS)}")


def _run_full(worker: Worker, episode: Episode, told: Callable[[], None]) -> EpisodeResult:
    model, tokenizer = worker.model, worker.tokenizer
    cache = dynamic_cache(model)
    done = replay(model, cache, _tokens(spans(episode, tokenizer)))
    told()
    answers = []
    for probe in episode.probes:
        answers.append(ask(model, tokenizer, fork_dynamic(cache), probe))
        told()
    return EpisodeResult(episode.name, "full", done, answers, None)


def _run_paged(worker: Worker, episode: Episode, arm: str, told: Callable[[], None]) -> EpisodeResult:
    from tierkv.model import attach
    from tierkv.transformers_cache import TieredCache

    model, tokenizer, client = worker
    pins = {"system": "exact"} if arm == "drop" else None
    attached = attach(model)
    session = attached.open(client, POOL_DTYPE, ladder=arm, pins=pins)
    try:
        labelled = spans(episode, tokenizer)
        for span in labelled:
            session.label(span.region, len(span.tokens))
        done = replay(model, TieredCache(session, chunk_tokens=CHUNK_TOKENS), _tokens(labelled))
        tiers = _tier_use(client, session)
        told()

        @contextmanager
        def fork() -> Iterator[Cache]:
            cache = TieredCache(session.fork(), chunk_tokens=CHUNK_TOKENS)
            try:
                yield cache
            finally:
                cache.close()

        answers = []
        for probe in episode.probes:
            answers.append(ask(model, tokenizer, fork, probe, _label_question))
            told()
        return EpisodeResult(episode.name, arm, done, answers, tiers)
    finally:
        session.close()
        attached.detach()  # the full arm runs on the model as transformers made it


def _label_question(cache: Cache, tokens: int) -> None:
    cache.sessions[0].label("user", tokens)


def _tokens(labelled: Iterable[Span]) -> list[int]:
    return [token for span in labelled for token in span.tokens]


def _tier_use(client: Client, session: Session) -> TierUse:
    numbers = client.stats(session.id)
    return TierUse(
        {tier: int(numbers[f"pages_{name}"]) for tier, name in TIERS.items()},
        {tier: int(numbers[f"bytes_{name}"]) for tier, name in TIERS.items()},
    )


def ms_per_token(results: Iterable[EpisodeResult]) -> float:
    """Median milliseconds of a decode step, over bursts and answers."""
    steps: list[float] = []
    for result in results:
        steps += result.replay.decode_seconds
        for answer in result.answers:
            steps += answer.decode_seconds
    return 1e3 * statistics.median(steps)
