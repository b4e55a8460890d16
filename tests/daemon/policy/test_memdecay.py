"""MemDecay's equations against hand-computed numbers and a token-by-token loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.daemon.policy import TokenState
from tierkv.daemon.policy.decay import HALF_LIFE
from tierkv.daemon.policy.memdecay import MemDecay
from tierkv.regions import Region

FIGURE_2 = MemDecay(
    base={**dict.fromkeys(Region, 0.5), Region.SYSTEM: 1.0, Region.PLAN: 0.9, Region.USER: 0.6, Region.RETRIEVAL: 0.4},
    half_life={
        **dict.fromkeys(Region, 10.0),
        Region.SYSTEM: math.log(2) / 0.002, Region.PLAN: math.log(2) / 0.01,
        Region.USER: math.log(2) / 0.03, Region.RETRIEVAL: math.log(2) / 0.08,
    },
)  # fmt: skip
"""The paper's Figure 2: (b, lambda) = system 1.0, .002; plan .9, .01; user .6, .03; retrieval .4, .08."""


def state_of(policy: MemDecay, *regions: Region, step: float = 0) -> TokenState:
    state = policy.new_state()
    state.append(np.array(regions, np.int8), step)
    return state


@pytest.mark.parametrize(
    ("region", "age", "score"),
    [
        (Region.SYSTEM, 0, 1.0),
        (Region.SYSTEM, 100, math.exp(-0.2)),
        (Region.PLAN, 100, 0.9 * math.exp(-1.0)),
        (Region.USER, 100, 0.6 * math.exp(-3.0)),
        (Region.RETRIEVAL, 25, 0.4 * math.exp(-2.0)),
    ],
)
def test_equation_4_without_attention_is_exponential_decay(region: Region, age: float, score: float) -> None:
    assert state_of(FIGURE_2, region).token_scores(age)[0] == pytest.approx(score, rel=1e-5)


def test_equation_2_is_a_moving_average_with_rho() -> None:
    state = state_of(MemDecay(), Region.SYSTEM, Region.SYSTEM)
    for mass in (0.4, 0.1):
        state.observe(np.array([mass, 0.0], np.float32), step=0)
    # a = .9 * (.1 * .4) + .1 * .1 = .046; alpha = .5
    difference = state.token_scores(0)[0] - state.token_scores(0)[1]
    assert difference == pytest.approx(0.5 * 0.046, rel=1e-4)


def test_equation_3_refreshes_the_clock_at_twice_the_uniform_level_and_not_below() -> None:
    state = state_of(MemDecay(alpha=0.0), *[Region.USER] * 4)  # tau = 2 / 4
    state.observe(np.array([0.5, 0.49, 0.01, 0.0], np.float32), step=35)
    half_life = HALF_LIFE[Region.USER]
    scores = state.token_scores(35)
    assert scores[0] == pytest.approx(0.6)
    assert scores[1] == pytest.approx(0.6 * 0.5 ** (35 / half_life), rel=1e-5)


def test_tau_counts_attended_tokens_only() -> None:
    state = state_of(MemDecay(alpha=0.0), *[Region.USER] * 4)
    state.observe(np.array([0.9, 0.1, np.nan, np.nan], np.float32), step=10)  # tau = 2 / 2 = 1
    assert np.allclose(state.token_scores(10), 0.6 * 0.5 ** (10 / 35))


def test_equation_5_is_the_mean_over_a_pages_tokens() -> None:
    state = state_of(FIGURE_2, Region.SYSTEM, Region.PLAN, Region.USER)
    scores = state.page_scores(np.array([0, 2]), np.array([2, 1], np.int32), step=0)
    assert scores == pytest.approx([0.95, 0.6])


def test_half_lives_are_table_ii() -> None:
    state = state_of(MemDecay(alpha=0.0), *Region)
    for region, half_life in HALF_LIFE.items():
        now, later = state.token_scores(0)[region], state.token_scores(half_life)[region]
        assert later == pytest.approx(now / 2, rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 60), rounds=st.integers(0, 6))
def test_arrays_agree_with_the_equations_token_by_token(seed: int, tokens: int, rounds: int) -> None:
    rng = np.random.default_rng(seed)
    policy = MemDecay()
    regions = rng.integers(0, len(Region), tokens).astype(np.int8)
    state = policy.new_state()
    state.append(regions, step=0)
    importance, clock = [0.0] * tokens, [0.0] * tokens
    step = 0
    for _ in range(rounds):
        step += int(rng.integers(1, 20))
        mass = rng.dirichlet(np.full(tokens, 0.3)).astype(np.float32)
        mass[rng.random(tokens) < 0.2] = np.nan
        attended = [i for i in range(tokens) if not math.isnan(mass[i])]
        state.observe(mass, step)
        for i in attended:
            importance[i] = 0.9 * importance[i] + 0.1 * float(mass[i])
            if float(mass[i]) >= 2 / len(attended):
                clock[i] = step
    expected = [
        policy.base[Region(r)] * math.exp(-math.log(2) / policy.half_life[Region(r)] * (step + 4 - clock[i]))
        + 0.5 * importance[i]
        for i, r in enumerate(regions)
    ]
    assert state.token_scores(step + 4) == pytest.approx(expected, rel=1e-4, abs=1e-6)
