"""Each policy on numbers worked out by hand, or taken from where it is described (MemDecay has its own file)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tierkv.daemon import policy
from tierkv.daemon.policy import Policy, TokenState
from tierkv.daemon.policy.ema import Ema, verdict
from tierkv.daemon.policy.random import uniform
from tierkv.regions import Region


def state_of(chosen: Policy, tokens: int, step: float = 0, region: Region = Region.USER) -> TokenState:
    state = chosen.new_state()
    state.append(np.full(tokens, region, np.int8), step)
    return state


def observe(state: TokenState, *masses: list[float], step: float = 0) -> None:
    for mass in masses:
        state.observe(np.array(mass, np.float32), step)


def masses(tokens: int, rest: float, **given: float) -> list[float]:
    """`rest` each, but for `_5=.2`: token 5 has .2."""
    return [given.get(f"_{i}", rest) for i in range(tokens)]


# ema ---------------------------------------------------------------------------------------------------------


def test_the_moving_average_of_the_worked_example_starts_at_zero() -> None:
    state = state_of(Ema(), 1)
    observe(state, [0.45], [0.12], [0.30], [0.08], [0.35])
    # .09, .096, .1368, .12544, .170352
    assert state.explain(0, 1, step=0)["ema"] == pytest.approx(0.170352, rel=1e-6)


@pytest.mark.parametrize(
    ("ema", "steps", "priority"),
    [(0.1704, 50, 0.0404), (0.08, 2000, 0.7955), (0.85, 20, 0.003), (0.72, 3000, 0.266), (0.05, 10, 0.009),
     (0.03, 5000, 0.963)],
)  # fmt: skip
def test_priorities_are_those_of_the_examples_and_the_matrix(ema: float, steps: int, priority: float) -> None:
    state = state_of(Ema(a=0.5, tau_factor=1e9), 1)
    observe(state, [2 * ema])  # .5 * 2 ema + .5 * 0
    digits = 1e-4 if priority in (0.0404, 0.7955) else 5e-4
    assert 1 - state.token_scores(steps)[0] == pytest.approx(priority, abs=digits)
    told = state.explain(0, 1, steps)
    assert told["priority"] == pytest.approx(priority, abs=digits)
    assert told["recency"] == pytest.approx(math.exp(-steps / 1000))
    assert (told["steps"], told["ema"]) == (steps, pytest.approx(ema))


@pytest.mark.parametrize(
    ("ema", "steps", "cell"),
    [(0.85, 20, "keep"), (0.72, 3000, "watch"), (0.05, 10, "watch"), (0.03, 5000, "evict"), (0.08, 2000, "evict")],
)  # fmt: skip
def test_the_matrix_keeps_watches_and_evicts(ema: float, steps: float, cell: str) -> None:
    assert verdict(ema, steps) == cell


def test_an_access_is_twice_the_uniform_level() -> None:
    state = state_of(Ema(), 4)
    observe(state, [0.5, 0.49, 0.01, 0.0], step=100)  # 2 / 4
    assert state.explain(0, 1, step=130)["steps"] == 30
    assert state.explain(1, 1, step=130)["steps"] == 130


# memdecay-lift -------------------------------------------------------------------------------------------------


def lifting(**changed: float) -> Policy:
    """Everything is far and there are no sinks, unless said otherwise."""
    return policy.get("memdecay-lift", **{"sink_tokens": 0, "near_tokens": 0, **changed})


def test_lift_is_mass_over_the_uniform_level_of_what_is_far() -> None:
    state = state_of(policy.get("memdecay-lift"), 78)
    # Sinks and the newest 64 have .8. Ten others share .2, so .02 is the uniform level and .08 is lift 4.
    mass = [0.4 / 4] * 4 + [0.08] + [0.12 / 9] * 9 + [0.4 / 64] * 64
    observe(state, mass)
    told = state.explain(4, 1, step=0)
    assert told["usage"] == pytest.approx(0.02 * 4 / 5, rel=1e-4)
    assert told["importance"] == pytest.approx(24 * 0.02 * 4 / 5, rel=1e-4)
    assert told["relief"] == 0 and told["score"] == pytest.approx(0.6)  # a user token without age, alone
    for near_or_sink in (0, 3, 14, 77):
        assert state.explain(near_or_sink, 1, step=0)["usage"] == 0


def test_usage_averages_lifts_that_are_saturated_already() -> None:
    state = state_of(lifting(), 2)
    observe(state, [0.5, 0.5], [0.25, 0.75])  # lifts of the first: 1, then .5
    told = state.explain(0, 1, step=0)
    assert told["usage"] == pytest.approx(0.98 * 0.02 * (1 / 2) + 0.02 * (0.5 / 1.5), rel=1e-4)


def test_the_clock_of_lift_is_refreshed_from_four_times_the_uniform_level() -> None:
    state = state_of(lifting(alpha=0.0), 8)
    observe(state, [0.5, 0.49, 0.01, 0, 0, 0, 0, 0], step=35)  # lifts 4 and 3.92
    assert state.token_scores(35)[:2] == pytest.approx([0.6, 0.6 * 0.5], rel=1e-5)  # half-life of user: 35


def test_attention_rescues_an_old_token_by_lift_and_not_by_mass() -> None:
    """The flaw that MemDecay's paper names, and the remedy."""
    needed = {}
    for name in ("memdecay", "memdecay-lift"):
        state = state_of(policy.get(name), 1000, region=Region.TOOL_OUT)
        for step in range(0, 400, 8):
            # Nearly twice the rest, and below the clock.
            observe(state, masses(1000, 0.5 / 1000, _500=0.00095), step=step)
        scores = state.token_scores(400)
        needed[name] = scores[500] - scores[400]
    assert needed["memdecay"] < 0.001
    assert needed["memdecay-lift"] > 0.1


def test_a_page_is_worth_what_its_tokens_have_beyond_the_one_that_has_least() -> None:
    state = state_of(lifting(), 4)
    observe(state, [0.5, 0.25, 0.25, 0.0])  # lifts 2, 1, 1, 0
    mean = 24 * 0.02 * (2 / 3 + 1 / 2 + 1 / 2 + 0) / 4
    assert state.explain(0, 4, step=0)["score"] == pytest.approx(0.6 + mean)
    assert state.explain(0, 3, step=0)["score"] == pytest.approx(0.6 + mean * 4 / 3 - 24 * 0.02 / 2)


def test_what_all_tokens_of_a_page_have_alike_is_worth_nothing() -> None:
    even, uneven = state_of(lifting(), 8), state_of(lifting(), 8)
    observe(even, [0.2] * 4 + [0.05] * 4)
    observe(uneven, [0.2, 0.2, 0.2, 0.0] + [0.1] * 4)
    assert even.explain(0, 4, step=0)["score"] == pytest.approx(0.6)
    assert uneven.explain(0, 4, step=0)["score"] > 0.65


def test_without_anything_far_there_is_no_lift() -> None:
    state = state_of(policy.get("memdecay-lift"), 4)
    observe(state, [0.7, 0.1, 0.1, 0.1])
    assert state.token_scores(0) == pytest.approx([0.6] * 4)


# Baselines -----------------------------------------------------------------------------------------------------


def test_h2o_adds_up() -> None:
    state = state_of(policy.get("h2o"), 3)
    observe(state, [0.5, 0.25, 0.25], [0.75, np.nan, 0.25], [0.5])
    assert state.token_scores(0).tolist() == [1.75, 0.25, 0.5]


def test_streaming_keeps_the_first_four_and_then_the_latest() -> None:
    state = state_of(policy.get("streaming"), 100)
    kept = set(np.argsort(state.token_scores(0))[-14:].tolist())
    assert kept == {0, 1, 2, 3, *range(90, 100)}
    assert state.token_scores(0)[[99, 98, 90]] == pytest.approx([1, 1 / 2, 1 / 10])


def test_streaming_tells_a_million_positions_apart() -> None:
    scores = state_of(policy.get("streaming"), 1_000_000).token_scores(0)
    assert (np.diff(scores[4:]) > 0).all()


def test_tova_keeps_what_the_latest_query_attends_and_what_no_query_has_seen() -> None:
    state = state_of(policy.get("tova"), 3)
    observe(state, [0.9, 0.05, 0.05], [0.2, 0.7, 0.1])
    state.append(np.zeros(1, np.int8), 1)
    assert np.argsort(-state.token_scores(1)).tolist() == [3, 1, 0, 2]


def test_snapkv_pools_the_windows_mean_over_five_neighbours() -> None:
    state = state_of(policy.get("snapkv", window=2), 12)
    observe(state, masses(12, 0.0, _0=1.0), masses(12, 0.0, _4=0.5), masses(12, 0.0, _4=0.3, _9=0.7))
    scores = state.token_scores(0)
    # The last two observations give token 4 a mean of .4 and token 9, at the edge of the prefix, .35.
    fifth = [0.0, 0.0, 0.08, 0.08, 0.08, 0.08, 0.08, 0.07]
    assert scores[:8] == pytest.approx(fifth, abs=1e-6)
    assert scores[8:10] == pytest.approx(
        [0.35 / 4, 0.35 / 3], abs=1e-6
    )  # 6 to 9 and 7 to 9: the prefix ends there
    assert scores[10:].tolist() == [2.0, 2.0]


def test_full_tells_nothing_apart_and_demotes_nothing_by_itself() -> None:
    chosen = policy.get("full")
    state = state_of(chosen, 50)
    observe(state, masses(50, 0.01, _7=0.5))
    assert set(state.token_scores(90).tolist()) == {1.0}
    assert chosen.thresholds.quantize_below <= 1.0 <= chosen.thresholds.promote_above


# random --------------------------------------------------------------------------------------------------------


def test_chance_spares_four_sinks_and_the_latest_sixteen() -> None:
    scores = state_of(policy.get("random"), 100).token_scores(0)
    assert set(scores[:4].tolist()) == {3.0} and set(scores[84:].tolist()) == {2.0}
    assert (scores[4:84] < 1).all() and (scores[4:84] >= 0).all()


def test_chance_is_the_same_for_a_seed_and_another_for_another() -> None:
    one, same, other = (state_of(policy.get("random", seed=s), 200).token_scores(0) for s in (7, 7, 8))
    assert np.array_equal(one, same)
    assert np.count_nonzero(one[4:184] == other[4:184]) == 0


def test_a_token_keeps_its_chance_when_others_come() -> None:
    state = state_of(policy.get("random"), 100)
    before = state.token_scores(0)[4:84]
    state.append(np.zeros(500, np.int8), 9)
    assert np.array_equal(before, state.token_scores(9)[4:84])


def test_chance_is_uniform_and_neighbours_do_not_depend_on_each_other() -> None:
    """Tenths of a million draws hold 100,000 each, give or take 300 (one sigma); correlations are about 1e-3."""
    draws = uniform(3, np.arange(1_000_000))
    tenths = np.histogram(draws, bins=10, range=(0, 1))[0]
    assert np.abs(tenths - 100_000).max() < 1_500
    assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 5e-3
    assert abs(np.corrcoef(draws, uniform(4, np.arange(1_000_000)))[0, 1]) < 5e-3


def test_the_hash_is_splitmix64() -> None:
    """The finalizer's first outputs from state 0, as its author publishes them."""
    from tierkv.daemon.policy.random import GOLDEN, _mix

    states = (np.arange(1, 4, dtype=np.uint64)) * np.uint64(GOLDEN)
    assert [hex(x) for x in _mix(states).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]
