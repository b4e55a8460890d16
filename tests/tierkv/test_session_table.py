"""Where a session's tokens lie: the layout that labels ask for, and the plans that change it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.faults.pages import SMALL, check, step
from tests.tierkv.local_daemon import World, settled, table, until
from tierkv.errors import UnknownRegion
from tierkv.protocol import BlankPage, PageChange, Plan
from tierkv.regions import Region
from tierkv.table import Kind

# Layout ----------------------------------------------------------------------------------------------------------


def test_labels_name_the_next_tokens_and_a_region_starts_its_own_page(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    session.label("system", 20)
    session.label(Region.TOOL_OUT, 3)
    step(client, session, 1, 30)  # 20 system, 3 tool_out, 7 that nobody labelled
    step(client, session, 1, 1, steps=1)  # one unlabelled token is scratchpad
    step(client, session, 1, 2)
    assert table(session) == [
        (Region.SYSTEM, 16), (Region.SYSTEM, 4), (Region.TOOL_OUT, 3), (Region.USER, 7),
        (Region.SCRATCHPAD, 1), (Region.USER, 2),
    ]  # fmt: skip
    assert (session.length, session.horizon, session.step) == (33, 33, 1)
    numbers = settled(client, session)
    assert (numbers["tokens"], numbers["step"], numbers["pages_hbm"]) == (33, 1, 6)
    assert check(client, session, 1).wrong == 0


def test_a_label_may_span_steps_and_a_partly_filled_page_goes_on(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    session.label("plan", 25)
    for tokens in (10, 10, 10):
        step(client, session, 1, tokens)
    assert table(session) == [(Region.PLAN, 16), (Region.PLAN, 9), (Region.USER, 5)]
    assert settled(client, session)["tokens"] == 30


def test_the_straddling_layout_fills_every_page(world: World) -> None:
    world.service(straddle=True)
    client = world.client()
    session = client.open(SMALL, "m")
    session.label("system", 20)
    step(client, session, 1, 30)
    step(client, session, 1, 5)
    assert table(session) == [(Region.SYSTEM, 16), (Region.SYSTEM, 16), (Region.USER, 3)]
    assert settled(client, session)["tokens"] == 35


def test_a_new_owner_is_told_of_an_open_page_only_while_it_has_room(world: World) -> None:
    """A full one may be low-bit or cold by now: a fork that copied it would find other bytes."""
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    for tokens, is_open in ((10, True), (6, False), (16, False), (5, True), (11, False)):
        step(client, session, 1, tokens)
        handed = session.state()[0].table
        assert (handed.length, handed.tail_open) == (session.length, is_open)
    session.crop(40)  # a full page that is read short stays full
    assert session.state()[0].table.tail_open is False


def test_an_unknown_region_is_refused_where_it_is_named(world: World) -> None:
    world.service()
    session = world.client().open(SMALL, "m")
    with pytest.raises(UnknownRegion, match="garden"):
        session.label("garden", 3)


def test_slots_and_rows_say_where_tokens_are(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    session.label("system", 18)
    session.begin(40)  # pages of 16, 2, 16, 6
    offsets, slots = session.slots(0, 40)
    assert offsets.dtype == np.int64 and slots.dtype == np.int32
    assert slots.tolist() == [*range(16), 0, 1, *range(16), *range(6)]
    rows = session.rows(36)
    assert rows.counts.tolist() == [16, 2, 16, 2] and rows.starts.tolist() == [0, 16, 18, 34]
    assert rows.offsets.tolist() == [offsets[0], offsets[16], offsets[18], offsets[34]]
    assert len(set(rows.offsets.tolist())) == 4 and all(offset % 64 == 0 for offset in rows.offsets)
    assert rows.kinds.tolist() == [Kind.EXACT] * 4
    assert session.rows(34).counts.tolist() == [16, 2, 16]
    assert len(session.rows(0).offsets) == 0
    with pytest.raises(ValueError, match="not within"):
        session.slots(0, 41)
    session.commit()
    session.end()


def test_the_pool_view_is_the_shared_memory(world: World) -> None:
    service = world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    step(client, session, 1, 5)
    view = session.pool
    assert view.geometry == SMALL and view.codec.name == "k3v2" and len(view.codec_state) == 0
    offset = int(session.rows(5).offsets[0])
    assert service.brain.state.hbm.size == len(view.data)  # type: ignore[attr-defined]
    view.data[offset] ^= 1
    assert client.hbm()[offset] == view.data[offset]
    assert not client.host().flags.writeable


def test_what_a_new_owner_gets_is_the_committed_table_and_blanks_in_order(world: World) -> None:
    world.service()
    client = world.client(reserve_ahead=0)
    session = client.open(SMALL, "m")
    step(client, session, 1, 20)
    session.begin(40)  # 12 more in the open page, then two pages that are not committed
    tentative = session.slots(32, 60)[0]
    state, _ = session.state()
    assert (state.table.length, state.table.tail_open, state.step) == (20, True, 0)
    assert [entry.count for entry in state.table.pages] == [16, 4]
    assert [blank.offset for blank in state.table.blanks] == [tentative[0], tentative[16]]
    assert all(isinstance(blank, BlankPage) for blank in state.table.blanks)
    session.commit()
    session.end()
    assert [entry.count for entry in session.state()[0].table.pages] == [16, 16, 16, 12]


# Plans -----------------------------------------------------------------------------------------------------------


def test_an_idle_session_adopts_plans_by_itself_so_that_memory_comes_back(world: World) -> None:
    world.service(hbm=32)
    client = world.client()
    idle, busy = client.open(SMALL, "m"), client.open(SMALL, "m")
    step(client, idle, 1, 200)
    version = idle.version
    for _ in range(20):
        step(client, busy, 2, 32)
    assert idle.version > version  # nobody called it
    until(lambda: client.stats()["hbm_retiring_bytes"] == 0)
    kinds = np.bincount(idle.rows(200).kinds, minlength=3)
    assert kinds[Kind.EXACT] < 13
    assert check(client, idle, 1).wrong == check(client, busy, 2).wrong == 0


def test_a_table_stands_still_within_a_step(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    step(client, session, 1, 40)
    session.begin(8)
    before, version = session.rows(48), session.version
    entry = session.state()[0].table.pages[0]
    client.plans([Plan(session.id, version + 1, [_moved(entry.page)], 64)])
    assert session.version == version
    assert session.rows(48).kinds.tolist() == before.kinds.tolist()
    session.rollback(40)
    session.end()
    assert session.version == version + 1
    assert session.rows(40).kinds.tolist() == [Kind.QUANTIZED, Kind.EXACT, Kind.EXACT]
    with pytest.raises(ValueError, match="exact"):
        session.slots(0, 1)


def test_an_old_plan_is_not_adopted_and_an_unknown_page_is_ignored(world: World) -> None:
    world.service()
    client = world.client()
    session = client.open(SMALL, "m")
    step(client, session, 1, 40)
    version = session.version
    entry = session.state()[0].table.pages[0]
    client.plans([Plan(session.id, version, [_moved(entry.page)])])
    client.plans([Plan(session.id, version + 1, [_moved(123_456)]), Plan(77, 1, [])])
    assert session.version == version + 1
    assert session.rows(40).kinds.tolist() == [Kind.EXACT] * 3


def _moved(page: int) -> PageChange:
    return PageChange(page, Kind.QUANTIZED, 4096, 0, -1, 0)
