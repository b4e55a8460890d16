"""The queue of promotions: properties of a pure function."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierkv.daemon.wants import NOBODY_WAITS, ranked

NOW = 10.0
want = st.tuples(
    st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0]),
    st.sampled_from([1, 2, 4, 1 << 20]),
    st.sampled_from([1.0, 9.0, NOW, 11.0, 12.0, NOBODY_WAITS]),
)


def order(wants: list[tuple[float, int, float]]) -> list[int]:
    mass, size, deadline = (np.array([one[i] for one in wants], float) for i in range(3))
    return ranked(mass.astype(np.float32), size.astype(np.int64), deadline, NOW).tolist()


def key(one: tuple[float, int, float]) -> tuple[bool, float, float]:
    """By plain arithmetic: what a step still waits for, mass a byte, what is due sooner."""
    mass, size, deadline = one
    waited = NOW <= deadline < NOBODY_WAITS
    return (not waited, -mass / size, deadline if waited else NOBODY_WAITS)


@given(st.lists(want, max_size=12))
def test_steps_come_first_then_mass_a_byte_then_what_is_due_sooner(
    wants: list[tuple[float, int, float]],
) -> None:
    assert order(wants) == sorted(range(len(wants)), key=lambda place: key(wants[place]))


def test_a_small_page_of_little_mass_comes_before_a_large_one_of_more() -> None:
    assert order([(0.5, 8, NOBODY_WAITS), (0.25, 2, NOBODY_WAITS)]) == [1, 0]


def test_what_came_too_late_for_its_step_is_like_any_other() -> None:
    assert order([(0.1, 1, 9.0), (0.2, 1, NOBODY_WAITS), (0.05, 1, 11.0)]) == [2, 1, 0]
