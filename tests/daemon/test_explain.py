"""What `explain` says of a page is so, and what it says would move the page next is what moves it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.daemon.test_brain import FRAME, append, opened, reserve, world
from tests.stateful.world import WorkerSession, World
from tierkv.daemon import events
from tierkv.daemon.outlook import BECAUSE
from tierkv.daemon.pages import REASONS
from tierkv.daemon.policy import POLICIES, Thresholds
from tierkv.errors import RequestError, UnknownSession
from tierkv.protocol import Explained, Replica, Threshold
from tierkv.regions import Region, Run

LEVELS = Thresholds(quantize_below=0.5, offload_below=0.3, drop_below=0.1, promote_above=0.9)


def explain(w: World, session: WorkerSession, page: int) -> Explained:
    return w.brain.explain(session.id, page)


def decode(w: World, session: WorkerSession, steps: int) -> None:
    for _ in range(steps):
        if not session.tail_open:
            reserve(w, session)
        w.now += 0.1  # a step is told of when it is over
        assert w.write(session, [Run(Region.SCRATCHPAD, 1)], 1) is not None
        w.settle()


def test_a_page_is_named_by_its_row_or_by_any_of_its_tokens() -> None:
    w = world(hbm_frames=20, host_frames=20)
    session = opened(w)
    append(w, session, 2, Region.SYSTEM)
    reserve(w, session)
    w.write(session, [Run(Region.USER, 3)], 0)
    told = explain(w, session, 2)
    assert (told.page, told.pages, told.start, told.tokens, told.region, told.open) == (
        2,
        3,
        8,
        3,
        "user",
        True,
    )
    assert told.id == session.rows[2].page
    assert all(w.brain.explain(session.id, token=token) == told for token in (8, 9, 10))
    assert told.next == ["nothing while it is open: it takes 1 more tokens, or the next region closes it"]


def test_a_page_that_does_not_exist_is_refused_and_the_message_helps() -> None:
    w = world(hbm_frames=20, host_frames=20)
    with pytest.raises(UnknownSession, match="session 5 is not open; open: none"):
        w.brain.explain(5, 0)
    session = opened(w)
    with pytest.raises(RequestError, match="has 0 pages"):
        explain(w, session, 0)
    append(w, session, 2)
    with pytest.raises(UnknownSession, match=f"open: {session.id}$"):
        w.brain.explain(5, 0)
    with pytest.raises(RequestError, match="has 2 pages, from 0 on; not page 2"):
        explain(w, session, 2)
    with pytest.raises(RequestError, match="has 8 tokens, from 0 on; not token 8"):
        w.brain.explain(session.id, token=8)
    for page, token in ((-1, -1), (0, 0)):
        with pytest.raises(RequestError, match="either a page or a token"):
            w.brain.explain(session.id, page, token)


def test_score_terms_thresholds_and_rank_of_memdecay() -> None:
    """MemDecay's base values and half-lives (Fig. 2, Table II): system 1, user .6 with 35 steps, scratchpad .25."""
    w = world(hbm_frames=40, host_frames=40, thresholds=LEVELS)
    session = opened(w)
    append(w, session, 1, Region.SYSTEM)
    append(w, session, 1, Region.USER)
    append(w, session, 1, Region.SCRATCHPAD)
    assert [explain(w, session, page).score for page in range(3)] == pytest.approx([1.0, 0.6, 0.25])
    assert [explain(w, session, page).rank for page in range(3)] == [3, 2, 1]
    decode(w, session, 35)
    assert explain(w, session, 1).score == pytest.approx(0.3)  # half of .6 after one half-life, unattended
    decode(w, session, 35)
    told = explain(w, session, 1)
    assert told.score == pytest.approx(0.15)
    terms = {"base": 0.6, "age": 70, "half_life": 35, "decayed": 0.15, "importance": 0}
    assert told.terms == pytest.approx(terms)
    assert told.thresholds == {
        "quantize_below": Threshold(0.5, True),
        "offload_below": Threshold(0.3, True),
        "drop_below": Threshold(0.1, False),
        "promote_above": Threshold(0.9, False),
    }
    assert (told.step, told.clock, told.scored_by, told.policy) == (70, 70.0, session.id, "memdecay")


def test_a_paused_sessions_clock_runs_by_the_wall_and_that_is_said() -> None:
    w = world(hbm_frames=20, host_frames=20)
    session = opened(w)
    append(w, session, 1)
    decode(w, session, 5)  # one step in .1 s
    w.now += 60.0
    w.feed(events.Tick())
    told = explain(w, session, 0)
    assert told.step == 5
    assert told.clock == pytest.approx(5 + 60.0 * 10, rel=0.01)


def test_every_guard_is_named_with_what_it_holds() -> None:
    w = world(hbm_frames=20, host_frames=20)
    session = opened(w)
    append(w, session, 8)
    assert explain(w, session, 0).guards == {"sink": "exact"}
    assert [explain(w, session, page).guards for page in (5, 6, 7)] == [
        {},
        {"recent": "recent"},
        {"recent": "recent"},
    ]
    assert explain(w, session, 6).next == ["stays for 4 more tokens exact, unless nothing else can give way"]
    w.ask(events.Pinned, "a", session.id, 12, 20, "attendable")
    assert explain(w, session, 3).guards == explain(w, session, 4).guards == {"pin": "attendable"}
    w.feed(events.LeaseExpired("a"))
    assert explain(w, session, 7).guards == {"stopped": "exact"}
    assert "silent" in explain(w, session, 7).next[0]


def test_replicas_have_their_sizes() -> None:
    w = world(hbm_frames=10, host_frames=100)
    session = opened(w)
    append(w, session, 20)
    w.settle()
    tiers = {told.tier: told for told in (explain(w, session, page) for page in range(20))}
    assert tiers["hbm"].replicas == [Replica("exact", "hbm", FRAME), Replica("exact", "host", FRAME)]
    low_bit = w.brain.state.sessions[session.id].model.quant.item
    assert 7 * low_bit <= FRAME  # 2.5 bits and scales instead of 32
    assert tiers["quantized"].replicas == [
        Replica("low-bit", "hbm", low_bit),
        Replica("exact", "host", FRAME),
    ]


def test_the_page_that_is_told_to_be_coldest_moves_first_and_then_says_when_and_why() -> None:
    w = world(hbm_frames=12, host_frames=100)
    session = opened(w)
    append(w, session, 3, Region.USER)
    append(w, session, 1, Region.SCRATCHPAD)
    append(w, session, 4, Region.USER)
    decode(w, session, 2)
    before = [explain(w, session, page) for page in range(8)]
    assert [told.tier for told in before] == ["hbm"] * 8
    assert [page for page, told in enumerate(before) if told.rank == min(t.rank for t in before)] == [3]
    assert (before[3].moved_ago, before[3].moved_why, before[3].why) == (None, "", "it was written there")
    assert before[3].next[0].startswith("becomes low-bit when room is wanted (under 0% of HBM free, now ")
    while all(explain(w, session, page).tier == "hbm" for page in range(8)):
        append(w, session, 1, Region.USER)
    moved = [page for page in range(8) if explain(w, session, page).tier != "hbm"]
    assert 3 in moved and 0 not in moved
    w.settle()
    decode(w, session, 5)
    told = explain(w, session, 3)
    assert (told.moved_ago, told.moved_why) == (5.0, "pressure")
    assert told.why.startswith("it became low-bit 5 steps ago: room was wanted")


def test_eager_demotion_says_on_which_side_of_the_threshold_the_page_stands() -> None:
    w = world(hbm_frames=60, host_frames=60, thresholds=LEVELS, demotion="eager")
    session = opened(w)
    append(w, session, 5, Region.USER)
    decode(w, session, 4)
    score = 0.6 * 2 ** (-4 / 35)
    assert explain(w, session, 1).next == [
        f"becomes low-bit when its score, {score:.3g}, falls below quantize_below (0.5), or room is wanted"
    ]
    decode(w, session, 12)  # 16 steps: .6 * 2**(-16/35) = .437
    told = explain(w, session, 1)
    assert told.tier == "quantized" and told.why.endswith("its score fell below the threshold")
    assert any("falls below offload_below (0.3)" in line for line in told.next)


def test_a_page_in_host_memory_says_what_brings_it_back_and_comes_back_by_it() -> None:
    w = world(hbm_frames=8, host_frames=200)
    crowd, survivor = opened(w), opened(w)
    append(w, survivor, 30)
    append(w, crowd, 40)
    w.settle()
    cold = next(page for page in range(30) if explain(w, survivor, page).tier == "host")
    told = explain(w, survivor, cold)
    assert told.why.startswith("it left HBM 0 steps ago")
    assert "comes back, low-bit, when nobody asks for HBM and a slot is free" in told.next
    w.close(crowd)
    for _ in range(10):
        w.now += 0.5
        w.feed(events.Tick())
        w.settle()
    told = explain(w, survivor, cold)
    assert (told.tier, told.moved_why) == ("quantized", "room")
    assert told.why.endswith("there was room for it")


def test_ladders_that_do_not_go_that_way_say_so() -> None:
    w = world(hbm_frames=10, host_frames=10)
    exact, drop = opened(w, ladder="exact"), opened(w, ladder="drop")
    append(w, exact, 2)
    append(w, drop, 2)
    assert explain(w, exact, 0).next == ["nothing: its session's ladder is exact"]
    assert explain(w, drop, 0).next[0].startswith("is dropped for good when room is wanted")
    append(w, drop, 20)
    gone = explain(w, drop, 1)
    assert (gone.tier, gone.replicas, gone.moved_why) == ("dropped", [], "budget")
    assert gone.next == ["nothing: no copy is left; crop to 4 tokens and prefill again"]


def test_a_shared_page_has_the_highest_score_and_says_whose() -> None:
    w = world(hbm_frames=20, host_frames=20)
    session = opened(w)
    append(w, session, 5)
    w.fork(session)
    child = next(s for s in w.sessions.values() if s is not session)
    mass = np.full(20, 0.001, np.float32)
    mass[4:8] = 0.2
    w.ask(events.Observed, "a", child.id, 0, mass)
    told = explain(w, session, 1)
    assert (told.shared_by, told.scored_by) == (2, child.id)
    assert told == Explained(**{**_fields(explain(w, child, 1)), "session": session.id, "mass": told.mass})
    assert told.score > explain(w, session, 2).score


def test_a_page_whose_session_closed_counts_its_steps_by_the_fork_that_is_left() -> None:
    w = world(hbm_frames=12, host_frames=100)
    parent = opened(w)
    append(w, parent, 4)
    w.fork(parent)
    child = next(s for s in w.sessions.values() if s is not parent)
    decode(w, parent, 100)
    append(w, parent, 30)
    decode(w, parent, 5)
    moved = next(page for page in range(4) if explain(w, parent, page).tier != "hbm")
    ago = explain(w, parent, moved).moved_ago
    w.close(parent)
    told = explain(w, child, moved)
    assert (told.step, told.moved_ago) == (0, ago)
    assert f" {ago:g} steps ago" in told.why


def _fields(told: Explained) -> dict[str, object]:
    return {name: getattr(told, name) for name in told.__struct_fields__}


@pytest.mark.parametrize(
    ("mass", "verdict"),
    [(0.9, "keep: much attention, and lately"), (0.0, "watch: little attention, but lately")],
)
def test_the_verdict_of_ema_is_told_in_words(mass: float, verdict: str) -> None:
    """e after four observations of .9 at a = .2: .9 (1 - .8^4) = .531, above .5."""
    w = world(hbm_frames=20, host_frames=20, policy="ema", thresholds=None)
    session = opened(w)
    append(w, session, 2)
    for step in range(4):
        w.ask(events.Observed, "a", session.id, step, np.full(8, mass, np.float32))
    told = explain(w, session, 1)
    assert told.terms["ema"] == pytest.approx(mass * (1 - 0.8**4), rel=1e-5)
    assert told.verdict == verdict


def test_ema_says_evict_when_attention_was_low_and_long_ago() -> None:
    w = world(hbm_frames=20, host_frames=20, policy="ema", thresholds=None)
    session = opened(w)
    append(w, session, 2)
    reserve(w, session)
    w.write(session, [Run(Region.SCRATCHPAD, 1)], 1000)
    assert explain(w, session, 0).verdict == "evict: little attention, and not lately"


def test_every_reason_for_a_change_of_tier_has_its_words() -> None:
    """`recall` has two, by direction; `compaction` changes no tier."""
    assert set(BECAUSE) == set(REASONS) - {"", "recall", "compaction"}


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_explains_every_page_and_the_log_replays_all_the_same(name: str) -> None:
    w = world(hbm_frames=12, host_frames=100, policy=name, thresholds=None)
    session = opened(w)
    append(w, session, 15)
    w.ask(events.Observed, "a", session.id, 0, np.full(60, 1 / 60, np.float32))
    append(w, session, 15)
    told = [explain(w, session, page) for page in range(30)]
    assert {page.policy for page in told} == {name}
    assert all(page.why and page.next for page in told)
    scores = np.array([page.score for page in told])
    assert [page.rank for page in told] == [1 + int((scores < score).sum()) for score in scores]
    again = type(w.brain).replay(w.config, w.brain.log)
    assert again.state.pages.score.tobytes() == w.brain.state.pages.score.tobytes()
