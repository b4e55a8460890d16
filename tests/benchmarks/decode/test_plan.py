"""What a run measures, and what it refuses."""

from __future__ import annotations

import pytest

from tierkv.benchmarks.decode import ARMS, DYNAMIC, MORE
from tierkv.benchmarks.decode.plan import plan
from tierkv.errors import ConfigError


def test_without_names_every_arm_runs_at_every_context_and_further_arms_at_batch_one() -> None:
    points = plan().points
    assert {(point.context, point.batch) for point in points} == {
        (context, batch) for context in (512, 1024, 2048, 4096, 8192) for batch in (1, 4)
    }
    assert all(set(point.arms) == {*ARMS, *(MORE if point.batch == 1 else ())} for point in points)


def test_the_peer_of_ratios_runs_where_only_another_arm_is_named() -> None:
    (point,) = plan([300], [2], ["hqq2"]).points
    assert (point.context, point.batch, point.arms) == (300, 2, (DYNAMIC, "hqq2"))


def test_prompts_are_read_through_pages_where_there_are_pages() -> None:
    assert plan([300], [1], ["hqq2"]).prefill is None
    assert plan([300], [1]).prefill == 300
    assert (plan().prefill, plan().prefills) == (4096, 3)
    assert plan(prefills=0).prefill is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"arms": ["tierkv"]}, r"'tierkv'.*tierkv-exact.*quanto2"),
        ({"codec": "k9v9"}, r"'k9v9'.*k3v2"),
        ({"pages": "int8"}, r"int8.*bfloat16"),
        ({"steps": 117}, "at most 116 steps"),  # 4 warm up; with the 121st a quantized cache could be full
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_can(given: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plan(**given)  # type: ignore[arg-type]
