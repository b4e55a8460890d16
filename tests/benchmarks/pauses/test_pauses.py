"""The pauses benchmark: its agents, its bound and a small run."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tierkv.benchmarks.pauses import picture
from tierkv.benchmarks.pauses.agents import Reader, Turn, turns, working_set
from tierkv.benchmarks.pauses.bound import chance, ready
from tierkv.benchmarks.pauses.run import Scale, choose, run
from tierkv.benchmarks.pauses.table import render
from tierkv.errors import ConfigError

SMALL = Scale(sessions=6, fits=2, warm_up=5.0, seconds=16.0)


def test_every_arm_sees_the_same_turns() -> None:
    assert list(islice(turns(3, 1), 5)) == list(islice(turns(3, 1), 5))
    assert list(islice(turns(3, 1), 5)) != list(islice(turns(3, 2), 5))


def test_wrong_hints_are_off_by_a_log_normal_factor() -> None:
    found = list(islice(turns(0, 0), 2000))
    errors = np.log([turn.hint / turn.pause for turn in found])
    assert errors.mean() == pytest.approx(0.0, abs=0.05) and errors.std() == pytest.approx(0.5, rel=0.05)


def test_a_reader_keeps_what_it_attended_to_when_its_context_grows() -> None:
    reader = Reader(np.random.default_rng(0), 40)
    reader.grow(40)
    before = reader.shares()
    reader.grow(60)
    after = reader.shares()
    assert len(after) == 60 and after.sum() == pytest.approx(1.0)
    assert set(working_set(before)[:3].tolist()) <= set(working_set(after[:40])[:8].tolist())


def test_the_chance_to_resume_is_the_hazard_of_a_log_normal() -> None:
    """At the median: phi(0) / (spread x median x .5)."""
    turn = Turn(1.0, "search", 3.0, 10.0)
    assert chance("wrong", turn, 10.0) == pytest.approx(0.398942 / (0.5 * 10.0 * 0.5), rel=1e-4)
    assert chance("tool", turn, 4.0) == pytest.approx(0.398942 / (0.6 * 4.0 * 0.5), rel=1e-4)


def test_with_room_for_all_every_resume_is_ready_and_with_none_no_one() -> None:
    pauses = [(0.0, Turn(1.0, "search", 3.0 + n, 4.0)) for n in range(5)]
    resumes = [3.0 + n for n in range(5)]
    assert ready("wrong", pauses, resumes, room=8.0, running=2.0) == 1.0
    one = ready("wrong", pauses, resumes, room=3.0, running=2.0)
    assert 0.0 < one <= 1.0


def test_an_arm_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'oracle'.*exact"):
        choose(["oracle"])


def test_a_small_run_is_the_same_twice_and_is_drawn(tmp_path: Path) -> None:
    found = run(SMALL, "wrong", exact=False)
    assert found == run(SMALL, "wrong", exact=False)
    assert found.resumes > 0 and 0 <= found.whole <= found.ready <= 1 and found.mass <= 1
    picture.draw([found], tmp_path / "pauses.png")
    assert (tmp_path / "pauses.png").read_bytes().startswith(b"\x89PNG")
    assert render([found]).renderables
