"""Claims about working sets and about when a paused session is near."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.daemon.absence import EARLY, LATE, Absence
from tierkv.daemon.durations import Duration
from tierkv.daemon.prediction import LEAST_KNOWN, USUAL, Silences
from tierkv.daemon.working import most_attended

masses = st.lists(st.floats(0, 1, width=32), max_size=40).map(lambda values: np.array(values, np.float32))


@given(masses, st.sampled_from([0.5, 0.9, 1.0]))
def test_a_working_set_holds_its_share_and_no_smaller_one_does(mass: np.ndarray, share: float) -> None:
    chosen = most_attended(mass, share)
    total = float(mass.sum(dtype=np.float64))
    held = float(mass[chosen].sum(dtype=np.float64))
    if total == 0:
        assert not len(chosen)
        return
    assert held >= share * total * (1 - 1e-6)
    assert held - float(mass[chosen].min()) < share * total
    assert len(set(chosen.tolist())) == len(chosen)
    left = np.delete(mass, chosen)
    assert left.max(initial=0) <= mass[chosen].min()


def test_nine_tenths_of_ten_equal_pages_are_nine() -> None:
    assert most_attended(np.full(10, 0.1, np.float32), 0.9).tolist() == list(range(9))


def absence(median: float, spread: float = 0.5) -> Absence:
    made = Absence(0.0, "", -1.0, "hinted", Duration(median, spread), np.zeros(0, np.int64), 0)
    made.look(0.0)
    return made


@pytest.mark.parametrize("median", [2.0, 30.0, 600.0])
def test_a_session_is_near_between_its_early_and_late_percentiles(median: float) -> None:
    """A log-normal of spread .5: five of a hundred resume before exp(-1.645 / 2) medians, 99 before exp(2.326 / 2)."""
    assert (EARLY, LATE) == (0.05, 0.99)
    paused = absence(median)
    for share, near in ((0.43, False), (0.45, True), (1.0, True), (3.19, True), (3.21, False)):
        paused.look(share * median)
        paused.approach(share * median, 0.0)
        assert paused.near is near, share


def test_a_session_that_is_near_stays_it_though_less_is_to_be_moved() -> None:
    """Else it would be near while pages lie cold, and not once they are back."""
    paused = absence(100.0)
    paused.approach(40.0, ahead=5.0)
    assert paused.near
    paused.approach(40.5, ahead=0.1)
    assert paused.near


def test_silences_are_those_of_all_until_a_session_has_enough_of_its_own() -> None:
    silences = Silences()
    assert silences.expect(1) == pytest.approx(USUAL)
    for _ in range(60):
        silences.saw(1, 5.0)
    assert silences.expect(2).median == pytest.approx(5.0, rel=0.05)
    for _ in range(LEAST_KNOWN - 1):
        silences.saw(2, 80.0)
    before = silences.expect(2)
    silences.saw(2, 80.0)
    assert silences.expect(2).median > 1.5 * before.median
    assert silences.expect(1).median < 10.0


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e9)), max_size=60))
def test_what_is_expected_of_a_silence_is_a_positive_finite_duration(seen: list[tuple[int, float]]) -> None:
    silences = Silences()
    for session, seconds in seen:
        silences.saw(session, seconds)
    for session in range(4):
        median, spread = silences.expect(session)
        assert 0 < median < np.inf and 0 < spread <= 2.0
