"""The tiered arm: a real daemon whose whole HBM pool is a share of the episode's KV bytes, and nothing is dropped.

Unlike the paper's policies it does not choose before the question: pages wait in host memory, and the question's own
queries say which of them attention reads. So its figures stand beside the policies' and are not theirs. Three of them:

tiered          the question and each step of the answer read every page exactly: in HBM, or where it lies in host
                memory, also where HBM has it in few bits
tiered-low-bit  the question does; a step reads low-bit pages as they lie in HBM, and from host memory only the rest
tiered-digests  as the second, but of that rest a step reads what digests name, 32 pages a KV head

Bytes are counted in bfloat16, and everything is inside them: exact and low-bit pages, digests, the codec's state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from tierkv.daemon import policy
from tierkv.geometry import DTypeName, Geometry
from tierkv.recall import RecallOptions
from tierkv.study import processes
from tierkv.study.episodes import Probe
from tierkv.study.memdecay.results import Probed, fingerprint
from tierkv.study.memdecay.scenarios import Episode, Tier
from tierkv.study.probe import ask, replay

if TYPE_CHECKING:
    from transformers import Cache, LlamaForCausalLM, PreTrainedTokenizerBase

    from tierkv import Client

DTYPE: DTypeName = "bfloat16"
HOST_BYTES = 128 << 20
POLICY = "memdecay-lift"


class Setting(NamedTuple):
    """How a pool of some share of an episode is used. Small pools are few frames: what is exact without need is cut
    down, and at 5% (five frames) no frame is left for digests.
    """

    chunk_tokens: int
    recent_tokens: int
    digest_share: float
    digest_layers: int  # 0: all

    def as_daemon(self) -> dict[str, object]:
        return {
            "policy": POLICY,
            "quantize_below": NEVER,
            "recent_tokens": self.recent_tokens,
            "digest_share": self.digest_share,
            "digest_layers": self.digest_layers,
            "low_watermark": 0,
            "high_watermark": 0,
        }


SETTINGS: dict[Tier, dict[float, Setting]] = {
    "short": {0.5: Setting(32, 32, 0.15, 0), 0.25: Setting(16, 16, 0.0, 0)},
    "long": {
        0.5: Setting(48, 64, 0.13, 0),
        0.25: Setting(48, 64, 0.13, 0),
        0.1: Setting(32, 32, 0.2, 18),
        0.05: Setting(16, 16, 0.0, 0),
    },
}
"""Chosen on scenarios to develop on. A short episode's tenth is two pages: there is no such cell."""

NEVER = -1.0
"""A score that no page is below: pages become low-bit when room is wanted, and not before."""

ARMS = {
    "tiered": RecallOptions("direct", read=256, exact_steps=True),
    "tiered-low-bit": RecallOptions("direct", read=256),
    "tiered-digests": RecallOptions("direct", read=32),
}
"""`read`: a KV head's pages at most. An episode of the long tier has about 105 pages."""


def can(arm: str, tier: Tier, budget: float) -> bool:
    """A step that reads by digests needs some."""
    return arm != "tiered-digests" or SETTINGS[tier][budget].digest_share > 0


def settings_of(tier: Tier, budget: float, arm: str) -> str:
    """Text that names everything which decides an answer."""
    return f"{arm} {policy.dumps(policy.get(POLICY))} {SETTINGS[tier][budget]} {ARMS[arm]}"


@contextmanager
def serving(tier: Tier, budget: float, tokens: int, geometry: Geometry) -> Iterator[Client]:
    """A daemon with `budget` of the exact KV bytes of `tokens` tokens as its whole HBM, and a client of it."""
    pool = int(budget * tokens * geometry.token_bytes)
    settings = SETTINGS[tier][budget].as_daemon()
    with processes.serving(pool, HOST_BYTES, settings, reserve_ahead=0) as client:
        yield client


def answer(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    client: Client,
    episode: Episode,
    budget: float,
    arms: tuple[str, ...],
) -> list[Probed]:
    """Replay the episode once and ask its probes over forks, under each of `arms`."""
    from tierkv.model import attach
    from tierkv.transformers_cache import TieredCache

    chunk = SETTINGS[episode.tier][budget].chunk_tokens
    attached = attach(model)
    session = attached.open(client, DTYPE, ladder="tiered", pins={})
    try:
        for block in episode.blocks:
            session.label(block.region, block.stop - block.start)
        replay(model, TieredCache(session, chunk_tokens=chunk, recall="direct"), episode.tokens)
        probed = []
        for arm in arms:

            @contextmanager
            def fork(looking: RecallOptions = ARMS[arm]) -> Iterator[Cache]:
                cache = TieredCache(session.fork(), chunk_tokens=chunk, recall=looking)
                try:
                    yield cache
                finally:
                    cache.close()

            right = [
                ask(model, tokenizer, fork, Probe(fact.region, fact.prompt, fact.gold), _label).correct
                for fact in episode.facts
            ]
            peak = int(client.stats()["hbm_peak_bytes"])
            whole = len(episode.tokens) * session.geometry.token_bytes
            settings = fingerprint(settings_of(episode.tier, budget, arm))
            probed += [
                Probed(
                    episode.tier, arm, budget, episode.scenario, episode.variant, fact.region.label, correct,
                    peak, whole, settings,
                )
                for fact, correct in zip(episode.facts, right, strict=True)
            ]  # fmt: skip
        return probed
    finally:
        session.close()
        attached.detach()


def _label(cache: Cache, tokens: int) -> None:
    cache.sessions[0].label("user", tokens)
