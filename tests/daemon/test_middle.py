"""The middle form: who takes it, who leaves it for what, and what never happens to a page that has it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.daemon.test_brain import FRAME, append, kinds, opened, reserve, world
from tests.stateful.world import SMALL, World
from tierkv import quant
from tierkv.daemon import events
from tierkv.daemon.allocator import SizeClass
from tierkv.daemon.events import Copy, Quantize
from tierkv.daemon.middle import MIDDLE_NAMES, middle_below, middle_class, middle_codec
from tierkv.daemon.policy import Thresholds
from tierkv.errors import ConfigError
from tierkv.geometry import DTypeName, Geometry
from tierkv.protocol import Failure, SessionOptions
from tierkv.regions import Region, Run
from tierkv.table import Kind

ROOM = {"low_watermark": 0.1, "high_watermark": 0.2}
KV_8B = Geometry(32, 8, 128, "bfloat16", 16)


def refuse(w: World, form: int) -> None:
    """The moves that encode into a form fail, as of values that the codec does not take."""
    for number in [n for n, m in w.moves.items() if isinstance(m, Quantize) and m.form == form]:
        w.fail_move(number, "non-finite")


def damage(w: World) -> int:
    """Host copies that are being read turn out damaged; how many."""
    found = 0
    for number, move in list(w.moves.items()):
        if isinstance(move, Quantize | Copy) and move.src_pool == "host":
            w.fail_move(number, "checksum")
            found += 1
    return found


# What may be the middle form ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "items"),
    # bits of a value in the frame over bits of one in the form, with a float32 scale for 64 values
    [("nf4", "bfloat16", 16 / 4.5), ("nf4", "float32", 32 / 4.5), ("int8", "float32", 32 / 8.5)],
)
def test_a_frame_holds_as_many_pages_as_fit_whole(name: str, dtype: DTypeName, items: float) -> None:
    geometry = Geometry(32, 8, 128, dtype, 16)
    low = SizeClass(geometry.page_bytes, quant.get("k3v2").page_bytes(geometry))
    assert middle_class(middle_codec(name), geometry, low).items == int(items)


def test_a_form_of_which_a_frame_holds_one_is_refused_with_the_arithmetic() -> None:
    """1,048,576 values: 2 MiB exact in bfloat16, in int8 a byte each and 4 for every 64."""
    low = SizeClass(KV_8B.page_bytes, quant.get("k3v2").page_bytes(KV_8B))
    with pytest.raises(
        ConfigError, match="takes 1,114,112 bytes, and the frame of a bfloat16 page has 2,097,152"
    ):
        middle_class(middle_codec("int8"), KV_8B, low)


def test_a_form_no_larger_than_the_low_bit_one_is_no_rung() -> None:
    low = SizeClass(KV_8B.page_bytes, quant.get("nf4").page_bytes(KV_8B))
    with pytest.raises(ConfigError, match="2,097,152 bytes holds 3 pages of it and 3 of the low-bit form"):
        middle_class(middle_codec("nf4"), KV_8B, low)


def test_a_larger_form_of_which_a_frame_holds_as_many_is_no_rung_either() -> None:
    low = SizeClass(KV_8B.page_bytes, KV_8B.page_bytes * 4 // 16 + 64)  # a little more than 4 bits
    nf4 = quant.get("nf4").page_bytes(KV_8B)
    assert nf4 > low.item and low.items == 3
    with pytest.raises(ConfigError, match="no rung above low-bit"):
        middle_class(middle_codec("nf4"), KV_8B, low)


@pytest.mark.parametrize("name", ["k3v2", "klt2", "exact"])
def test_a_codec_with_a_space_of_its_own_is_no_middle_form(name: str) -> None:
    assert name not in MIDDLE_NAMES
    with pytest.raises(
        ConfigError, match=f"{name} cannot be the middle form, which is one of kivi2, int8, nf4"
    ):
        middle_codec(name)


def test_unset_the_threshold_lies_halfway_between_those_around_it() -> None:
    assert middle_below(None, Thresholds(0.5, 0.1, 0.0, 0.9)) == pytest.approx(0.7)
    assert middle_below(0.3, Thresholds(0.5, 0.1, 0.0, 0.9)) == 0.3
    assert middle_below(None, Thresholds(-np.inf, 0.1, 0.0, np.inf)) == -np.inf


def test_a_session_whose_pages_gain_nothing_is_refused() -> None:
    w = world(hbm_frames=40, host_frames=20, middle="int8")
    half = Geometry(2, 1, 64, "bfloat16", 4)
    answer = w.ask(events.Opened, "a", "half", half, SessionOptions())
    assert isinstance(answer, Failure) and re.search("middle = int8 saves nothing", answer.message)
    assert w.open("a", SMALL, SessionOptions()) is not None


# The way down ---------------------------------------------------------------------------------------------------------


def test_exact_pages_take_the_middle_form_before_any_becomes_low_bit() -> None:
    w = world(hbm_frames=20, host_frames=200, middle="nf4", **ROOM)
    session = opened(w)
    append(w, session, 40)
    w.settle()
    assert Kind.MIDDLE in kinds(session)
    assert Kind.QUANTIZED not in kinds(session) and Kind.NONE not in kinds(session)
    assert kinds(session)[0] == Kind.EXACT, "attention sinks stay exact"
    assert kinds(session)[-2:] == [Kind.EXACT] * 2, "so does the recent window"


def test_the_coldest_leave_the_middle_for_low_bit_before_any_page_leaves_hbm() -> None:
    """Seven nf4 pages a frame and eleven of k3v2: 110 pages need some of the latter in 20 frames."""
    w = world(hbm_frames=20, host_frames=300, middle="nf4", **ROOM)
    session = opened(w)
    append(w, session, 55, Region.SCRATCHPAD)
    append(w, session, 55, Region.USER)
    w.settle()
    regions = [Region(row.region) for row in session.rows]
    found = [
        {k for k, r in zip(kinds(session), regions, strict=True) if r == region}
        for region in (Region.SCRATCHPAD, Region.USER)
    ]
    assert Kind.QUANTIZED in found[0] and Kind.QUANTIZED not in found[1], "scratchpad is worth less"
    assert Kind.NONE not in kinds(session)
    moved = w.brain.snapshot().counters.moved_pages
    assert moved["middle", "quantized", "pressure"] > 0


@pytest.mark.parametrize("middle", ["nf4", "int8", "kivi2"])
@pytest.mark.parametrize("watermarks", [{}, ROOM])
def test_a_context_many_times_the_pool_always_finds_room(middle: str, watermarks: dict[str, float]) -> None:
    w = world(hbm_frames=10, host_frames=250, middle=middle, codec="rotated2", **watermarks)
    session = opened(w)
    append(w, session, 150)
    w.settle()
    assert session.length == 600
    assert w.brain.snapshot().counters.dropped_pages.total() == 0
    assert set(kinds(session)) >= {Kind.EXACT, Kind.QUANTIZED, Kind.NONE}
    assert not any(reason == "io" for *_, reason in w.brain.snapshot().counters.failed_moves)


def test_without_room_for_an_exact_copy_a_page_skips_the_middle() -> None:
    """It could never become low-bit from there."""
    w = world(hbm_frames=10, host_frames=4, middle="nf4", backup="on_demote", **ROOM)
    session = opened(w)
    append(w, session, 30)
    w.settle()
    pages = w.brain.state.pages
    middle = pages.live & (pages.kind == Kind.MIDDLE)
    assert np.all(pages.host_kind[middle] == Kind.EXACT)
    assert kinds(session).count(Kind.QUANTIZED) > 4


def test_a_page_without_its_exact_copy_leaves_the_middle_for_host_as_it_is_and_comes_back_so() -> None:
    w = world(hbm_frames=12, host_frames=200, middle="nf4", **ROOM)
    session = opened(w)
    append(w, session, 50, Region.SCRATCHPAD)
    w.settle()
    assert Kind.MIDDLE in kinds(session)
    lost = 0
    for _ in range(60):  # more pages push the coldest out of the middle, and their copies are found damaged
        w.reserve(session, 1)
        w.write(session, [Run(Region.USER, 4)], 0)
        w.adopt_plans(session, acknowledge=True)
        lost += damage(w)
        w.settle()
        if lost:
            break
    assert lost
    append(w, session, 120, Region.USER)
    w.settle()
    packed = [row for row in session.rows if row.host_kind == Kind.MIDDLE]
    assert packed and all(row.kind == Kind.NONE for row in packed), "nothing was encoded from the middle form"
    assert w.brain.snapshot().counters.lost_pages == 0


def test_a_page_that_low_bit_refuses_leaves_the_middle_for_host() -> None:
    w = world(hbm_frames=12, host_frames=300, middle="nf4", **ROOM)
    session = opened(w)
    append(w, session, 50)
    for _ in range(120):
        refuse(w, Kind.QUANTIZED)
        w.settle()
        append(w, session, 1)
    w.settle()
    assert session.length == 680


@pytest.mark.parametrize("middle", ["nf4", "int8"])
def test_a_session_with_a_budget_steps_down_within_it(middle: str) -> None:
    w = world(hbm_frames=60, host_frames=300, middle=middle)
    session = opened(w, hbm_budget=8 * FRAME)
    append(w, session, 80)
    w.settle()
    state = w.brain.state
    assert state.hbm_bytes_of(state.sessions[session.id]) <= 8 * FRAME
    assert {Kind.MIDDLE, Kind.QUANTIZED} <= set(kinds(session))
    assert w.brain.snapshot().counters.moved_pages["middle", "quantized", "budget"] > 0


def test_eager_demotion_goes_as_far_as_the_score_says() -> None:
    """A page between the two thresholds takes the middle form and stays there, with HBM all but empty."""
    w = world(
        hbm_frames=60, host_frames=200, middle="nf4", demotion="eager", middle_below=0.5,
        thresholds=Thresholds(0.3, 0.0, 0.0, 99.0),
    )  # fmt: skip
    session = opened(w)
    for region in (Region.USER, Region.RETRIEVAL, Region.SCRATCHPAD, Region.SYSTEM):  # bases .6, .4, .25, 1
        append(w, session, 4, region)
    append(w, session, 3, Region.SYSTEM)
    w.now += 0.1
    w.feed(events.Tick())
    w.settle()
    scores = w.brain.state.pages.score
    for row, page in enumerate(session.rows[1:16], 1):
        score = scores[w.brain.state.pages.index[page.page]]
        expected = Kind.QUANTIZED if score < 0.3 else Kind.MIDDLE if score < 0.5 else Kind.EXACT
        assert page.kind == expected, (row, score)
    assert {Kind.EXACT, Kind.MIDDLE, Kind.QUANTIZED} <= set(kinds(session))


# The way up, and what is told -----------------------------------------------------------------------------------------


def test_a_hot_page_becomes_exact_from_the_middle() -> None:
    w = world(
        hbm_frames=20, host_frames=200, middle="nf4", thresholds=Thresholds(0.0, 0.0, 0.0, 0.65), **ROOM
    )
    session = opened(w)
    append(w, session, 40)
    w.settle()
    row = kinds(session).index(Kind.MIDDLE)
    w.crop(session, 4 * 20)  # gives room
    for _ in range(12):
        if not session.tail_open:
            reserve(w, session)
        assert not isinstance(w.write(session, [Run(Region.SCRATCHPAD, 1)], 1), Failure)
        mass = np.full(session.length, 0.1 / session.length, np.float32)
        mass[4 * row : 4 * row + 4] = 0.2
        w.ask(events.Observed, "a", session.id, session.step, mass)
        w.now += 1.0
        w.feed(events.Tick())
        w.settle()
    assert kinds(session)[row] == Kind.EXACT
    assert w.brain.state.counters.moved_pages["middle", "hbm", "hot"] == 1


def test_replicas_are_made_ahead_in_the_middle_form() -> None:
    w = world(hbm_frames=14, host_frames=200, middle="nf4", thresholds=Thresholds(0.0, 0.0, 0.0, 999.0))
    session = opened(w)
    append(w, session, 8)
    w.now += 1
    w.feed(events.Tick())
    w.settle()
    w.feed(events.Tick())
    w.settle()
    pages = w.brain.state.pages
    assert np.any(pages.live & (pages.kind == Kind.EXACT) & (pages.middle >= 0))
    assert not np.any(pages.live & (pages.quant >= 0))


def test_a_new_owner_takes_pages_of_the_middle_form_over() -> None:
    w = world(hbm_frames=20, host_frames=200, middle="nf4", **ROOM)
    session = opened(w)
    append(w, session, 40)
    w.settle()
    before = [(row.kind, row.offset) for row in session.rows]
    assert Kind.MIDDLE in kinds(session)
    w.restart_owner()
    assert [(row.kind, row.offset) for row in session.rows] == before
    snapshot = w.brain.snapshot()
    middle = sum(n for (tier, _), n in snapshot.pages.items() if tier == "middle")
    assert middle == kinds(session).count(Kind.MIDDLE)
    assert snapshot.tier_bytes["middle"] == 576 * middle  # 1,024 values: 512 bytes of codes, 16 scales of 4


def test_an_owner_without_the_middle_form_refuses_a_table_that_names_it() -> None:
    w = world(hbm_frames=20, host_frames=200, middle="nf4", **ROOM)
    session = opened(w)
    append(w, session, 40)
    w.settle()
    handed = w._state(session)
    other = world(hbm_frames=20, host_frames=200)
    (adopted,) = (
        i for i in other.brain.handle(events.Attached("b", (handed,)), 0.0) if isinstance(i, events.Adopted)
    )
    assert adopted.lost == ((session.id, 0, session.length),)


def test_an_explanation_names_the_form_its_replica_and_the_next_step() -> None:
    w = world(hbm_frames=20, host_frames=200, middle="nf4", **ROOM)
    session = opened(w)
    append(w, session, 40)
    w.settle()
    told = w.brain.explain(session.id, kinds(session).index(Kind.MIDDLE))
    assert told.tier == "middle" and told.why.startswith("it took the middle form")
    assert [(r.form, r.pool, r.bytes) for r in told.replicas] == [
        ("middle", "hbm", 576), ("exact", "host", FRAME),
    ]  # fmt: skip
    assert any(line.startswith("becomes low-bit when") for line in told.next)
    assert any(line.startswith("becomes exact when") for line in told.next)
    assert "middle_below" in told.thresholds
    exact = w.brain.explain(session.id, len(session.rows) - 4)
    if exact.tier == "hbm":
        assert any(line.startswith("takes the middle form") for line in exact.next)
    assert "middle_below" not in world(10, 10).brain.state.thresholds._fields
