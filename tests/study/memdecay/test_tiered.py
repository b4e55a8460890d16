"""The tiered arms over a real daemon, and what a run still has to do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tierkv import model_support
from tierkv.errors import ConfigError
from tierkv.study.memdecay import tiered
from tierkv.study.memdecay.recall import QUICK, Plan, choose, missing
from tierkv.study.memdecay.results import Probed, Results, fingerprint
from tierkv.study.memdecay.scenarios import build, load_scenarios

pytestmark = pytest.mark.model


@pytest.mark.slow
def test_a_quarter_of_the_bytes_answers_what_the_whole_cache_does() -> None:
    from tierkv.study.model import load_smollm2

    model, tokenizer = load_smollm2()
    (scenario,) = [s for s in load_scenarios("dev") if s.name == "library"]
    episode = build(scenario, 0, "short", tokenizer)
    geometry = model_support.geometry(model, tiered.DTYPE)
    with tiered.serving("short", 0.25, len(episode.tokens), geometry) as client:
        probed = tiered.answer(model, tokenizer, client, episode, 0.25, ("tiered",))
    assert [one.region for one in probed] == ["system", "user", "tool_out", "retrieval"]
    assert [one.right for one in probed] == [True] * 4  # as over the full cache
    assert all(0 < one.kept <= 0.25 * one.of for one in probed)
    assert (
        probed[0].of == len(episode.tokens) * 23_040
    )  # 30 layers, K and V, 3 heads, 64 dimensions, bfloat16


def test_what_is_there_is_not_done_again(tmp_path: Path) -> None:
    from tierkv.study.model import load_tokenizer

    tokenizer = load_tokenizer()
    results = Results(tmp_path / "a.jsonl")
    plan = QUICK._replace(split="dev")
    work = missing(plan, tokenizer, results)
    assert sum(bool(one.arms) for one in work) == len(load_scenarios("dev")) * 2  # tiers
    assert sum(bool(one.tiered) for one in work) == 4 * 3  # scenarios, budgets of the long tier
    assert not any(one.tiered for one in missing(plan._replace(tiered=()), tokenizer, results))
    done = work[0]
    arm, budget = done.arms[0]
    answer = Probed(
        done.episode.tier, arm.name, budget, done.episode.scenario, done.episode.variant, "user", True, 1, 1,
        fingerprint(arm.settings),
    )  # fmt: skip
    results.add([answer])
    rest = missing(plan, tokenizer, results)
    assert rest[0].arms == done.arms[1:] and rest[1:] == work[1:]


def test_a_whole_run_has_every_cell() -> None:
    from tierkv.study.model import load_tokenizer

    tokenizer = load_tokenizer()
    work = missing(Plan(), tokenizer, Results(Path("/nowhere/at/all")))
    assert sum(bool(one.arms) for one in work) == 8 * 3 * 2
    assert Counter(name for one in work for name in one.tiered) == {
        "tiered": 24 * 6, "tiered-low-bit": 24 * 6, "tiered-digests": 24 * 4,
    }  # fmt: skip
    # Of the long tier's budgets 5% has no room for digests, of the short tier's 25% has none.
    few = missing(
        choose(Plan(), True, list(tiered.ARMS), [0.25]), tokenizer, Results(Path("/nowhere/at/all"))
    )
    assert Counter(name for one in few for name in one.tiered) == dict.fromkeys(tiered.ARMS, 24)
    cells = {(one.episode.tier, one.budget) for one in work if one.tiered}
    assert cells == {
        ("short", 0.5),
        ("short", 0.25),
        ("long", 0.5),
        ("long", 0.25),
        ("long", 0.1),
        ("long", 0.05),
    }


@pytest.mark.parametrize(
    ("arms", "budgets", "said"),
    [
        (["tired"], None, "'tired' does not exist; use one of tiered, "),
        (None, [0.3], "budget 0.3; use one of 0.5"),
    ],
)
def test_what_no_tiered_arm_is_or_has_is_refused(
    arms: list[str] | None, budgets: list[float] | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        choose(Plan(), True, arms, budgets)
