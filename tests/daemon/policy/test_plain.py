"""Every policy's arrays against loops over tokens, through appends, cuts, copies and observations with holes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.daemon.policy.plain import Plain
from tierkv.daemon import policy
from tierkv.daemon.policy import TokenState
from tierkv.regions import Region

POLICIES = sorted(set(policy.POLICIES) - {"random"})  # chance has its own tests


def lead(state: TokenState, plain: Plain, seed: int, rounds: int) -> tuple[TokenState, Plain, int]:
    """The same random life for both; the copy goes on where one is taken. Returns them and the last step."""
    rng, step = np.random.default_rng(seed), 0
    for _ in range(rounds):
        step += int(rng.integers(0, 12))
        act = rng.choice(["append", "observe", "observe", "observe", "truncate", "copy"])
        if act == "append" or not len(state):
            regions = rng.integers(0, len(Region), int(rng.integers(1, 90))).astype(np.int8)
            state.append(regions, step)
            plain.append(regions.tolist(), step)
        elif act == "truncate":
            length = int(rng.integers(0, len(state) + 1))
            state.truncate(length)
            plain.truncate(length)
        elif act == "copy":
            old, old_plain = state, plain
            state, plain = state.copy(), plain.copy()
            old.observe(np.full(max(1, len(old)), 0.7, np.float32), step)  # must not be felt
            old_plain.truncate(0)
        else:
            known = int(rng.integers(1, len(state) + 1)) if rng.random() < 0.3 else len(state)
            mass = rng.dirichlet(np.full(known, 0.3)).astype(np.float32)
            if rng.random() < 0.5:
                mass[rng.random(known) < rng.random()] = np.nan
            if known > 1 and rng.random() < 0.2:
                mass[0] = 1 - np.nansum(mass[1:])  # a sink takes what is left
            state.observe(mass, step)
            plain.observe(mass.tolist(), step)
    return state, plain, step


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), rounds=st.integers(1, 40), ahead=st.floats(0, 500, width=32))
def test_arrays_agree_with_loops_over_tokens(name: str, seed: int, rounds: int, ahead: float) -> None:
    state, plain, step = lead(policy.get(name).new_state(), Plain(), seed, rounds)
    expected = plain.scores(name, step + ahead)
    assert len(state) == len(expected)
    assert state.token_scores(step + ahead) == pytest.approx(expected, rel=2e-4, abs=2e-6)


@pytest.mark.parametrize("name", POLICIES)
def test_they_agree_over_more_observations_than_any_window(name: str) -> None:
    state, plain = policy.get(name).new_state(), Plain()
    rng = np.random.default_rng(5)
    for one in (state, plain):
        one.append([Region.TOOL_OUT] * 120, 0)
    for step in range(100):
        mass = rng.dirichlet(np.full(120, 0.2)).astype(np.float32)
        mass[rng.integers(0, 120, 20)] = np.nan
        state.observe(mass, step)
        plain.observe(mass.tolist(), step)
    assert state.token_scores(150) == pytest.approx(plain.scores(name, 150), rel=2e-4, abs=2e-6)
