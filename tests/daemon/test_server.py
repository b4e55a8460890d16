"""The loop in front of a scripted brain: what reaches it, in which order, and what goes back."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from tierkv.daemon import events
from tierkv.daemon.peers import DEDUPE_REPLIES, Peer
from tierkv.daemon.server import OwnerLoop
from tierkv.errors import ConfigError, UnknownSession
from tierkv.figures import SessionFigures
from tierkv.geometry import Geometry
from tierkv.protocol import (
    Close,
    Commit,
    Crop,
    Done,
    Drain,
    Explain,
    Explained,
    Failure,
    Fork,
    GeometryFields,
    Notice,
    Observe,
    Open,
    PageChange,
    Pin,
    Ping,
    Plan,
    Reply,
    Request,
    Reserve,
    SessionOptions,
    Sessions,
    SessionsResult,
    Stats,
    Table,
    TableState,
    decode_from_daemon,
    encode,
)
from tierkv.regions import Region, Run

EPOCH = 3
FIELDS = GeometryFields(2, 1, 8, "float32", 16)


class Numbers:
    def flat(self) -> dict[str, float]:
        return {"pages": 4.0}


FIGURES = SessionFigures(
    session=7, client="a", model="m", tokens=40, step=5, hbm_bytes=4096, pages={"hbm": 2, "host": 1},
    attention_recall=None, missed_mass=0.25, expected_mass=0.1, audits=2, needed_cold_pages=3,
    prefetched={"used": 1}, ping_pongs=0, blocked_seconds=0.5,
)  # fmt: skip


class ScriptedBrain:
    """Answers `Done` unless `script` says otherwise. Remembers every event but ticks."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []
        self.script: dict[type, Callable[[events.Event], list[events.Instruction]]] = {}
        self.threads: set[int] = set()
        self.refusal: Exception = UnknownSession("session 7 is not open")

    def handle(self, event: events.Event, now: float) -> list[events.Instruction]:
        self.threads.add(threading.get_ident())
        if not isinstance(event, events.Tick):
            self.events.append(event)
        if type(event) in self.script:
            return self.script[type(event)](event)
        request = getattr(event, "request", 0)
        return [events.Answer(request, Done())] if request else []

    def snapshot(self) -> Numbers:
        return Numbers()

    def session_stats(self, session: int) -> dict[str, float]:
        return {"tokens": float(session)}

    def explain(self, session: int, page: int = -1, token: int = -1) -> Explained:
        raise self.refusal

    def sessions(self) -> list[SessionFigures]:
        return [FIGURES]

    def of(self, kind: type) -> list[events.Event]:
        return [event for event in list(self.events) if isinstance(event, kind)]


class Moves:
    def __init__(self) -> None:
        self.submitted: list[object] = []
        self.revived = 0

    def submit(self, move: object) -> None:
        self.submitted.append(move)

    def revive(self) -> None:
        self.revived += 1


class Dealer:
    """A worker by hand."""

    def __init__(self, loop: OwnerLoop, name: str, attach: bool = True) -> None:
        self.name = name
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.IDENTITY, name.encode())
        self.socket.connect(loop.endpoint)
        if attach:
            assert loop.attach(name, ()).result(5) == ()

    def send(self, number: int, op: object, *buffers: bytes, **more: object) -> None:
        request = Request(**{"id": number, "epoch": EPOCH, "op": op, **more})  # type: ignore[arg-type]
        self.socket.send_multipart([encode(request), *buffers])

    def receive(self, seconds: float = 5.0) -> Reply | Notice:
        assert self.socket.poll(seconds * 1000), "nothing came"
        return decode_from_daemon(self.socket.recv_multipart()[0])

    def ask(self, number: int, op: object, *buffers: bytes, **more: object) -> object:
        self.send(number, op, *buffers, **more)
        reply = self.receive()
        assert isinstance(reply, Reply) and reply.id == number and reply.epoch == EPOCH
        return reply.result

    def close(self) -> None:
        self.socket.close()
        self.context.term()


class World:
    def __init__(self, folder: Path, lease_seconds: float = 30.0) -> None:
        self.brain, self.moves = ScriptedBrain(), Moves()
        self.loop = OwnerLoop(str(folder / "requests.sock"), self.brain, self.moves, EPOCH, lease_seconds)
        self.loop.start()
        self.dealers: list[Dealer] = []

    def dealer(self, name: str = "a", attach: bool = True) -> Dealer:
        self.dealers.append(Dealer(self.loop, name, attach))
        return self.dealers[-1]

    def close(self) -> None:
        for dealer in self.dealers:
            dealer.close()
        self.loop.stop()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    world = World(folder)
    yield world
    world.close()


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def test_the_request_socket_is_private(world: World, folder: Path) -> None:
    assert stat.S_IMODE(os.stat(folder / "requests.sock").st_mode) == 0o600


def test_a_socket_that_cannot_be_bound_is_a_clear_error(folder: Path) -> None:
    loop = OwnerLoop(str(folder / "missing" / "requests.sock"), ScriptedBrain(), Moves(), EPOCH, 1.0)
    with pytest.raises(ConfigError, match="cannot be bound"):
        loop.start()
    loop.stop()


def test_each_operation_becomes_its_event(world: World) -> None:
    a = world.dealer()
    options = SessionOptions(hbm_budget=5, pins={"plan": "exact"})
    ids = np.array([5, 6, 7], "<i4")
    mass = np.array([0.5, np.nan, 0.25], "<f2")
    operations = [
        Open("m", FIELDS, options), Fork(7), Crop(7, 3), Close(7), Reserve(7, 2),
        Commit(7, 13, [(2, 1), (4, 2)], 1, ids.tobytes()), Pin(7, 0, 5, "exact"),
    ]  # fmt: skip
    for number, op in enumerate(operations, 1):
        assert a.ask(number, op) == Done()
    assert a.ask(8, Observe(7, 4, 3), mass.tobytes()) == Done()
    _, opened, forked, cropped, closed, reserved, committed, pinned, observed = world.brain.events
    assert opened[1:] == ("a", "m", Geometry(2, 1, 8, "float32", 16), options)
    assert (forked[1:], cropped[1:], closed[1:]) == (("a", 7), ("a", 7, 3), ("a", 7))
    assert (reserved[1:], pinned[1:]) == (("a", 7, 2), ("a", 7, 0, 5, "exact"))
    assert committed[1:6] == ("a", 7, 13, (Run(Region.USER, 1), Run(Region.TOOL_OUT, 2)), 1)
    assert committed.token_ids.tolist() == [5, 6, 7]
    assert observed[1:4] == ("a", 7, 4)
    np.testing.assert_array_equal(observed.mass, np.array([0.5, np.nan, 0.25], np.float32))


@pytest.mark.parametrize(
    ("op", "code"),
    [
        (Open("m", GeometryFields(0, 1, 8, "float32", 16), SessionOptions()), "geometry-mismatch"),
        (Open("", FIELDS, SessionOptions()), "request"),
        (Open("m", FIELDS, SessionOptions(ladder="rope")), "request"),
        (Open("m", FIELDS, SessionOptions(hbm_budget=-1)), "request"),
        (Open("m", FIELDS, SessionOptions(pins={"garden": "exact"})), "unknown-region"),
        (Open("m", FIELDS, SessionOptions(pins={"plan": "glued"})), "request"),
        (Reserve(7, 0), "request"),
        (Reserve(7, 65_537), "request"),
        (Reserve(-7, 1), "request"),
        (Crop(7, -1), "request"),
        (Commit(7, 5, [(9, 5)], 0), "unknown-region"),
        (Commit(7, 5, [(1, 0)], 0), "request"),
        (Commit(7, 5, [(1, -3)], 0), "request"),
        (Commit(7, 5, [(1, 6)], 0), "request"),
        (Commit(7, 1 << 40, [(1, 5)], 0), "request"),
        (Commit(7, 5, [(1, 5)], -1), "request"),
        (Commit(7, 5, [(1, 5)], 0, b"1234567"), "request"),
        (Pin(7, 5, 3, "exact"), "request"),
        (Pin(7, 0, 3, "tight"), "request"),
        (Observe(7, 1, 3), "protocol"),
    ],
)
def test_what_cannot_be_is_refused_and_never_reaches_the_brain(world: World, op: object, code: str) -> None:
    a = world.dealer()
    result = a.ask(1, op)
    assert isinstance(result, Failure) and result.code == code
    assert [type(event) for event in world.brain.events] == [events.Attached]


@pytest.mark.parametrize(
    ("buffers", "code"),
    [
        ([bytes(4)], "protocol"),
        ([bytes(8)], "protocol"),
        ([bytes(6), bytes(6)], "protocol"),
        ([np.array([0.1, -0.1, 0.1], "<f2").tobytes()], "request"),
        ([np.array([0.1, 1.5, 0.1], "<f2").tobytes()], "request"),
        ([np.array([0.1, np.inf, 0.1], "<f2").tobytes()], "request"),
    ],
)
def test_an_observation_that_cannot_be_is_refused(world: World, buffers: list[bytes], code: str) -> None:
    a = world.dealer()
    result = a.ask(1, Observe(7, 1, 3), *buffers)
    assert isinstance(result, Failure) and result.code == code
    assert not world.brain.of(events.Observed)


def test_versions_seen_reach_the_brain_before_the_operation(world: World) -> None:
    a = world.dealer()
    a.ask(1, Reserve(7, 1), seen={7: 4, 8: 2})
    assert world.brain.events[1:3] == [events.Acked("a", 7, 4), events.Acked("a", 8, 2)]
    assert isinstance(world.brain.events[3], events.Reserved)


def test_a_request_sent_again_is_answered_again_and_done_once(world: World) -> None:
    a = world.dealer()
    assert a.ask(1, Reserve(7, 1)) == a.ask(1, Reserve(7, 1)) == Done()
    assert len(world.brain.of(events.Reserved)) == 1


def test_a_request_sent_again_while_it_waits_is_done_once(world: World) -> None:
    waiting: list[int] = []
    world.brain.script[events.Forked] = lambda event: waiting.append(event.request) or []  # type: ignore[union-attr]
    a = world.dealer()
    a.send(1, Fork(7))
    a.send(1, Fork(7))
    assert a.ask(2, Ping()) == Done()
    assert len(waiting) == 1
    world.brain.script[events.MoveDone] = lambda event: [events.Answer(waiting[0], Done())]
    world.loop.post(events.MoveDone(1))
    assert a.receive() == Reply(1, EPOCH, Done())


def test_answers_are_forgotten_in_order_and_what_is_forgotten_is_not_done_again(world: World) -> None:
    a = world.dealer()
    for number in range(1, DEDUPE_REPLIES + 3):
        assert a.ask(number, Reserve(7, 1)) == Done()
    before = len(world.brain.of(events.Reserved))
    result = a.ask(1, Reserve(7, 1))
    assert isinstance(result, Failure) and result.code == "protocol"
    assert len(world.brain.of(events.Reserved)) == before


def test_another_epoch_is_told_to_attach_again(world: World) -> None:
    a = world.dealer()
    result = a.ask(1, Reserve(7, 1), epoch=EPOCH - 1)
    assert isinstance(result, Failure) and result.code == "owner-unavailable" and "epoch 2" in result.message
    assert isinstance(a.ask(2, Ping(), epoch=EPOCH - 1), Failure)
    assert not world.brain.of(events.Reserved)


def test_a_worker_that_has_not_attached_may_only_ask_how_things_are(world: World) -> None:
    stranger = world.dealer("stranger", attach=False)
    assert stranger.ask(1, Ping(), epoch=0) == Done()
    assert stranger.ask(2, Stats(), epoch=0).values == {"pages": 4.0}  # type: ignore[attr-defined]
    assert stranger.ask(3, Stats(9), epoch=0).values == {"tokens": 9.0}  # type: ignore[attr-defined]
    result = stranger.ask(4, Reserve(7, 1))
    assert isinstance(result, Failure) and result.code == "owner-unavailable"
    assert stranger.ask(5, Drain(), epoch=0) == Done()
    assert world.brain.events == [events.Draining()]


def test_an_exception_in_the_brain_fails_its_request_and_nothing_else(world: World) -> None:
    def broken(event: events.Event) -> list[events.Instruction]:
        raise ZeroDivisionError("a bug")

    world.brain.script[events.Reserved] = broken
    a = world.dealer()
    result = a.ask(1, Reserve(7, 1))
    assert isinstance(result, Failure) and result.code == "error" and "a bug" in result.message
    assert a.ask(2, Crop(7, 0)) == Done()
    assert world.loop.errors == 1 and world.loop.alive()


def test_an_explanation_is_an_answer_at_once_and_a_refusal_is_one_too(world: World) -> None:
    stranger = world.dealer("stranger", attach=False)
    refused = stranger.ask(1, Explain(7, 0), epoch=0)
    assert isinstance(refused, Failure) and (refused.code, refused.message) == (
        "unknown-session", "session 7 is not open"
    )  # fmt: skip
    world.brain.refusal = ZeroDivisionError("a bug")
    broken = stranger.ask(2, Explain(7, 0), epoch=0)
    assert isinstance(broken, Failure) and broken.code == "error" and "a bug" in broken.message
    assert isinstance(stranger.ask(3, Explain(7, 0), b"more", epoch=0), Failure)
    assert world.loop.errors == 1 and world.loop.alive() and not world.brain.events


def test_malformed_frames_are_counted_and_dropped(world: World) -> None:
    a = world.dealer()
    for frames in (
        [b""],
        [b"\xff\xff"],
        [encode({"id": 1})],
        [encode(Request(id=0, epoch=EPOCH, op=Ping()))],
    ):
        a.socket.send_multipart(frames)
    a.socket.send_multipart([encode(Request(id=1, epoch=EPOCH, op=Ping(), deadline=float("nan")))])
    assert a.ask(1, Ping()) == Done()
    assert world.loop.malformed == 5 and world.loop.errors == 0


def test_a_session_that_comes_after_its_deadline_is_closed_again(world: World) -> None:
    waiting: list[int] = []
    world.brain.script[events.Forked] = lambda event: waiting.append(event.request) or []  # type: ignore[union-attr]
    a = world.dealer()
    result = a.ask(1, Fork(7), deadline=0.05)
    assert isinstance(result, Failure) and "deadline" in result.message
    table = Table(TableState(99, 1, 0, []))
    world.brain.script[events.MoveDone] = lambda event: [events.Answer(waiting[0], table)]
    world.loop.post(events.MoveDone(1))
    until(lambda: world.brain.of(events.Closed) == [events.Closed(0, "a", 99)])
    assert a.ask(1, Fork(7)) == result  # the answer stays what it was


def test_plans_of_one_turn_travel_in_one_notice_and_in_order_with_answers(world: World) -> None:
    def reserve(event: events.Event) -> list[events.Instruction]:
        plans = [events.SendPlan("a", Plan(s, 2, [PageChange(1, 2, 64, 0, -1, 0)])) for s in (7, 8)]
        return [*plans, events.Answer(event.request, Done())]  # type: ignore[union-attr]

    world.brain.script[events.Reserved] = reserve
    a = world.dealer()
    a.send(1, Reserve(7, 1))
    messages = [a.receive(), a.receive()]
    assert [type(message) for message in messages] == [Notice, Reply]
    assert [plan.session for plan in messages[0].plans] == [7, 8]  # type: ignore[union-attr]


def test_moves_go_to_the_mover(world: World) -> None:
    move = events.Copy(1, "hbm", 0, 0, "host", 0, 64, 5)
    world.brain.script[events.MoveDone] = lambda event: [move]
    world.loop.post(events.MoveDone(0))
    until(lambda: world.moves.submitted == [move])
    until(lambda: world.moves.revived > 0)  # ticks look after its thread


def test_a_silent_worker_is_quarantined_once_and_renewed_by_any_message(folder: Path) -> None:
    world = World(folder, lease_seconds=0.2)
    a = world.dealer()
    a.ask(1, Ping())
    until(lambda: bool(world.brain.of(events.LeaseExpired)))
    time.sleep(0.3)
    assert world.brain.of(events.LeaseExpired) == [events.LeaseExpired("a")]
    a.ask(2, Ping())
    assert world.brain.of(events.LeaseRenewed) == [events.LeaseRenewed("a")]
    until(lambda: len(world.brain.of(events.LeaseExpired)) == 2)
    world.close()


def test_a_dead_worker_is_told_to_the_brain_once(world: World) -> None:
    world.dealer()
    world.loop.detach("a")
    world.loop.detach("a")
    until(lambda: world.brain.of(events.WorkerDied) == [events.WorkerDied("a")])
    assert world.loop.workers() == 0


def test_only_one_thread_calls_the_brain(world: World) -> None:
    a = world.dealer()
    a.ask(1, Reserve(7, 1))
    for _ in range(10):
        world.loop.post(events.MoveDone(1))
    until(lambda: len(world.brain.of(events.MoveDone)) == 10)
    assert len(world.brain.threads) == 1 and threading.get_ident() not in world.brain.threads


def test_the_loop_ticks_and_says_when(world: World) -> None:
    before = world.loop.ticks
    until(lambda: world.loop.ticks >= before + 3)
    assert time.monotonic() - world.loop.last_tick < 1.0


def test_plans_for_a_worker_that_takes_nothing_are_merged() -> None:
    peer = Peer("a", 0.0)
    peer.queue_plan(Plan(7, 2, [PageChange(1, 2, 64, 0, -1, 0), PageChange(2, 1, 0, 0, -1, 0)]))
    peer.queue_plan(Plan(7, 3, [PageChange(1, 0, -1, 1, 512, 9)], 4096))
    peer.queue_plan(Plan(8, 5, []))
    peer.remember(Reply(1, EPOCH, Done()))
    peer.queue_plan(Plan(7, 4, []))
    frames = []
    while (raw := peer.frame(EPOCH)) is not None:
        frames.append(decode_from_daemon(raw))
        peer.sent()
    assert frames == [
        Notice(EPOCH, [
            Plan(7, 3, [PageChange(1, 0, -1, 1, 512, 9), PageChange(2, 1, 0, 0, -1, 0)], 4096), Plan(8, 5, []),
        ]),
        Reply(1, EPOCH, Done()),
        Notice(EPOCH, [Plan(7, 4, [])]),
    ]  # fmt: skip


def test_a_worker_that_reads_nothing_gets_everything_in_order_once_it_does(world: World) -> None:
    a = world.dealer()
    a.ask(1, Ping())
    version = 1

    def reserve(event: events.Event) -> list[events.Instruction]:
        nonlocal version
        version += 1
        padding = [PageChange(page, 1, 0, 0, -1, 0) for page in range(500)]
        return [events.SendPlan("a", Plan(7, version, padding)), events.Answer(event.request, Done())]  # type: ignore[union-attr]

    world.brain.script[events.Reserved] = reserve
    total = 1500  # two messages each: beyond both high-water marks and the kernel's buffers
    for number in range(2, total + 2):
        a.send(number, Reserve(7, 1))
        if number % 500 == 0:
            until(lambda number=number: len(world.brain.of(events.Reserved)) >= number - 1)
    until(lambda: len(world.brain.of(events.Reserved)) == total)
    replies, versions = [], []
    while len(replies) < total or not versions or versions[-1] < total + 1:
        message = a.receive()
        if isinstance(message, Reply):
            replies.append(message.id)
        else:
            versions += [plan.version for plan in message.plans]
    assert replies == list(range(2, total + 2))
    assert versions == sorted(set(versions))


def test_sessions_are_told_to_anyone(world: World) -> None:
    stranger = world.dealer("nobody", attach=False)
    assert stranger.ask(1, Sessions(), epoch=0) == SessionsResult([FIGURES])


@pytest.mark.parametrize("blocked", [-1.0, float("nan"), float("inf")])
def test_blocked_time_that_cannot_be_is_refused(world: World, blocked: float) -> None:
    a = world.dealer("a")
    result = a.ask(1, Observe(7, 1, 3, blocked=blocked), np.zeros(3, np.float16).tobytes())
    assert isinstance(result, Failure) and result.code == "request"
    assert not world.brain.of(events.Observed)
