"""The clock of a session: decode steps, and how fast they come."""

from __future__ import annotations

import numpy as np
import pytest

from tests.daemon.test_scoring import a_state
from tierkv.daemon.sessions import Session


@pytest.fixture
def session() -> Session:
    one = next(iter(a_state("memdecay", np.random.default_rng(0), 1).sessions.values()))
    one.step, one.step_rate, one.stepped_at = 0, 0.0, 100.0
    return one


def test_steps_are_rated_by_the_time_they_took(session: Session) -> None:
    for index in range(1, 6):
        session.stepped(1, 100.0 + 0.1 * index)
    assert (session.step, session.step_rate) == (5, pytest.approx(10.0))


def test_steps_that_arrive_at_once_are_rated_as_if_they_had_come_one_by_one(session: Session) -> None:
    for burst in range(1, 30):
        for index in range(8):  # 8 steps of 0.1 s each, told together
            session.stepped(1, 100.0 + 0.8 * burst + 1e-4 * index)
    assert session.step_rate == pytest.approx(10.0, rel=0.02)


def test_a_pause_or_a_prompt_is_no_step(session: Session) -> None:
    session.stepped(1, 100.1)
    session.stepped(1, 130.0)
    session.stepped(0, 130.5)
    session.stepped(1, 130.6)
    assert session.step_rate == pytest.approx(10.0)
