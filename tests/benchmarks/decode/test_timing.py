"""Steps in turn, blocks of them, and ratios."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tierkv.benchmarks.decode.arm import Arm
from tierkv.benchmarks.decode.plan import WARM_UP
from tierkv.benchmarks.decode.timing import LEAST_STEPS, block_of, blocks, interleave, ratio


def arm(name: str, log: list[tuple[str, list[list[int]]]], seconds: float = 0.0) -> Arm:
    def step(tokens: torch.Tensor) -> None:
        log.append((name, tokens.tolist()))
        time.sleep(seconds)

    return cast(Arm, SimpleNamespace(name=name, step=step))


def test_every_arm_takes_a_step_before_any_takes_the_next_and_all_see_the_same_tokens() -> None:
    log: list[tuple[str, Any]] = []
    timed = interleave([arm(name, log) for name in "abc"], 2, 50, steps=5, arm_seconds=60)
    assert [len(steps) for steps in timed.values()] == [5, 5, 5]
    rounds = [log[index : index + 3] for index in range(0, len(log), 3)]
    assert len(rounds) == WARM_UP + 5
    for taken in rounds:
        assert {name for name, _ in taken} == {"a", "b", "c"}
        assert taken[0][1] == taken[1][1] == taken[2][1]
    assert len({tuple(name for name, _ in taken) for taken in rounds}) > 1  # not always in one order
    assert all(len(tokens) == 2 and 2 <= tokens[0][0] < 50 for _, tokens in log)


def test_an_arm_that_takes_too_long_stops_after_the_least_steps_and_others_go_on() -> None:
    log: list[tuple[str, Any]] = []
    timed = interleave([arm("slow", log, 0.01), arm("fast", log)], 1, 9, steps=20, arm_seconds=0.01)
    assert len(timed["slow"]) == LEAST_STEPS and len(timed["fast"]) == 20
    assert min(timed["slow"]) >= 10  # milliseconds


def test_blocks_are_means_of_whole_blocks_and_of_everything_where_there_is_none() -> None:
    assert list(blocks([1.0, 3.0, 5.0, 7.0, 100.0], 2)) == [2.0, 6.0]
    assert list(blocks([1.0, 3.0], 8)) == [2.0]


def test_only_tierkv_is_measured_in_blocks() -> None:
    assert (block_of("tierkv-25", "dynamic"), block_of("hqq2", "dynamic")) == (8, 1)


def test_a_ratio_is_of_the_steps_that_both_took() -> None:
    figures = ratio([2.0, 4.0, 6.0], [1.0, 1.0, 1.0, 1.0, 90.0], 1)
    assert (figures["ratio"], figures["pairs"], figures["ours"], figures["peer"]) == (4.0, 3, 4.0, 1.0)
    with pytest.raises(ValueError, match="no step"):
        ratio([], [1.0], 1)


def test_an_observation_every_eighth_step_is_in_the_ratio() -> None:
    observed = [1.0] * 7 + [9.0]  # a mean of 2; a median of steps would not see it
    assert ratio(observed * 3, [1.0] * 24, 8)["ratio"] == 2.0
