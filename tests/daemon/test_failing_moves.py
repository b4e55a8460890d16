"""Claims about moves that fail, and pages that the codec refuses: the source stays, room is found elsewhere."""

from __future__ import annotations

import pytest

from tests.daemon.test_brain import FRAME, append, kinds, opened, world
from tierkv.daemon import events
from tierkv.protocol import Failure
from tierkv.table import Kind


@pytest.mark.parametrize("fails", [False, True])
def test_a_session_that_closes_while_its_pages_are_copied_gives_them_back_when_the_copies_end(
    fails: bool,
) -> None:
    w = world(hbm_frames=8, host_frames=50, backup="on_seal")
    session = opened(w)
    append(w, session, 3)
    assert len(w.moves) == 3
    w.close(session)
    numbers = w.brain.snapshot()
    assert numbers.sessions == 0
    state = 2 * 64 * 4  # a float32 for each channel of the keys
    assert (numbers.hbm_used, numbers.host_used) == (3 * FRAME + state, 3 * FRAME), "read and written still"
    for number in list(w.moves):
        w.fail_move(number, "io") if fails else w.finish_move(number)
    numbers = w.brain.snapshot()
    assert (numbers.hbm_used, numbers.host_used) == (0, 0)
    assert not w.brain.state.models


def test_a_failed_move_keeps_the_page_and_is_counted_by_reason() -> None:
    w = world(hbm_frames=6, host_frames=50)
    session = opened(w)
    append(w, session, 4)
    w.reserve(session, 2)
    while w.moves:
        w.fail_move(min(w.moves), "io")
    assert all(kind == Kind.EXACT for kind in kinds(session))
    failed = w.brain.snapshot().counters.failed_moves
    assert failed.total() >= 1 and {reason for _, _, reason in failed} == {"io"}


def test_a_page_that_the_codec_refuses_stays_exact_and_is_not_tried_again() -> None:
    w = world(hbm_frames=8, host_frames=0, backup="never")
    session = opened(w)
    append(w, session, 6)
    w.reserve(session, 2)
    for _ in range(20):
        for number, move in list(w.moves.items()):
            if isinstance(move, events.Quantize):
                w.fail_move(number, "non-finite")
            else:
                w.finish_move(number)
        w.now += 1.0
        w.reserve(session, 2)
    refused = w.brain.snapshot().counters.failed_moves["hbm", "quantized", "non-finite"]
    assert refused <= 6, "each page is tried once"


@pytest.mark.parametrize("budget_frames", [0, 6])
@pytest.mark.parametrize("codec", ["k3v2", "kivi2"])
def test_pages_that_are_not_finite_make_room_by_leaving_as_they_are(codec: str, budget_frames: int) -> None:
    """Forty of them in ten frames (or under a budget of six): exact copies in host memory stand for them."""
    w = world(hbm_frames=10, host_frames=200, codec=codec)
    session = opened(w, hbm_budget=budget_frames * FRAME)
    w.writes_poison = True
    append(w, session, 40)
    w.settle()
    assert Kind.QUANTIZED not in kinds(session)
    assert {row.host_kind for row in session.rows if row.kind == Kind.NONE} == {Kind.EXACT}
    counters = w.brain.snapshot().counters
    assert counters.dropped_pages.total() == 0
    assert 0 < sum(n for (_, _, why), n in counters.failed_moves.items() if why == "non-finite") <= 40


@pytest.mark.parametrize("budget_frames", [0, 8])
def test_pages_that_are_not_finite_stay_exact_among_others_that_become_low_bit(budget_frames: int) -> None:
    w = world(hbm_frames=10, host_frames=200)
    session = opened(w, hbm_budget=budget_frames * FRAME)
    for page in range(30):
        w.writes_poison = page % 3 == 0
        append(w, session, 1)
    w.settle()
    poisoned, others = kinds(session)[::3], [kind for i, kind in enumerate(kinds(session)) if i % 3]
    assert set(others) == {Kind.EXACT, Kind.QUANTIZED}, "no page leaves HBM in place of one that was refused"
    assert Kind.QUANTIZED not in poisoned
    assert all(row.host_kind == Kind.EXACT for row in session.rows[::3] if row.kind == Kind.NONE)


def test_a_codec_is_fitted_although_the_first_pages_are_not_finite() -> None:
    w = world(hbm_frames=24, host_frames=0, backup="never")
    broken, sound = opened(w), opened(w)
    w.writes_poison = True
    append(w, broken, 8)
    w.writes_poison = False
    append(w, sound, 60)
    w.settle()
    assert kinds(sound).count(Kind.QUANTIZED) > 30
    assert set(kinds(broken)) == {Kind.EXACT}


def test_moves_that_fail_are_waited_for_before_a_pool_is_called_full() -> None:
    w = world(hbm_frames=6, host_frames=200)
    session = opened(w)
    append(w, session, 4)
    for _ in range(20):
        result = w.reserve(session, 2)
        assert isinstance(result, Failure) and result.code == "backpressure", result
        w.now += 0.01
        for number in list(w.moves):
            w.fail_move(number, "io")
    w.now += 1.0
    append(w, session, 20)
    assert session.length == 96
