"""The demo's worker process: connects to the daemon, runs every episode in every arm, tells what it does on stdout.

    python -m tierkv.study.worker --state-dir DIR

One JSON message a line: `Ready` when model and daemon are there, `Progress` after each replay and answer, `Finished`
at the end. Everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from tierkv.study.arms import ARMS, EpisodeResult, Worker, run_episode
from tierkv.study.episodes import NAMES, load_episode, spans
from tierkv.study.processes import CONNECT_SECONDS
from tierkv.study.report import (
    ArmReport,
    AttentionRecall,
    TierReport,
    arm_reports,
    attention_recall,
    tier_reports,
)


class Ready(msgspec.Struct, tag="ready"):
    context_tokens: int  # of the shortest episode


class Progress(msgspec.Struct, tag="progress"):
    arm: str
    episode: str


class Finished(msgspec.Struct, tag="finished"):
    arms: dict[str, ArmReport]
    tiers: dict[str, TierReport]
    attention_recall: AttentionRecall
    misses: list[str]
    hbm_bytes_peak: int
    quantized_bytes_peak: int
    recalled_pages: int


Message = Ready | Progress | Finished


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tierkv.study.worker", description=__doc__)
    parser.add_argument("--state-dir", type=Path, required=True, help="of the daemon")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves them alone")
    parser.add_argument("--episodes", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--arms", nargs="*", default=ARMS, choices=ARMS)
    options = parser.parse_args(arguments)

    import torch

    import tierkv
    from tierkv.study.model import load_smollm2

    if options.threads:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_smollm2()
    episodes = [load_episode(name) for name in options.episodes]
    with tierkv.connect(options.state_dir, CONNECT_SECONDS, reserve_ahead=0) as client:
        worker = Worker(model, tokenizer, client, int(client.stats()["hbm_capacity_bytes"]))
        say(Ready(min(sum(len(s.tokens) for s in spans(e, tokenizer)) for e in episodes)))
        results = []
        for episode in episodes:
            for arm in options.arms:
                progress = Progress(arm, episode.name)
                results.append(run_episode(worker, episode, arm, lambda progress=progress: say(progress)))  # type: ignore[misc]
        numbers = client.stats()
    say(
        Finished(
            arm_reports(results),
            tier_reports(results),
            attention_recall(results),
            [line for result in results for line in missed(result)],
            int(numbers["hbm_peak_bytes"]),
            max((result.bytes_peak for result in results), default=0),
            int(numbers["recalled_pages"]),
        )
    )


def missed(result: EpisodeResult) -> list[str]:
    """A line for each wrong answer."""
    return [
        f"{result.arm}, {result.episode}, {a.probe.region.label}: {a.text!r} instead of {a.probe.gold!r}"
        for a in result.answers
        if not a.correct
    ]


def say(message: Message) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
