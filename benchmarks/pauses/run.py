"""Runs of one arm, and what it measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from tierkv.benchmarks.pauses.agents import Reader, Turn, turns
from tierkv.benchmarks.pauses.bound import EXPECTED, ready
from tierkv.benchmarks.pauses.life import GEOMETRY, Agent
from tierkv.benchmarks.pauses.records import Record
from tierkv.benchmarks.pauses.shell import Shell
from tierkv.daemon.allocator import aligned
from tierkv.daemon.brain_config import BrainConfig
from tierkv.errors import ConfigError
from tierkv.hint_messages import Pause
from tierkv.quant import get

CODEC = "k3v2"
DIGEST_SHARE, LOW_WATERMARK, HIGH_WATERMARK = 0.1, 0.02, 0.04
DIGEST_LAYERS = 8
"""Of 32: so that digests of all cold pages find room."""

SINK_TOKENS, RECENT_TOKENS = 16, 16
IN_TRANSIT = 2
"""Exact pages of a session that runs besides: one that is written, one that becomes low-bit."""

SAMPLE_SECONDS = 1.0
FRAME_PAGES = 6
"""Low-bit pages that the frame of an exact one holds."""

START_SECONDS = 0.3
"""Between the first prompts of two sessions."""


ARMS = ("off", "predicted", "tool", "wrong", "exact")
EXACT_ROOM = ("off", "wrong")
"""Arms that also run with HBM for as many exact contexts."""


def choose(names: Sequence[str]) -> list[str]:
    """Those arms, or all. Raises `ConfigError` for one that does not exist."""
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise ConfigError(f"there is no arm {unknown[0]!r}; use one of {', '.join(ARMS)}")
    return [arm for arm in ARMS if arm in names or not names]


@dataclass(frozen=True)
class Scale:
    sessions: int = 64
    fits: int = 16
    """Sessions that HBM holds."""

    pages: tuple[int, int] = (40, 60)
    warm_up: float = 50.0
    seconds: float = 150.0
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

    def sample() -> None:
        paused = sum(agent.held for agent in agents if not agent.running)
        running = sum(agent.running for agent in agents)
        shell.samples.append((shell.now, running, paused / shell.brain.state.hbm.size))
        shell.after(SAMPLE_SECONDS, sample)

    sample()
    shell.run(scale.seconds)
    return shell, agents


def run(scale: Scale, arm: str, exact: bool) -> Record:
    """One arm in one room."""
    shell, agents = simulate(scale, arm, exact)
    resumed = [one for agent in agents for one in agent.resumed if one.at > scale.warm_up]
    late = [one.seconds for one in resumed if not one.ready]
    attended = [mass for agent in agents for at, mass in agent.attended if at > scale.warm_up]
    samples = [sample for at, *sample in shell.samples if at > scale.warm_up]
    running, held = (fmean(column) for column in zip(*samples, strict=True))
    set_share = fmean(one.set_share for one in resumed)
    counted = shell.brain.state.counters.resumes
    tools = {name: [one.ready for one in resumed if one.tool == name] for name in EXPECTED}
    bounded = None
    if arm in ("wrong", "tool"):
        pauses = [pause for agent in agents for pause in agent.pauses]
        sets = scale.fits * (1.0 if not exact else FRAME_PAGES) / set_share
        bounded = ready(arm, pauses, [one.at for one in resumed], sets, running)
    return Record(
        arm, "exact" if exact else "low-bit", len(resumed), fmean(one.ready for one in resumed),
        fmean(one.whole for one in resumed), bounded, fmean(one.held for one in resumed),
        fmean(one.mass for one in resumed), fmean(late) if late else 0.0, fmean(attended), held,
        shell.returned_bytes / scale.seconds, set_share, running,
        sum(n for (outcome, _), n in counted.items() if outcome == "ready") / counted.total() if counted else None,
        {name: fmean(found) for name, found in tools.items() if found},
    )  # fmt: skip
