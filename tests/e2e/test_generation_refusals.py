"""What cannot be is refused with a class of its own and one sentence, and a living daemon serves the next request.

A refused request leaves no page, no session and no byte behind: after each, the numbers are those of before.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

import tierkv
from tests.faults.harness import Owner, holds_nothing, until
from tests.faults.pages import SMALL, check, step
from tierkv.calls import Call
from tierkv.errors import (
    BudgetTooSmall,
    GeometryMismatch,
    OutOfCapacity,
    ProtocolError,
    RequestError,
    TierKVError,
    UnknownRegion,
    UnknownSession,
)
from tierkv.geometry import Geometry
from tierkv.protocol import REQUEST_SOCKET, Commit, Crop, Failure, Operation, Pin, Ping, Request, Reserve

PAGE = SMALL.page_bytes
HBM_PAGES = 32


@pytest.fixture(scope="module")
def state_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tierkv-", dir="/dev/shm"))
    owner = Owner(folder, HBM_PAGES * PAGE, 64 * PAGE)
    yield folder
    owner.kill()
    shutil.rmtree(folder)


@pytest.fixture
def client(state_dir: Path) -> Iterator[tierkv.Client]:
    """Holds a session of 40 tokens; whatever a test does in between, its bytes and the daemon's numbers stay."""
    with tierkv.connect(state_dir) as watcher, tierkv.connect(state_dir) as client:
        until(lambda: watcher.stats()["hbm_used_bytes"] == 0, 5.0)
        session = client.open(SMALL, "small")
        step(client, session, 1, 40)
        # Both sealed pages have their copy.
        until(lambda: watcher.stats()["host_used_bytes"] == 2 * PAGE, 5.0)
        until(lambda: watcher.stats()["pages_host"] == 0 and watcher.stats()["moves_in_flight"] == 0, 5.0)
        before = counted(watcher)
        yield client
        step(client, session, 1, 4)  # the next request is served, by the same daemon
        session.crop(40)
        until(lambda: counted(watcher) == before, 5.0)
        assert check(client, session, 1).wrong == 0
    with tierkv.connect(state_dir) as watcher:
        until(lambda: holds_nothing(watcher), 5.0)
        assert watcher.epoch == 1


def counted(client: tierkv.Client) -> dict[str, float]:
    names = ("sessions", "workers", "tokens", "host_used_bytes", "bytes_hbm", "pages_hbm", "dropped_pages")
    stats = client.stats()
    return {name: stats[name] for name in names}


def mine(client: tierkv.Client) -> tierkv.Session:
    (session,) = client._sessions.values()
    return session


def raw(client: tierkv.Client, op: Operation, buffers: list[bytes] | None = None) -> None:
    """Send what the session API itself would not, and raise what the daemon says."""
    results: list[object] = []
    client.submit(Call(op, results.append, buffers=buffers or []))
    until(lambda: bool(results), 5.0)
    if isinstance(results[0], Failure):
        raise tierkv.errors.from_wire(results[0].code, results[0].message)


def other_tokens() -> Geometry:
    return Geometry(SMALL.num_layers, SMALL.num_kv_heads, SMALL.head_dim, SMALL.dtype, 2 * SMALL.page_tokens)


MATRIX: dict[str, tuple[Callable[[tierkv.Client], object], type[TierKVError], str]] = {
    "reserve for an unknown session": (lambda c: raw(c, Reserve(12345, 1)), UnknownSession, "12345 is not open"),
    "stats of an unknown session": (lambda c: c.stats(12345), UnknownSession, "12345 is not open"),
    "pages of another token count": (
        lambda c: c.open(other_tokens(), "small"), GeometryMismatch, "32 tokens; this daemon's pages hold 16",
    ),
    "a budget of less than a page": (
        lambda c: c.open(SMALL, "small", hbm_budget=PAGE - 1), BudgetTooSmall, f"hbm_budget is {PAGE - 1:,} bytes",
    ),
    "a negative budget": (lambda c: c.open(SMALL, "small", hbm_budget=-1), RequestError, "hbm_budget is -1"),
    "a page larger than the pool": (
        lambda c: c.open(Geometry(64, 8, 128, "float32", 16), "huge"), BudgetTooSmall, "start the daemon with a larger",
    ),
    "a region that does not exist": (lambda c: mine(c).label("nowhere", 3), UnknownRegion, "'nowhere'.*scratchpad"),
    "a region number that does not exist": (
        lambda c: raw(c, Commit(mine(c).id, 41, [(99, 1)], 0)), UnknownRegion, "99 does not exist",
    ),
    "a pin of a region that does not exist": (
        lambda c: c.open(SMALL, "small", pins={"nowhere": "exact"}), UnknownRegion, "'nowhere'",
    ),
    "a pin level that does not exist": (
        lambda c: mine(c).pin(0, 16, "forever"), RequestError, "'forever' does not exist; use one of exact",
    ),
    "a region's pin level that does not exist": (
        lambda c: c.open(SMALL, "small", pins={"plan": "forever"}), RequestError, "'forever' does not exist",
    ),
    "a pin of tokens that are not there": (
        lambda c: mine(c).pin(30, 90, "exact"), RequestError, r"\[30, 90\) of 40",
    ),
    "a ladder that does not exist": (
        lambda c: c.open(SMALL, "small", ladder="rope"), RequestError, "'rope' does not exist; use one of tiered",
    ),
    "an empty model id": (lambda c: c.open(SMALL, ""), RequestError, "1 to 256 characters"),
    "more pages than the pool has": (
        lambda c: mine(c).begin(16 * (HBM_PAGES + 4)), OutOfCapacity, "prefill in smaller chunks",
    ),
    "no pages at all": (lambda c: raw(c, Reserve(mine(c).id, 0)), RequestError, "between 1 and"),
    "a commit out of order": (
        lambda c: raw(c, Commit(mine(c).id, 90, [(2, 1)], 0)), RequestError, "90.*40",
    ),
    "token ids for other tokens": (
        lambda c: raw(c, Commit(mine(c).id, 41, [(2, 1)], 0, b"123")), RequestError, "3 bytes of token ids for 1",
    ),
    "a crop to more than there is": (lambda c: raw(c, Crop(mine(c).id, 900)), RequestError, "to 900 tokens: 40 are"),
    "a reversed pin": (lambda c: raw(c, Pin(mine(c).id, 9, 3, "exact")), RequestError, "reversed"),
    "mass of another length": (
        lambda c: mine(c).observe(np.zeros(7, np.float32)), RequestError, "7 tokens for a session of 40",
    ),
    "buffers where none belong": (lambda c: raw(c, Ping(), [b"x"]), ProtocolError, "1 buffers came"),
}  # fmt: skip


@pytest.mark.parametrize("case", MATRIX)
def test_what_cannot_be_is_refused_by_name_and_costs_nothing(client: tierkv.Client, case: str) -> None:
    do, kind, said = MATRIX[case]
    with pytest.raises(kind, match=said) as refused:
        do(client)
    assert type(refused.value) is kind
    assert "Traceback" not in str(refused.value)


def test_malformed_frames_are_dropped_or_answered_and_the_next_one_is_served(
    client: tierkv.Client, state_dir: Path
) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.connect(f"ipc://{state_dir / REQUEST_SOCKET}")
    good = msgspec.msgpack.encode(Request(id=7, epoch=0, op=Ping()))
    bad = [
        [b""], [b"\xc1"], [good[:-3]], [good + b"x"], [b"\x91" * 4000], [good, b"a buffer too much"],
        [msgspec.msgpack.encode({"id": "seven", "epoch": 0, "op": {"type": "ping"}})],
        [msgspec.msgpack.encode({"id": 7, "epoch": 0, "op": {"type": "format-disk"}})],
        [msgspec.msgpack.encode({"id": 7, "epoch": 0, "op": {"type": "ping"}, "more": 1})],
    ]  # fmt: skip
    for frames in bad:
        socket.send_multipart(frames)
    socket.send(good)
    answers = []
    while socket.poll(300 if answers else 5000):
        answers.append(msgspec.msgpack.decode(socket.recv())["result"])
    socket.close()
    context.term()
    # Only the ping with a buffer has a header to answer to.
    assert [answer.get("code", answer["type"]) for answer in answers] == ["protocol", "done"]
    assert client.ping() < 5.0
