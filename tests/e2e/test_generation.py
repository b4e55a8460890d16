"""`model.generate` in a worker process over a daemon in its own, while either dies or memory is short.

Tokens are compared with what the same model says over transformers' own `DynamicCache`, wherever pages stay exact.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tests.e2e.generating import Generator
from tests.faults.harness import Owner, until

PAGE = 3 * 2 * 2 * 16 * 16 * 4
"""Bytes of a page of `tiny_models.SHAPE`: layers, K and V, KV heads, tokens, head_dim, float32."""

OTHER = {"num_hidden_layers": 2, "hidden_size": 128, "num_key_value_heads": 4}
OTHER_PAGE = 2 * 2 * 4 * 16 * 32 * 4

LONG = {"max_position_embeddings": 2048}


WORKERS: dict[str, Generator] = {}
"""Processes that serve one test after another, by the changes to their model."""


class Place:
    """A state directory, and who works on it."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.owners: list[Owner] = []
        self.workers: list[Generator] = []
        self.clients: list[tierkv.Client] = []

    def owner(self, hbm: int, host: int) -> Owner:
        self.owners.append(Owner(self.state_dir, hbm, host))
        return self.owners[-1]

    def worker(self, **model: Any) -> Generator:
        worker = WORKERS.get(repr(model))
        if worker is None:
            worker = WORKERS[repr(model)] = Generator(**LONG | model)
        self.workers.append(worker)
        worker.connect(self.state_dir)
        return worker

    def watcher(self) -> tierkv.Client:
        self.clients.append(tierkv.connect(self.state_dir, timeout=20.0))
        return self.clients[-1]

    def close(self) -> None:
        """Workers that are not idle (killed, or their test failed) do not serve another test."""
        for client in self.clients:
            client.close()
        for worker in self.workers:
            if worker.process.poll() is None and not worker.owed:
                worker.ask("disconnect")
            else:
                worker.kill()
                for key in [key for key, value in WORKERS.items() if value is worker]:
                    del WORKERS[key]
        for owner in self.owners:
            owner.kill()
        shutil.rmtree(self.state_dir)


@pytest.fixture(scope="module", autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    while WORKERS:
        WORKERS.popitem()[1].kill()


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place(Path(tempfile.mkdtemp(prefix="tierkv-", dir="/dev/shm")))
    yield place
    place.close()


def settled(place: Place, tokens: int) -> dict[str, float]:
    """What the daemon counts once it has so many tokens: nobody waits for a generation's last commits."""
    watcher = place.watcher()
    until(lambda: watcher.stats()["tokens"] == tokens, 10.0)
    return watcher.stats()


@pytest.mark.parametrize("inside", [False, True], ids=["between steps", "inside a forward"])
def test_an_owner_killed_in_the_middle_of_a_generation_changes_no_token(place: Place, inside: bool) -> None:
    """The first owner is gone at step 10; the worker's reserved pages end before step 60, so it needs the second."""
    first = place.owner(64 * PAGE, 128 * PAGE)
    worker = place.worker()
    want = worker.ask("expected", lengths=[50, 33], new=60)
    assert worker.ask("generate", cache="a", lengths=[50, 33], new=60, stop_at=10, inside=inside) == "step 10"
    first.kill()
    begun = time.monotonic()
    worker.tell("go on")
    second = place.owner(64 * PAGE, 128 * PAGE)
    ready = time.monotonic()
    assert worker.answer() == want
    print(f"owner ready after {ready - begun:.2f} s, generation over {time.monotonic() - ready:.2f} s later")
    assert worker.ask("epoch") == second.epoch == first.epoch + 1
    assert worker.ask("horizons", cache="a") == [50 + 59, 33 + 59]
    assert settled(place, 50 + 33 + 2 * 59)["lost_pages"] == 0
    once_more = {"cache": "b", "lengths": [40], "new": 20, "seed": 2}
    assert worker.ask("generate", **once_more) == worker.ask("expected", lengths=[40], new=20, seed=2)


def test_low_bit_and_host_pages_live_through_their_owner_in_the_middle_of_a_generation(place: Place) -> None:
    first = place.owner(12 * PAGE, 128 * PAGE)
    worker = place.worker()
    assert worker.ask("generate", cache="a", lengths=[768], new=60, stop_at=10) == "step 10"
    first.kill()
    worker.tell("go on")
    place.owner(12 * PAGE, 128 * PAGE)
    assert len(worker.answer()[0]) == 768 + 60
    stats = settled(place, 768 + 59)
    assert (stats["lost_pages"], stats["pages_dropped"], stats["dropped_pages"]) == (0, 0, 0)
    assert stats["pages_quantized"] > 0 and stats["pages_host"] > 0


def test_two_models_share_a_pool_under_pressure_and_each_says_what_it_would_alone(place: Place) -> None:
    """Long tiered sessions of both fill the pool; exact ones make them give way, and no token changes."""
    hbm = 34 * PAGE + 34 * OTHER_PAGE
    place.owner(hbm, 200 * OTHER_PAGE)
    watcher = place.watcher()
    workers = [place.worker(), place.worker(**OTHER)]
    for worker in workers:
        worker.tell("generate", cache="filler", lengths=[700], new=4)
    for worker in workers:
        worker.answer()
    wants = [worker.ask("expected", lengths=[60, 40], new=40) for worker in workers]
    for worker in workers:
        worker.tell("generate", cache="exact", lengths=[60, 40], new=40, ladder="exact")
    assert [worker.answer() for worker in workers] == wants
    for worker in workers:  # what gave way is still attended, and recalled
        assert len(worker.ask("generate", cache="filler", ids=[[5] * 720], new=4)[0]) == 724
    stats = watcher.stats()
    assert stats["pages_quantized"] + stats["pages_host"] > 44  # half of the fillers' 88 pages
    assert (stats["dropped_pages"], stats["lost_pages"], stats["failed_moves"]) == (0, 0, 0)
    assert stats["hbm_peak_bytes"] <= stats["hbm_capacity_bytes"] == hbm // 4096 * 4096


@pytest.mark.parametrize("pages", [12, 20], ids=["to host", "low-bit"])
def test_a_prompt_four_times_the_pool_is_answered_and_nothing_is_dropped(place: Place, pages: int) -> None:
    place.owner(pages * PAGE, 128 * PAGE)
    worker = place.worker()
    tokens = 4 * pages * 16
    (answer,) = worker.ask("generate", cache="a", lengths=[tokens], new=40)
    assert len(answer) == tokens + 40
    stats = settled(place, tokens + 39)
    assert (stats["pages_dropped"], stats["dropped_pages"], stats["lost_pages"]) == (0, 0, 0)
    assert stats["hbm_peak_bytes"] <= stats["hbm_capacity_bytes"] == pages * PAGE // 4096 * 4096


def test_rows_of_a_padded_batch_that_must_wait_for_each_other_all_finish(place: Place) -> None:
    """Three rows of up to 300 tokens, 45 pages and more, in a pool of 22."""
    place.owner(22 * PAGE, 128 * PAGE)
    worker = place.worker()
    answer = worker.ask("generate", cache="a", lengths=[300, 170, 241], new=50)
    assert [len(row) for row in answer] == [350] * 3
    assert worker.ask("horizons", cache="a") == [349, 219, 290]
    stats = settled(place, 349 + 219 + 290)
    assert (stats["dropped_pages"], stats["lost_pages"]) == (0, 0)


def test_a_worker_killed_in_the_middle_of_a_generation_returns_every_page_within_a_second(
    place: Place,
) -> None:
    place.owner(64 * PAGE, 128 * PAGE)
    watcher = place.watcher()
    victim = place.worker()
    assert victim.ask("generate", cache="a", lengths=[90, 70], new=400, stop_at=10) == "step 10"
    victim.tell("go on")
    until(lambda: watcher.stats()["tokens"] > 90 + 70 + 2 * 20, 10.0)
    assert watcher.stats()["hbm_used_bytes"] >= 12 * PAGE
    victim.signal(signal.SIGKILL)

    def everything_is_back() -> bool:
        now = watcher.stats()
        return now["workers"] == 1 and now["sessions"] == now["hbm_used_bytes"] == now["host_used_bytes"] == 0

    print(f"all pages back after {until(everything_is_back, 1.0) * 1000:.0f} ms")
