"""What each idea of memory does to lift's score, in numbers worked out by hand.

Four tokens, all far, with masses of which the lifts are 1.6, 1.2, .8 and .4.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tierkv.daemon import policy
from tierkv.daemon.policy import TokenState
from tierkv.daemon.policy.lift import MemDecayLift
from tierkv.regions import Region
from tierkv.study.memdecay.variants_memory import (
    AdaptiveRates,
    BiasCorrected,
    FastMemory,
    LifeState,
    PhaseConditioned,
    RegionFloors,
    Reuse,
)

U, P = Region.USER, Region.SCRATCHPAD
MASS = np.array([0.4, 0.3, 0.2, 0.1], np.float32)
X = np.array([1.6 / 2.6, 1.2 / 2.2, 0.8 / 1.8, 0.4 / 1.4])
BASE, HALF_LIFE = 0.6, 35.0  # of user


def observed(one: MemDecayLift, *steps: float, mass: np.ndarray = MASS) -> TokenState:
    state = one.new_state()
    state.append(np.full(len(mass), U, np.int8), 0)
    for step in steps:
        state.observe(mass, step)
    return state


def decayed(age: float) -> float:
    return BASE * 2 ** (-age / HALF_LIFE)


ALL_FAR = {"sink_tokens": 0, "near_tokens": 0, "rho": 0.99, "alpha": 4.0, "tau_factor": 2.0}


@pytest.mark.parametrize("kind", [FastMemory, BiasCorrected, RegionFloors, AdaptiveRates, Reuse])
def test_usage_and_clocks_are_those_of_lift(kind: type[MemDecayLift]) -> None:
    rng = np.random.default_rng(7)
    states = [one.new_state() for one in (kind(), policy.get("memdecay-lift"))]
    for step in range(1, 30):
        mass = rng.dirichlet(np.full(90 + step, 0.3)).astype(np.float32)
        for state in states:
            state.append(np.full(len(mass) - len(state), U, np.int8), step)
            state.observe(mass, step)
    np.testing.assert_allclose(states[0].columns[:2], states[1].columns, rtol=1e-4)
    assert len(set(states[0].columns[1].tolist())) > 10  # clocks did move


def test_what_is_near_or_a_sink_is_not_looked_at() -> None:
    state = observed(FastMemory(sink_tokens=1, near_tokens=1), 1)
    # Far are .3 and .2, of a mean of .25: lifts 1.2 and .8.
    assert state.columns[2] == pytest.approx([0, 0.1 * 1.2 / 2.2, 0.1 * 0.8 / 1.8, 0])


def test_the_fast_memory_outweighs_the_slow_one_soon() -> None:
    scores = observed(FastMemory(beta=0.5, **ALL_FAR), 1, 2).token_scores(2)
    # After two observations u = .0199 x and f = .19 x, of which half counts.
    assert scores == pytest.approx(decayed(2) + 4 * 0.095 * X, rel=1e-5)
    slow = observed(FastMemory(beta=0.1, **ALL_FAR), 1, 2).token_scores(2)
    assert slow == pytest.approx(decayed(2) + 4 * 0.0199 * X, rel=1e-5)


def test_bias_correction_makes_a_young_token_the_equal_of_an_old_one() -> None:
    one = BiasCorrected(**{**ALL_FAR, "alpha": 2.0})
    assert observed(one, 1).token_scores(8) == pytest.approx(decayed(8) + 2 * X, rel=1e-5)
    assert observed(one, *range(1, 9)).token_scores(8) == pytest.approx(decayed(8) + 2 * X, rel=1e-5)
    assert observed(one).token_scores(0) == pytest.approx([BASE] * 4)  # never seen: no usage


def test_a_floor_is_a_share_of_the_base_and_the_rest_is_scaled_into_what_is_above_it() -> None:
    state = RegionFloors(floor=0.1, alpha=4.0).new_state()
    state.append(np.array([Region.SYSTEM, U], np.int8), 0)
    # System: .1 + .9 * (1 / 5); user: .06 + .94 * (.6 / 5).
    assert state.token_scores(0) == pytest.approx([0.28, 0.1728])
    state.columns[0] = 0.25
    assert state.policy.importance(state, 0, slice(2)) == pytest.approx([0.9 / 5, 0.94 / 5])  # 4 * .25 = 1
    assert state.token_scores(0) == pytest.approx([0.28 + 0.9 / 5, 0.1728 + 0.94 / 5])


def test_rates_follow_from_lives_that_end() -> None:
    # Lifts 2.4, .3 and .3: the first token is refreshed each time, the others' lives end at step 16. Exposure is three
    # lives of 16 steps and 8 more steps of the first.
    one = AdaptiveRates(patience=16, prior=500, **ALL_FAR)
    state = observed(one, 8, 16, 24, mass=np.array([0.8, 0.1, 0.1], np.float32))
    assert isinstance(state, LifeState)
    assert state.expirations.tolist() == [0, 0, 2, 0, 0, 0, 0]
    assert state.exposure.tolist() == [0, 0, 56, 0, 0, 0, 0]
    rate = (500 * math.log(2) / HALF_LIFE + 2) / 556
    rates = one.rates_of(state)
    assert rates[U] == pytest.approx(rate)
    assert rates[P] == pytest.approx(math.log(2) / 16)  # none was seen: the prior's
    usage = state.columns[0, 1]
    assert state.token_scores(24)[1] == pytest.approx(BASE * math.exp(-rate * 24) + 4 * usage)


def test_a_token_is_late_only_by_its_own_longest_interval() -> None:
    one = Reuse(stretch=2, trend=0, **ALL_FAR)
    state = observed(one, 4, 44, 46, mass=np.array([0.8, 0.1, 0.1], np.float32))
    assert state.columns[2].tolist() == [40, 0, 0]  # refreshed after 4, 40 and 2 steps; the others never
    usage = state.columns[0]
    # The first: age 20 of a life of 80; the others: age 66 of the region's.
    expected = [BASE * math.exp(-20 / 80) + 4 * usage[0], *(decayed(66) + 4 * usage[1:])]
    assert state.token_scores(66) == pytest.approx(expected, rel=1e-5)


def test_a_token_that_is_looked_at_more_and_more_is_worth_more() -> None:
    state = observed(Reuse(trend=1, **ALL_FAR), 1)
    still = state.token_scores(1)
    assert still == pytest.approx(decayed(1) + 4 * 0.01 * X, rel=1e-5)  # one look is no trend
    state.observe(MASS[::-1].copy(), 2)
    x, y = X, X[::-1]
    fast, slow = (0.09 * x + 0.1 * y) / 0.19, (0.0099 * x + 0.01 * y) / 0.0199
    expected = decayed(2) + 4 * (0.0099 * x + 0.01 * y) + fast - slow
    assert state.token_scores(2) == pytest.approx(expected, rel=1e-4)


def test_a_look_counts_less_where_it_is_usual_in_this_phase() -> None:
    one = replace(PhaseConditioned(**ALL_FAR), share=0.5)
    state = observed(one, 1)
    usual = X.mean()  # user tokens, seen while user is written
    assert state.columns[0] == pytest.approx(0.01 * (X - 0.5 * (usual - 0.5)), rel=1e-4)
    state.append(np.array([P], np.int8), 2)
    # Lifts of .3, .2, .3, .1, .1: 1.5, 1, 1.5, .5 and .5. Another phase: what was usual before does not count.
    state.observe(np.array([0.3, 0.2, 0.3, 0.1, 0.1], np.float32), 2)
    y = np.array([0.6, 0.5, 0.6, 1 / 3])
    before = 0.01 * (X - 0.5 * (usual - 0.5))
    assert state.columns[0, :4] == pytest.approx(
        0.99 * before + 0.01 * (y - 0.5 * (y.mean() - 0.5)), rel=1e-4
    )
    assert state.columns[0, 4] == pytest.approx(0.01 * (1 / 3 - 0.5 * (1 / 3 - 0.5)), rel=1e-4)
