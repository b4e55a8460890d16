"""Many sessions in one call against each one's own numpy, and the power of two against numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.daemon.policy.plain import Plain
from tests.daemon.policy.test_plain import lead
from tierkv.daemon import policy
from tierkv.daemon.addresses import address_of
from tierkv.daemon.policy import Policy
from tierkv.daemon.policy.exponential import exp2, score_sessions
from tierkv.numba_setup import kernel

IN_ONE_CALL = ["ema", "h2o", "memdecay", "memdecay-lift", "tova"]
CHANGED: dict[str, dict[str, object]] = {
    "memdecay": {"alpha": 3.0, "half_life": {"plan": float("inf"), "user": 0.5}},
    "memdecay-lift": {"sink_tokens": 2, "near_tokens": 5},
    "ema": {"a": 0.5, "beta": 0.02},
}


@kernel()
def powers(exponents: np.ndarray, out: np.ndarray) -> None:
    for i in range(len(out)):
        out[i] = exp2(exponents[i])


def test_the_power_of_two_is_that_of_numpy_within_a_millionth() -> None:
    exponents = np.concatenate([np.linspace(-126, 0, 400_001), -np.arange(127)]).astype(np.float32)
    out = np.empty_like(exponents)
    powers(exponents, out)
    assert np.abs(out / np.exp2(exponents.astype(np.float64)) - 1).max() < 4e-7
    assert (out[-127:] == 2.0 ** -np.arange(127)).all()  # whole exponents are exact


def test_what_is_below_the_smallest_normal_number_stays_there() -> None:
    exponents = np.array([-127, -1e4, -3e38, -np.inf], np.float32)
    out = np.empty_like(exponents)
    powers(exponents, out)
    assert (out == np.float32(2.0**-126)).all()


def test_the_policies_of_this_form_are_those_with_a_clock_or_a_sum() -> None:
    assert [name for name in sorted(policy.POLICIES) if policy.get(name).exponential] == IN_ONE_CALL


@pytest.mark.parametrize("aggregate", ["mean", "max", "top2", "relief"])
@pytest.mark.parametrize("name", IN_ONE_CALL)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 6), ahead=st.floats(-9, 5000, width=32))
def test_many_sessions_have_the_scores_of_each_alone(
    name: str, aggregate: str, seed: int, count: int, ahead: float
) -> None:
    for chosen in (policy.get(name), policy.get(name, **CHANGED.get(name, {}))):
        chosen = policy.get(name, **{**vars_of(chosen), "aggregate": aggregate})
        rng = np.random.default_rng(seed)
        lives = [lead(chosen.new_state(), Plain(), seed + i, int(rng.integers(1, 12))) for i in range(count)]
        states, steps = [life[0] for life in lives], np.array([life[2] + ahead for life in lives], np.float32)
        starts = [cuts(rng, len(state)) for state in states]
        tables = [(address_of(s), len(s), len(state)) for s, state in zip(starts, states, strict=True)]
        assert chosen.exponential is not None
        scores = score_sessions(
            chosen.exponential,
            chosen.aggregate,
            np.array([s.addresses for s in states]),
            np.array(tables),
            steps,
        )
        expected = [
            state.page_scores(s, np.diff([*s, len(state)]).astype(np.int32), float(step))
            for state, s, step in zip(states, starts, steps, strict=True)
        ]
        assert scores == pytest.approx(np.concatenate(expected), rel=2e-5, abs=2e-6)


def vars_of(chosen: Policy) -> dict[str, object]:
    return {key: value for key, value in vars(chosen).items() if key not in {"bases", "rates", "exponential"}}


def cuts(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """First tokens of pages: mostly 16 tokens each, some shorter."""
    sizes = np.where(rng.random(tokens) < 0.6, 16, rng.integers(1, 17, tokens))
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return starts[starts < tokens]


def test_no_session_has_no_scores() -> None:
    form = policy.get("memdecay").exponential
    assert form is not None
    none = np.zeros((0, 3), np.int64)
    assert score_sessions(form, "mean", none, none, np.zeros(0, np.float32)).shape == (0,)
