"""Callers that wait do the line's work themselves, in turn with its thread: nothing is lost or late in between."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tierkv
from tests.faults.pages import SMALL, check, step
from tierkv.calls import RESEND_SECONDS
from tierkv.daemon.brain import Brain, BrainConfig
from tierkv.daemon.service import Service, ServiceConfig
from tierkv.errors import OwnerUnavailable

MEMORY = 256 * SMALL.page_bytes


def brain(config: ServiceConfig) -> Brain:
    return Brain(BrainConfig(config.hbm_bytes, config.host_bytes, config.epoch, config.codec))


@pytest.fixture
def client() -> Iterator[tierkv.Client]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        service = Service(ServiceConfig(Path(folder), MEMORY, MEMORY, 1), brain)
        service.start()
        client = tierkv.connect(folder)
        yield client
        client.close()
        service.stop()


def at_once(*work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(len(work)) as threads:
        for future in [threads.submit(one) for one in work]:
            future.result()


def test_no_answer_waits_for_a_resend_while_many_callers_take_turns(client: tierkv.Client) -> None:
    """A wake-up lost between two who do the line's work would be made up for by the resend, a second later."""
    slowest: list[float] = []

    def pings() -> None:
        slowest.append(max(client.ping() for _ in range(300)))

    def steps() -> None:
        session = client.open(SMALL, "m")
        for _ in range(50):
            step(client, session, session.id, 1, steps=1)
        assert check(client, session, session.id).wrong == 0

    at_once(pings, pings, pings, steps, steps)
    assert max(slowest) < RESEND_SECONDS


def test_a_caller_that_waits_is_answered_in_its_own_thread(client: tierkv.Client) -> None:
    """Seen by the line's thread sleeping through it."""
    client.ping()
    line = next(thread for thread in threading.enumerate() if thread.name == "tierkv-line")
    switches = Path(f"/proc/{os.getpid()}/task/{line.native_id}/status")

    def slept() -> int:
        return int(switches.read_text().split("voluntary_ctxt_switches:")[1].split()[0])

    before = slept()
    for _ in range(300):
        client.ping()
    assert slept() - before < 100  # two a ping where the thread does the work


def test_closing_ends_the_waits_of_other_threads(client: tierkv.Client) -> None:
    ended: list[BaseException | None] = []

    def pings() -> None:
        try:
            while True:
                client.ping()
        except OwnerUnavailable as error:
            ended.append(error)

    threads = [threading.Thread(target=pings) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    client.close()
    for thread in threads:
        thread.join(5.0)
    assert len(ended) == 3
