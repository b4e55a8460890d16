"""The same over a real daemon in its own process: tokens, forks, crops and demotion go through the wire."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import tierkv
import tierkv.table
from tests.faults.harness import Owner
from tests.tierkv.tiny_models import CACHE, NEW, build, expected, greedy, longer, prompt
from tierkv.markers import Marker, Markers
from tierkv.model import attach
from tierkv.regions import Region
from tierkv.transformers_cache import TieredCache

Start = Callable[[int], tierkv.Client]

PAGE_BYTES = 3 * 2 * 2 * 16 * 16 * 4
"""Layers, K and V, heads, tokens, head_dim, float32."""


@pytest.fixture
def start() -> Iterator[Start]:
    """A client of a fresh daemon with that many pages of HBM."""
    # On tmpfs, and short: a socket's path has 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="tierkv-", dir="/dev/shm"))
    owners: list[Owner] = []
    clients: list[tierkv.Client] = []

    def client(pages: int) -> tierkv.Client:
        owners.append(Owner(folder, pages * PAGE_BYTES, 8 << 20))
        clients.append(tierkv.connect(folder))
        return clients[-1]

    yield client
    for opened in clients:
        opened.close()
    for owner in owners:
        owner.kill()
    shutil.rmtree(folder)


def test_a_padded_batch_in_slices_and_a_second_turn_give_the_same_tokens(start: Start) -> None:
    model, inputs = build("llama"), prompt(70, 41)
    first = expected(model, inputs)
    second = longer(inputs | {"input_ids": first}, prompt(9, 9, seed=2)["input_ids"])
    want = expected(model, second)
    attached, client = attach(model), start(64)
    cache = TieredCache([attached.open(client, ladder="exact") for _ in range(2)], chunk_tokens=32)
    assert torch.equal(greedy(model, inputs, cache), first)
    assert torch.equal(greedy(model, second, cache), want)
    assert [session.horizon for session in cache.sessions] == [70 + 2 * NEW + 8, 41 + 2 * NEW + 8]
    assert [session.step for session in cache.sessions] == [2 * (NEW - 1)] * 2


def test_beams_fork_through_the_daemon_and_give_the_same_tokens(start: Start) -> None:
    model, inputs = build("qwen2"), prompt(19)
    want = expected(model, inputs, num_beams=4)
    attached, client = attach(model), start(128)
    cache = TieredCache(attached.open(client, ladder="exact"))
    assert torch.equal(greedy(model, inputs, cache, num_beams=4), want)


def test_drafts_and_crops_below_the_horizon_give_the_same_tokens(start: Start) -> None:
    model = build("mistral")
    inputs = {name: tensor.repeat(1, 4) for name, tensor in prompt(12).items()}
    want = expected(model, inputs)
    attached, client = attach(model), start(64)
    session = attached.open(client, ladder="exact")
    cache = TieredCache(session)
    assert torch.equal(greedy(model, inputs, cache, prompt_lookup_num_tokens=4), want)
    cache.crop(-(cache.get_seq_length() - 40))
    assert session.horizon == 40
    assert torch.equal(greedy(model, inputs, cache), want)


def test_a_prompt_larger_than_hbm_demotes_as_it_goes_and_is_answered(start: Start) -> None:
    """30 pages of prompt in a pool of 20: older pages become low-bit, attended in place."""
    model, inputs = build("llama"), prompt(480)
    attached, client = attach(model), start(20)
    session = attached.open(client)
    cache = TieredCache(session)
    assert cache.slices(1, 480) == [(80 * i, 80 * i + 80) for i in range(6)]
    tokens = greedy(model, inputs, cache)
    assert tokens.shape == (1, 480 + NEW)
    assert session.horizon == 480 + NEW - 1
    session.begin(0)
    kinds = session.rows(session.length).kinds.tolist()
    session.end()
    assert kinds.count(tierkv.table.Kind.QUANTIZED) >= 10
    with torch.no_grad():
        model(tokens[:, -1:], **{CACHE: cache})
    assert session.horizon == 480 + NEW


def test_pages_of_an_unlabelled_prompt_have_the_regions_of_its_markers(start: Start) -> None:
    model, ids = build("llama"), prompt(200)["input_ids"]
    places = {0: Region.SYSTEM, 40: Region.TOOL_OUT, 150: Region.SCRATCHPAD}
    for at, region in places.items():
        ids[0, at], ids[0, at + 1] = 1, 10 + region  # prompts hold no 1 otherwise
    markers = Markers(Marker((1, 10 + region), region) for region in places.values())
    attached, client = attach(model), start(64)
    session = attached.open(client, ladder="exact")
    cache = TieredCache(session, markers=markers, chunk_tokens=64)
    session.label("plan", 20)
    greedy(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, cache)
    pages = [(page.region, page.count) for page in session.state()[0].table.pages]
    assert pages[:4] == [(Region.PLAN, 16), (Region.PLAN, 4), (Region.SYSTEM, 16), (Region.SYSTEM, 4)]
    assert pages[4:11] == [(Region.TOOL_OUT, 16)] * 6 + [(Region.TOOL_OUT, 14)]
    assert pages[11:14] == [(Region.SCRATCHPAD, 16)] * 3
