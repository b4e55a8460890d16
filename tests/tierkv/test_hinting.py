"""Hints from a worker to a daemon in this process and back."""

from __future__ import annotations

import math

import msgspec
import pytest

from tests.faults.pages import SMALL, check, step
from tests.tierkv.local_daemon import World, settled, until
from tierkv import Client, Session
from tierkv.errors import OutOfCapacity, RequestError, UnknownRegion
from tierkv.hint_messages import AgentHint
from tierkv.protocol import Hint, Request, decode_request


def fill(client: Client, session: Session, pages: int) -> None:
    """Write whole pages, two at a time."""
    for _ in range(pages // 2):
        step(client, session, session.id, 32)


def opened(client: Client, pages: int = 0) -> Session:
    session = client.open(SMALL, "m")
    fill(client, session, pages)
    return session


def test_a_paused_session_gives_its_hbm_away_and_gets_it_back_before_it_resumes(world: World) -> None:
    world.service(hbm=32)
    client = world.client()
    first = opened(client, 20)
    client.stats(first.id)
    first.pause(8.0, tool="search")
    assert settled(client, first)["paused"] == 1
    second = opened(client, 24)
    while client.stats(first.id)["pages_host"] == 0:
        fill(client, second, 2)
    assert client.stats(second.id)["pages_host"] == 0
    second.crop(32)
    until(lambda: client.stats(first.id)["pages_host"] == 0, 15.0)
    first.resume()
    numbers = settled(client, first)
    assert (numbers["resumes_ready"], numbers["resumes_late"], numbers["paused"]) == (1, 0, 0)
    assert client.stats()["resumes_ready"] == 1
    check(client, first, first.id)


def test_hints_of_spans_regions_and_steps_are_taken(world: World) -> None:
    world.service()
    client = world.client()
    session = opened(client, 8)
    session.prefetch((0, 40))
    session.prefetch(region="user")
    session.supersede((16, 48))
    session.depends_on((0, 16))
    session.agent_hint({"version": 2, "step_id": "a", "colour": "of a later version"})
    session.agent_hint(AgentHint(step_id="b", parent_step_id="a", expected_tool_duration_ms=50.0))
    assert settled(client, session)["paused"] == 1
    told = client.explain(session.id, token=20)
    assert told.score == 0 and "superseded" in " ".join(told.next)
    step(client, session, session.id, 16)
    assert settled(client, session)["paused"] == 0
    session.retain(5.0)
    assert client.explain(session.id, token=20).guards["retained"] == "attendable"


@pytest.mark.parametrize("seconds", [math.nan, -1.0, -0.5, math.inf, 1e12])
def test_seconds_that_cannot_be_are_refused_and_nothing_changes(world: World, seconds: float) -> None:
    world.service()
    client = world.client()
    session = opened(client, 4)
    with pytest.raises(RequestError, match="seconds"):
        session.pause(seconds)
    with pytest.raises(RequestError, match="seconds"):
        session.retain(seconds)
    with pytest.raises(RequestError, match="ttl"):
        session.agent_hint({"ttl": seconds})
    assert settled(client, session)["paused"] == 0
    check(client, session, session.id)


def test_other_hints_that_cannot_be_are_refused_and_say_why(world: World) -> None:
    world.service(hbm=8)
    client = world.client()
    session = opened(client, 4)
    for span in ((0, 0), (3, 1), (-4, 4), (0, 65)):
        for hint in (session.supersede, session.depends_on, session.prefetch):
            with pytest.raises(RequestError, match="committed tokens"):
                hint(span)
    with pytest.raises(UnknownRegion, match="no such"):
        session.prefetch(region="no such")
    with pytest.raises(RequestError, match="300 characters"):
        session.pause(1.0, tool="t" * 300)
    with pytest.raises(RequestError, match="agent hint"):
        session.agent_hint({"ttl": "soon"})
    fill(client, session, 40)
    with pytest.raises(OutOfCapacity, match="pin_quota"):
        session.retain(5.0)
    assert settled(client, session)["paused"] == 0


def test_an_envelope_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    raw = msgspec.msgpack.encode(
        {
            "id": 1,
            "epoch": 1,
            "op": {"type": "hint", "session": 3, "agent": {"version": 9, "step_id": "x", "later": [1]}},
        }
    )
    op = decode_request(raw).op
    assert op == Hint(3, None, AgentHint(version=9, step_id="x"))
    assert isinstance(decode_request(msgspec.msgpack.encode(Request(id=1, epoch=1, op=op))).op, Hint)
