"""Runs of one arm, and what it measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierkv.benchmarks.pauses.agents import Reader, Turn, turns
from tierkv.benchmarks.pauses.life import GEOMETRY, Agent
from tierkv.benchmarks.pauses.shell import Shell
from tierkv.daemon.allocator import aligned
from tierkv.daemon.state import BrainConfig
from tierkv.hint_messages import Pause
from tierkv.quant import get

CODEC = "k3v2"
DIGEST_SHARE, LOW_WATERMARK, HIGH_WATERMARK = 0.1, 0.02, 0.04
DIGEST_LAYERS = 8
"""Of 32: so that digests of all cold pages find room."""

SINK_TOKENS, RECENT_TOKENS = 16, 16
IN_TRANSIT = 2
"""Exact pages of a session that runs besides: one that is written, one that becomes low-bit."""

START_SECONDS = 0.3
"""Between the first prompts of two sessions."""


@dataclass(frozen=True)
class Scale:
    sessions: int = 64
    fits: int = 16
    """Sessions that HBM holds."""

    pages: tuple[int, int] = (40, 60)
    warm_up: float = 60.0
    seconds: float = 300.0
    """From the start on; what happens in the warm-up is not counted."""

    seed: int = 0


def hbm_bytes(scale: Scale, exact: bool) -> int:
    """HBM that holds so many sessions whole: exact, or as low-bit pages but for first and last ones; besides, what
    digests may take and what is kept free.
    """
    frame, packed = aligned(GEOMETRY.page_bytes), aligned(get(CODEC).page_bytes(GEOMETRY))
    pages = sum(scale.pages) / 2
    guarded = (SINK_TOKENS + RECENT_TOKENS) / GEOMETRY.page_tokens + IN_TRANSIT
    session = pages * frame if exact else guarded * frame + (pages - guarded) * frame / (frame // packed)
    return int(scale.fits * session / (1 - DIGEST_SHARE - LOW_WATERMARK)) // frame * frame


def hint_of(arm: str, turn: Turn) -> Pause | None:
    match arm:
        case "exact":
            return Pause(turn.pause, turn.tool)
        case "wrong":
            return Pause(turn.hint, turn.tool)
        case "tool":
            return Pause(tool=turn.tool)
    return None


def simulate(scale: Scale, arm: str, exact: bool = False) -> tuple[Shell, list[Agent]]:
    shell = Shell(
        BrainConfig(
            hbm_bytes=hbm_bytes(scale, exact),
            host_bytes=scale.sessions * (scale.pages[1] + 40) * GEOMETRY.page_bytes,
            codec=CODEC,
            low_watermark=LOW_WATERMARK,
            high_watermark=HIGH_WATERMARK,
            sink_tokens=SINK_TOKENS,
            recent_tokens=RECENT_TOKENS,
            digest_share=DIGEST_SHARE,
            digest_layers=DIGEST_LAYERS,
            pins=(),
            predict=arm == "predicted",
            log_events=1,
        )
    )
    agents = []
    for number in range(scale.sessions):
        reader = Reader(np.random.default_rng((scale.seed, number, 1)), sum(scale.pages) // 2)
        agent = Agent(shell, reader, turns(scale.seed, number), lambda turn: hint_of(arm, turn), scale.pages)
        agents.append(agent)
        shell.live(agent.live(number * START_SECONDS))
    shell.run(scale.seconds)
    return shell, agents
