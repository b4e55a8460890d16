"""Owners that die and come back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import tierkv
from tests.faults.harness import Owner, Worker, until
from tests.faults.pages import SMALL, check, step, write
from tierkv.errors import OwnerUnavailable, PagesLost

Run = tuple[Callable[..., Owner], Callable[[], Worker]]
PAGE = SMALL.page_bytes


def test_a_worker_finds_the_next_owner_by_itself_and_keeps_every_byte(run: Run, state_dir: Path) -> None:
    owner, _ = run
    first = owner(24 * PAGE, 200 * PAGE)
    with tierkv.connect(state_dir, timeout=20.0) as client:
        session = client.open(SMALL, "small")
        step(client, session, 1, 40)
        for _ in range(8):
            step(client, session, 1, 48)
        before = check(client, session, 1)
        assert before.wrong == 0 and before.hbm + before.host >= 27
        first.kill()
        second = owner(24 * PAGE, 200 * PAGE)
        until(lambda: client.connected and client.epoch == second.epoch, 10.0)
        assert second.epoch == first.epoch + 1
        after = check(client, session, 1)
        assert (after.wrong, after.none) == (0, 0)
        for _ in range(8):
            step(client, session, 1, 48)
        for _ in range(20):
            step(client, session, 1, 1, steps=1)
        assert session.horizon == 40 + 16 * 48 + 20
        assert check(client, session, 1).wrong == 0
        assert client.stats(session.id)["tokens"] == session.horizon
        session.close()
        until(lambda: client.stats()["hbm_used_bytes"] == 0, 5.0)


def test_a_step_that_was_open_when_the_owner_died_is_committed_to_the_next_one_once(
    run: Run, state_dir: Path
) -> None:
    owner, _ = run
    first = owner(64 * PAGE, 64 * PAGE)
    with tierkv.connect(state_dir, timeout=20.0) as client:
        session = client.open(SMALL, "small")
        step(client, session, 1, 40)
        session.begin(50)
        os.kill(first.process.pid, signal.SIGSTOP)  # so that what follows is in flight when it dies
        write(client, session, 1, 40, 90)
        session.commit()
        session.end()
        first.kill()
        second = owner(64 * PAGE, 64 * PAGE)
        until(lambda: client.connected and client.epoch == second.epoch, 10.0)
        assert client.stats(session.id)["tokens"] == 90
        step(client, session, 1, 30)
        assert client.stats(session.id)["tokens"] == 120
        assert check(client, session, 1).wrong == 0


def test_a_fork_survives_its_owner_with_shared_pages(run: Run, state_dir: Path) -> None:
    owner, _ = run
    first = owner(64 * PAGE, 64 * PAGE)
    with tierkv.connect(state_dir, timeout=20.0) as client:
        parent = client.open(SMALL, "small")
        step(client, parent, 1, 100)
        child = parent.fork()
        backed_up = 6  # full pages; both tables must know before the owner dies
        until(lambda: check(client, parent, 1).host == check(client, child, 1).host == backed_up, 5.0)
        used = client.stats()["bytes_hbm"]
        first.kill()
        second = owner(64 * PAGE, 64 * PAGE)
        until(lambda: client.connected and client.epoch == second.epoch, 10.0)
        assert client.stats()["bytes_hbm"] == used
        step(client, child, 1, 20)
        step(client, parent, 1, 20)
        assert check(client, parent, 1).wrong == check(client, child, 1).wrong == 0
        assert parent.length == child.length == 120


def test_while_there_is_no_owner_calls_wait_and_then_say_so(run: Run, state_dir: Path) -> None:
    owner, _ = run
    first = owner(8 * PAGE, 0)
    with tierkv.connect(state_dir, timeout=0.5) as client:
        session = client.open(SMALL, "small")
        step(client, session, 1, 10)
        first.kill()
        until(lambda: not client.connected, 2.0)
        with pytest.raises(OwnerUnavailable, match="did not answer"):
            client.open(SMALL, "small")
        with pytest.raises(OwnerUnavailable):
            session.begin(100)
        assert session.length == 10


def test_a_larger_pool_cannot_adopt_and_the_worker_is_told_what_is_lost(run: Run, state_dir: Path) -> None:
    owner, _ = run
    first = owner(8 * PAGE, 8 * PAGE)
    with tierkv.connect(state_dir, timeout=20.0) as client:
        session = client.open(SMALL, "small")
        step(client, session, 1, 20)
        first.kill()
        second = owner(16 * PAGE, 8 * PAGE)
        until(lambda: client.connected and client.epoch == second.epoch, 10.0)
        with pytest.raises(PagesLost) as lost:
            session.begin(1)
        assert lost.value.ranges == ((0, 20),)
        session.close()
        fresh = client.open(SMALL, "small")
        step(client, fresh, 2, 100)
        assert check(client, fresh, 2).wrong == 0


def test_an_owner_of_another_form_cannot_adopt_low_bit_pages(run: Run, state_dir: Path) -> None:
    """It would hand them to attention as what they are not."""
    owner, _ = run
    first = owner(8 * PAGE, 32 * PAGE)
    with tierkv.connect(state_dir, timeout=20.0) as client:
        session = client.open(SMALL, "small")
        for _ in range(16):
            step(client, session, 1, 16)
        until(lambda: client.stats()["pages_quantized"] > 0, 10.0)
        first.kill()
        second = owner(8 * PAGE, 32 * PAGE, "--codec", "kivi2")
        until(lambda: client.connected and client.epoch == second.epoch, 10.0)
        with pytest.raises(PagesLost, match=r"packed as k3v2, .* as kivi2") as lost:
            session.begin(1)
        assert lost.value.ranges == ((0, 256),)


def test_a_new_owner_waits_for_a_stopped_worker_and_for_its_death(run: Run, state_dir: Path) -> None:
    owner, worker = run
    first = owner(16 * PAGE, 16 * PAGE)
    sleeper = worker()
    sleeper.ask("open", seed=1)
    sleeper.ask("step", tokens=40)
    sleeper.signal(signal.SIGSTOP)
    first.kill()
    owner(16 * PAGE, 16 * PAGE)
    with pytest.raises(OwnerUnavailable, match="1 workers of the last owner are awaited"):
        tierkv.connect(state_dir, timeout=0.3)
    sleeper.kill()
    with tierkv.connect(state_dir, timeout=10.0) as client:
        session = client.open(SMALL, "small")
        step(client, session, 2, 100)
        assert check(client, session, 2).wrong == 0


def test_a_client_closed_while_there_was_no_owner_is_not_waited_for(run: Run, state_dir: Path) -> None:
    owner, _ = run
    first = owner(16 * PAGE, 16 * PAGE)
    gone = tierkv.connect(state_dir)
    step(gone, gone.open(SMALL, "small"), 1, 20)
    first.kill()
    until(lambda: not gone.connected, 2.0)
    gone.close()
    owner(16 * PAGE, 16 * PAGE)
    with tierkv.connect(state_dir, timeout=10.0) as client:
        assert client.open(SMALL, "small").length == 0
