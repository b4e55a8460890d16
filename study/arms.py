"""The ways to keep an episode's KV that the demo compares, each over the same tokens and the same questions.

full               transformers' DynamicCache: every token exact, as much memory as it takes
drop               a session that may only drop pages; system pages pinned exact as far as they fit (what MemDecay does)
quantized          every page low-bit, the oldest leave when the bytes are full (`quantized.py`)
tiered_recall_off  a session that may keep pages exact, low-bit or in host memory, where they are not attended
tiered             the same, and pages in host memory are found by their digests, read in place and called back

All but full have the same bytes. No region is pinned in the tiered arms: what stays is up to scores and recall.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tierkv.geometry import DTypeName, Geometry
from tierkv.regions import Region
from tierkv.study.episodes import Episode, Span, spans
from tierkv.study.probe import Answer, Replay, ask, dynamic_cache, fork_dynamic, replay

if TYPE_CHECKING:
    from transformers import Cache, LlamaForCausalLM, PreTrainedTokenizerBase

    from tierkv import Client, Session
    from tierkv.protocol import Audit
    from tierkv.recall import RecallMode

ARMS = ("full", "drop", "quantized", "tiered_recall_off", "tiered")

POOL_DTYPE: DTypeName = "bfloat16"
"""Element type of exact pages, whatever the model computes in."""

CODEC = "k3v2"  # of the quantized arm, and the daemon's default

CHUNK_TOKENS = 48
"""Prompt tokens a forward: three pages of a pool of 12. A longer slice pushes more old pages out while it runs."""


class Paged(NamedTuple):
    """How an arm's sessions are opened."""

    ladder: str
    pins: dict[str, str]
    recall: RecallMode


PAGED = {
    "drop": Paged("drop", {"system": "exact"}, "off"),
    "tiered_recall_off": Paged("tiered", {}, "off"),
    "tiered": Paged("tiered", {}, "direct"),
}

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
    tiers: TierUse | None = None  # of a session, after the replay and before the questions
    audits: tuple[Audit, ...] = ()  # of a tiered session's questions and answers
    bytes_peak: int = 0  # of the quantized arm


class Worker(NamedTuple):
    """What every arm runs on."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerBase
    client: Client
    pool_bytes: int  # of the daemon's HBM


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
    if arm == "quantized":
        return _run_quantized(worker, episode, told)
    if arm in PAGED:
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
    return EpisodeResult(episode.name, "full", done, answers)


def _run_quantized(worker: Worker, episode: Episode, told: Callable[[], None]) -> EpisodeResult:
    from tierkv import quant
    from tierkv.study.quantized import QuantizedCache, forward

    model, tokenizer = worker.model, worker.tokenizer
    config = model.config
    geometry = Geometry(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, POOL_DTYPE)
    cache = QuantizedCache(config, geometry, quant.get(CODEC), worker.pool_bytes)
    labelled = spans(episode, tokenizer)
    for span in labelled:
        cache.label(span.region, len(span.tokens))
    run = partial(forward, chunk_tokens=CHUNK_TOKENS)
    done = replay(model, cache, _tokens(labelled), forward=run)
    told()
    answers = []
    for probe in episode.probes:
        answers.append(
            ask(model, tokenizer, fork_dynamic(cache), probe, lambda fork, n: fork.label(Region.USER, n), run)
        )
        told()
    return EpisodeResult(episode.name, "quantized", done, answers, bytes_peak=cache.bytes_peak)


def _run_paged(worker: Worker, episode: Episode, arm: str, told: Callable[[], None]) -> EpisodeResult:
    from tierkv.model import attach
    from tierkv.recall import RecallOptions
    from tierkv.transformers_cache import TieredCache

    model, tokenizer, client, _ = worker
    ladder, pins, mode = PAGED[arm]
    attached = attach(model)
    session = attached.open(client, POOL_DTYPE, ladder=ladder, pins=pins)
    audits: list[Audit] = []
    try:
        labelled = spans(episode, tokenizer)
        for span in labelled:
            session.label(span.region, len(span.tokens))
        done = replay(model, TieredCache(session, chunk_tokens=CHUNK_TOKENS, recall=mode), _tokens(labelled))
        tiers = _tier_use(client, session)
        told()
        looking = RecallOptions(mode, audit_every=1 if ladder == "tiered" else 0)

        @contextmanager
        def fork() -> Iterator[Cache]:
            cache = TieredCache(session.fork(), chunk_tokens=CHUNK_TOKENS, recall=looking)
            try:
                yield cache
            finally:
                audits.extend(cache.audits)
                cache.close()

        answers = []
        for probe in episode.probes:
            answers.append(ask(model, tokenizer, fork, probe, _label_question))
            told()
        return EpisodeResult(episode.name, arm, done, answers, tiers, tuple(audits))
    finally:
        session.close()
        attached.detach()  # the other arms run on the model as transformers made it


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
