"""Workers that die, stop, or talk nonsense."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

import tierkv
from tests.faults.harness import ENVIRONMENT, ROOT, Owner, Worker, holds_nothing, until
from tests.faults.pages import SMALL, WIDE, check, step
from tierkv import handshake
from tierkv.errors import ProtocolError
from tierkv.protocol import ATTACH_SOCKET, PROTOCOL_VERSION, REQUEST_SOCKET, Attach

Run = tuple[Callable[..., Owner], Callable[[], Worker]]
PAGE = SMALL.page_bytes
FAST = ("--lease-seconds", "0.6", "--heartbeat-seconds", "0.2")


def test_a_worker_killed_while_it_writes_returns_every_page_within_a_second(
    run: Run, state_dir: Path
) -> None:
    owner, worker = run
    owner(64 * PAGE, 64 * PAGE)
    with tierkv.connect(state_dir) as watcher:
        victim = worker()
        victim.ask("open", seed=1)
        victim.ask("step", tokens=160)
        victim.ask("scribble", tokens=160)
        before = watcher.stats()
        assert before["hbm_used_bytes"] >= 20 * PAGE and before["workers"] == 2
        victim.signal(signal.SIGKILL)

        def everything_is_back() -> bool:
            now = watcher.stats()
            return now["workers"] == 1 and now["hbm_used_bytes"] == now["host_used_bytes"] == 0

        assert until(everything_is_back, 1.0) < 1.0
        assert watcher.stats()["sessions"] == 0


def test_a_stopped_worker_that_wakes_up_and_writes_changes_nobody_elses_bytes(
    run: Run, state_dir: Path
) -> None:
    owner, worker = run
    owner(40 * PAGE, 400 * PAGE, *FAST)
    sleeper = worker()
    sleeper.ask("open", seed=1)
    sleeper.ask("step", tokens=64)
    sleeper.ask("begin", tokens=96)  # six pages that it will write after its lease is over
    with tierkv.connect(state_dir) as client:
        sleeper.signal(signal.SIGSTOP)
        until(lambda: client.stats()["quarantined_workers"] == 1, 5.0)
        others = [(client.open(SMALL, "small"), seed) for seed in (2, 3)]
        for _ in range(20):
            for session, seed in others:
                step(client, session, seed, 32)
        stats = client.stats()
        assert stats["pages_hbm"] < 80 < stats["pages_hbm"] + stats["pages_quantized"] + stats["pages_host"]
        sleeper.resume()
        assert sleeper.ask("finish") == 160
        until(lambda: client.stats()["quarantined_workers"] == 0, 5.0)
        for session, seed in others:
            found = check(client, session, seed)
            assert found.wrong == 0 and found.hbm + found.host >= 40
        mine = sleeper.ask("check")
        assert mine[3] == 0 and mine[0] + mine[1] >= 10  # Found(hbm, host, none, wrong)


def test_workers_of_two_geometries_share_a_pool(run: Run, state_dir: Path) -> None:
    owner, worker = run
    owner(48 * PAGE, 400 * PAGE)
    small, wide = worker(), worker()
    small.ask("open", seed=1)
    wide.ask("open", seed=2, wide=True)
    for _ in range(10):
        small.ask("step", tokens=48)
        wide.ask("step", tokens=48)
    for worker_ in (small, wide):
        hbm, host, none, wrong = worker_.ask("check")
        assert (none, wrong) == (0, 0) and hbm + host >= 30
    assert WIDE.page_bytes == 2 * PAGE


def test_garbage_on_both_sockets_is_survived(run: Run, state_dir: Path) -> None:
    owner, _ = run
    owner(8 * PAGE, 0)
    random = np.random.default_rng(7)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.LINGER, 0)
    dealer.connect(f"ipc://{state_dir / REQUEST_SOCKET}")
    for size in (0, 1, 10, 1000, 100_000):
        dealer.send_multipart([random.bytes(size), random.bytes(size)])
        with socket.socket(socket.AF_UNIX) as raw:  # not even ZeroMQ
            raw.connect(str(state_dir / REQUEST_SOCKET))
            raw.sendall(random.bytes(size))
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(state_dir / ATTACH_SOCKET))
            raw.sendall(struct.pack("<I", size) + random.bytes(size))
    with socket.socket(socket.AF_UNIX) as raw:  # announces 4 GiB
        raw.connect(str(state_dir / ATTACH_SOCKET))
        raw.sendall(struct.pack("<I", 0xFFFFFFFF) + bytes(1000))
        raw.settimeout(5)
        assert b"4,294,967,295" in raw.recv(1000)
    with tierkv.connect(state_dir) as client:
        assert client.ping() < 5.0
        session = client.open(SMALL, "small")
        step(client, session, 1, 20)
        assert check(client, session, 1) == (2, 0, 0, 0)
    dealer.close()
    context.term()


def test_an_attach_of_another_version_is_refused_with_both_versions_named(run: Run, state_dir: Path) -> None:
    owner, _ = run
    owner(8 * PAGE, 0)
    with pytest.raises(ProtocolError, match=rf"protocol {PROTOCOL_VERSION + 1}.*daemon {PROTOCOL_VERSION}"):
        handshake.attach(state_dir, Attach(PROTOCOL_VERSION + 1, "later"), None, 5.0)

    class Future(msgspec.Struct, tag="attach"):
        protocol: int
        field_of_the_future: int

    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(state_dir / ATTACH_SOCKET))
        handshake.send_frame(raw, msgspec.msgpack.encode(Future(99, 1)))
        raw.settimeout(5)
        assert b"protocol 99" in raw.recv(1000)


def test_two_hundred_connects_leave_descriptors_and_threads_flat(run: Run, state_dir: Path) -> None:
    owner, _ = run
    daemon = owner(8 * PAGE, 8 * PAGE).process.pid

    def counts() -> tuple[int, int, int, int]:
        folders = (f"/proc/{daemon}/fd", f"/proc/{daemon}/task", "/proc/self/fd", "/proc/self/task")
        return tuple(len(os.listdir(folder)) for folder in folders)  # type: ignore[return-value]

    def round_trip() -> None:
        with tierkv.connect(state_dir) as client:
            session = client.open(SMALL, "small")
            step(client, session, 1, 20)

    with tierkv.connect(state_dir) as watcher:
        for _ in range(3):
            round_trip()
        until(lambda: watcher.stats()["workers"] == 1, 5.0)
        before = counts()
        for _ in range(200):
            round_trip()
        until(lambda: watcher.stats()["workers"] == 1, 5.0)
        until(lambda: all(now <= then + 1 for now, then in zip(counts(), before, strict=True)), 5.0)
        until(lambda: holds_nothing(watcher), 5.0)


def test_a_worker_that_just_ends_neither_hangs_nor_leaves_pages(run: Run, state_dir: Path) -> None:
    owner, _ = run
    owner(16 * PAGE, 0)
    code = (
        "import sys, tierkv\n"
        "from tests.faults.pages import SMALL, step\n"
        "client = tierkv.connect(sys.argv[1])\n"
        "step(client, client.open(SMALL, 'small'), 1, 40)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(state_dir)],
        cwd=ROOT,
        env=ENVIRONMENT,
        timeout=30,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    with tierkv.connect(state_dir) as client:
        until(lambda: client.stats()["hbm_used_bytes"] == 0, 2.0)
