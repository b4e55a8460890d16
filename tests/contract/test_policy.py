"""What every score policy promises."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from tierkv.daemon import policy
from tierkv.daemon.policy import Policy, TokenState
from tierkv.errors import ConfigError
from tierkv.regions import Region


@pytest.fixture(params=sorted(policy.POLICIES))
def chosen(request: pytest.FixtureRequest) -> Policy:
    return policy.get(request.param)


REGIONS = np.random.default_rng(1).integers(0, len(Region), 40).astype(np.int8)


def filled(chosen: Policy, tokens: int = 40) -> TokenState:
    state = chosen.new_state()
    state.append(REGIONS[: min(25, tokens)], step=0)
    state.append(REGIONS[25:tokens], step=3)
    return state


def observed(chosen: Policy, tokens: int = 40, rounds: int = 6) -> TokenState:
    state, rng = filled(chosen, tokens), np.random.default_rng(2)
    for step in range(4, 4 + rounds):
        state.observe(rng.dirichlet(np.full(tokens, 0.3)).astype(np.float32), step)
    return state


def pages(tokens: int, size: int = 8) -> tuple[np.ndarray, np.ndarray]:
    starts = np.arange(0, tokens, size, dtype=np.int64)
    return starts, np.minimum(size, tokens - starts).astype(np.int32)


class TestPolicyContract:
    def test_one_finite_score_a_token_and_a_page(self, chosen: Policy) -> None:
        for state in (filled(chosen), observed(chosen)):
            for scores, count in ((state.page_scores(*pages(40), step=5), 5), (state.token_scores(5), 40)):
                assert scores.shape == (count,) and scores.dtype == np.float32 and np.isfinite(scores).all()

    def test_no_page_no_score(self, chosen: Policy) -> None:
        nothing = chosen.new_state()
        assert nothing.page_scores(np.zeros(0, np.int64), np.zeros(0, np.int32), step=0).shape == (0,)
        assert nothing.token_scores(0).shape == (0,)

    def test_scoring_changes_nothing(self, chosen: Policy) -> None:
        state = observed(chosen)
        first = state.page_scores(*pages(40), step=9)
        state.token_scores(20)
        state.explain(0, 8, step=30)
        assert np.array_equal(first, state.page_scores(*pages(40), step=9))

    def test_a_page_has_the_mean_of_its_tokens(self, chosen: Policy) -> None:
        state = observed(policy.get(chosen.name, aggregate="mean"))
        tokens = state.token_scores(12)
        means = [tokens[start : start + 8].mean() for start in range(0, 40, 8)]
        assert state.page_scores(*pages(40), step=12) == pytest.approx(means, rel=1e-5)

    def test_pages_may_be_some_of_them_in_any_order(self, chosen: Policy) -> None:
        state = observed(policy.get(chosen.name, aggregate="mean"))
        tokens = state.token_scores(12)
        starts, counts = np.array([30, 5, 6]), np.array([10, 1, 7], np.int32)
        expected = [tokens[30:40].mean(), tokens[5], tokens[6:13].mean()]
        assert state.page_scores(starts, counts, step=12) == pytest.approx(expected, rel=1e-5)

    def test_a_copy_goes_its_own_way(self, chosen: Policy) -> None:
        state = observed(chosen)
        before = state.page_scores(*pages(40), step=12)
        twin = state.copy()
        assert np.array_equal(before, twin.page_scores(*pages(40), step=12))
        twin.observe(np.full(40, 0.5, np.float32), step=12)
        twin.append(np.zeros(200, np.int8), step=12)
        assert np.array_equal(before, state.page_scores(*pages(40), step=12)) and len(state) == 40

    def test_the_original_goes_its_own_way_too(self, chosen: Policy) -> None:
        state = observed(chosen)
        twin = state.copy()
        before = twin.page_scores(*pages(40), step=12)
        state.truncate(3)
        state.append(np.zeros(200, np.int8), step=12)
        state.observe(np.full(203, 0.5, np.float32), step=12)
        assert np.array_equal(before, twin.page_scores(*pages(40), step=12)) and len(twin) == 40

    def test_truncate_leaves_what_the_first_tokens_would_be_alone(self, chosen: Policy) -> None:
        state, short = filled(chosen), filled(chosen, 30)
        state.truncate(30)
        assert len(state) == 30
        assert np.array_equal(state.token_scores(4), short.token_scores(4))

    def test_truncate_to_more_than_there_is_changes_nothing(self, chosen: Policy) -> None:
        state = observed(chosen)
        before = state.token_scores(12)
        state.truncate(41)
        assert len(state) == 40 and np.array_equal(before, state.token_scores(12))

    def test_tokens_appended_after_a_truncate_start_fresh(self, chosen: Policy) -> None:
        state, fresh = filled(chosen), filled(chosen)
        state.observe(np.full(40, 0.9, np.float32), step=3)
        state.truncate(0)
        fresh.truncate(0)
        for one in (state, fresh):
            one.append(np.full(8, Region.USER, np.int8), step=6)
        assert np.array_equal(state.page_scores(*pages(8), step=7), fresh.page_scores(*pages(8), step=7))

    def test_appending_at_once_or_bit_by_bit_is_the_same(self, chosen: Policy) -> None:
        whole, parts = chosen.new_state(), chosen.new_state()
        regions = np.resize(REGIONS, 300)
        whole.append(regions, step=2)
        for part in np.split(regions, [1, 2, 63, 64, 65, 200]):
            parts.append(part, step=2)
        assert np.array_equal(whole.token_scores(9), parts.token_scores(9))

    @pytest.mark.parametrize("nothing", [np.nan, np.inf, -np.inf])
    def test_unattended_tokens_are_not_observed(self, chosen: Policy, nothing: float) -> None:
        state, untouched = filled(chosen), filled(chosen)
        state.observe(np.full(40, nothing, np.float32), step=5)
        state.observe(np.zeros(0, np.float32), step=5)
        assert np.array_equal(
            state.page_scores(*pages(40), step=6), untouched.page_scores(*pages(40), step=6)
        )

    def test_an_observation_may_cover_fewer_tokens_than_there_are(self, chosen: Policy) -> None:
        state = filled(chosen)
        state.observe(np.full(16, 1 / 16, np.float32), step=5)
        assert np.isfinite(state.page_scores(*pages(40), step=6)).all()

    def test_an_observation_may_cover_more_tokens_than_are_left(self, chosen: Policy) -> None:
        state = filled(chosen)
        state.truncate(10)
        state.observe(np.full(40, 1 / 40, np.float32), step=5)
        assert len(state) == 10 and np.isfinite(state.token_scores(6)).all()

    def test_scores_stay_finite_far_ahead_and_behind(self, chosen: Policy) -> None:
        state = observed(chosen)
        for step in (0.0, 3.5, 1e7):
            assert np.isfinite(state.token_scores(step)).all()

    def test_more_attention_is_never_worth_less(self, chosen: Policy) -> None:
        state = chosen.new_state()
        state.append(np.full(160, Region.USER, np.int8), step=0)
        mass = np.full(160, 0.5 / 150, np.float32)
        mass[60:70] = 0.05
        for step in range(1, 20):
            state.observe(mass, step)
        scores = state.token_scores(40)
        positions_only = {"streaming", "random", "full"}
        assert scores[60:70].min() > scores[90:100].max() or chosen.name in positions_only

    def test_an_explanation_is_numbers_and_ends_with_the_pages_score(self, chosen: Policy) -> None:
        state = observed(chosen)
        told = state.explain(8, 8, step=12)
        assert list(told)[-1] == "score"
        assert told["score"] == pytest.approx(state.page_scores(*pages(40), step=12)[1])
        assert all(type(value) is float and np.isfinite(value) for value in told.values())

    def test_thresholds_are_in_order(self, chosen: Policy) -> None:
        own = chosen.thresholds
        assert own.drop_below <= own.offload_below <= own.quantize_below <= own.promote_above

    def test_it_is_found_by_its_name_with_its_defaults(self, chosen: Policy) -> None:
        assert policy.get(chosen.name) == type(chosen)() == chosen

    def test_the_largest_or_the_two_largest_may_stand_for_the_page(self, chosen: Policy) -> None:
        starts, counts = np.array([0, 11, 39]), np.array([11, 16, 1], np.int32)
        tokens = observed(chosen).token_scores(12)
        sorted_pages = [np.sort(tokens[s : s + c])[::-1] for s, c in zip(starts, counts, strict=True)]
        for aggregate, size in (("max", 1), ("top2", 2)):
            state = observed(policy.get(chosen.name, aggregate=aggregate))
            expected = [page[:size].mean() for page in sorted_pages]
            assert state.page_scores(starts, counts, step=12) == pytest.approx(expected, rel=1e-5)

    def test_the_least_importance_may_be_taken_off_the_mean(self, chosen: Policy) -> None:
        starts, counts = np.array([0, 11, 39]), np.array([11, 16, 1], np.int32)
        state = observed(policy.get(chosen.name, aggregate="relief"))
        scores, given = state.token_scores(12), chosen.importance(state, 12, slice(0, 40))
        expected = [
            scores[s : s + c].mean() - given[s : s + c].min() for s, c in zip(starts, counts, strict=True)
        ]
        assert state.page_scores(starts, counts, step=12) == pytest.approx(expected, rel=1e-5, abs=1e-6)

    def test_what_attention_gave_is_no_more_than_the_score(self, chosen: Policy) -> None:
        state = observed(chosen)
        assert (chosen.importance(state, 12, slice(3, 30)) <= state.token_scores(12)[3:30] + 1e-6).all()

    def test_unknown_settings_are_named_with_the_known_ones(self, chosen: Policy) -> None:
        with pytest.raises(ConfigError, match="sharpness") as refused:
            policy.get(chosen.name, sharpness=3)
        assert all(field.name in str(refused.value) for field in fields(chosen))


def test_unknown_policies_are_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="memdecay"):
        policy.get("forgetful")


def test_the_policies_are_those_of_the_comparison() -> None:
    names = "memdecay memdecay-lift ema h2o streaming random tova snapkv full"
    assert sorted(policy.POLICIES) == sorted(names.split())
