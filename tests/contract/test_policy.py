"""What every score policy promises."""

from __future__ import annotations

import numpy as np
import pytest

from tierkv.daemon import policy
from tierkv.daemon.policy import Policy, TokenState
from tierkv.errors import ConfigError
from tierkv.regions import Region


@pytest.fixture(params=sorted(policy.POLICIES))
def chosen(request: pytest.FixtureRequest) -> Policy:
    return policy.get(request.param)


def filled(chosen: Policy, tokens: int = 40) -> TokenState:
    state = chosen.new_state()
    regions = np.random.default_rng(1).integers(0, len(Region), tokens).astype(np.int8)
    state.append(regions[:25], step=0)
    state.append(regions[25:], step=3)
    return state


def pages(tokens: int, size: int = 8) -> tuple[np.ndarray, np.ndarray]:
    starts = np.arange(0, tokens, size, dtype=np.int64)
    return starts, np.minimum(size, tokens - starts).astype(np.int32)


class TestPolicyContract:
    def test_one_finite_score_a_page(self, chosen: Policy) -> None:
        scores = filled(chosen).page_scores(*pages(40), step=5)
        assert scores.shape == (5,) and scores.dtype == np.float32 and np.isfinite(scores).all()

    def test_no_page_no_score(self, chosen: Policy) -> None:
        nothing = chosen.new_state().page_scores(np.zeros(0, np.int64), np.zeros(0, np.int32), step=0)
        assert nothing.shape == (0,)

    def test_scoring_changes_nothing(self, chosen: Policy) -> None:
        state = filled(chosen)
        first = state.page_scores(*pages(40), step=9)
        assert np.array_equal(first, state.page_scores(*pages(40), step=9))

    def test_a_copy_goes_its_own_way(self, chosen: Policy) -> None:
        state = filled(chosen)
        before = state.page_scores(*pages(40), step=4)
        twin = state.copy()
        twin.observe(np.full(40, 0.5, np.float32), step=4)
        twin.append(np.zeros(10, np.int8), step=4)
        assert np.array_equal(before, state.page_scores(*pages(40), step=4)) and len(state) == 40

    def test_truncate_forgets_the_tail_only(self, chosen: Policy) -> None:
        state = filled(chosen)
        before = state.page_scores(*pages(40), step=4)
        state.truncate(24)
        assert len(state) == 24
        assert np.array_equal(before[:3], state.page_scores(*pages(24), step=4))

    def test_tokens_appended_after_a_truncate_start_fresh(self, chosen: Policy) -> None:
        state, fresh = filled(chosen), filled(chosen)
        state.observe(np.full(40, 0.9, np.float32), step=3)
        state.truncate(0)
        fresh.truncate(0)
        for one in (state, fresh):
            one.append(np.full(8, Region.USER, np.int8), step=6)
        assert np.array_equal(state.page_scores(*pages(8), step=7), fresh.page_scores(*pages(8), step=7))

    def test_unattended_tokens_are_not_observed(self, chosen: Policy) -> None:
        state, untouched = filled(chosen), filled(chosen)
        state.observe(np.full(40, np.nan, np.float32), step=5)
        assert np.array_equal(
            state.page_scores(*pages(40), step=6), untouched.page_scores(*pages(40), step=6)
        )

    def test_an_observation_may_cover_fewer_tokens_than_there_are(self, chosen: Policy) -> None:
        state = filled(chosen)
        state.observe(np.full(16, 1 / 16, np.float32), step=5)
        assert np.isfinite(state.page_scores(*pages(40), step=6)).all()


def test_unknown_policies_are_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="memdecay"):
        policy.get("forgetful")
