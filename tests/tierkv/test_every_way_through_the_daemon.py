"""The ways of generating over a daemon in its own process: the same tokens, and nothing of theirs stays behind."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import tierkv
from tests.faults.harness import Owner, holds_nothing, until
from tests.tierkv.tiny_models import CACHE, expected, greedy, longer, prompt
from tests.tierkv.ways import WAYS, Way, attached, generate, plain, sampled, wanted
from tierkv.errors import CapacityError
from tierkv.transformers_cache import TieredCache

HBM = 4 << 20
"""Several hundred pages of a tiny model: nothing has to give way."""

CHOSEN = [
    (way, name)
    for way in WAYS
    for name in ("llama", "qwen2-windows")
    if name == "llama"
    or way.name in {"four beams of each row", "prompt lookup", "an assistant", "three samples"}
]


@contextlib.contextmanager
def daemon(hbm: int, timeout: float = 10.0) -> Iterator[tierkv.Client]:
    # On tmpfs, and short: a socket's path has 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="tierkv-", dir="/dev/shm"))
    owner = Owner(folder, hbm, 8 << 20)
    try:
        with tierkv.connect(folder, timeout) as client:
            yield client
    finally:
        owner.kill()
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def client() -> Iterator[tierkv.Client]:
    with daemon(HBM) as client:
        yield client


def cache_of(client: tierkv.Client, name: str, rows: int = 1, **options: Any) -> TieredCache:
    return TieredCache(
        [attached(name).open(client, "float32", ladder="exact") for _ in range(rows)], **options
    )


@pytest.mark.parametrize(("way", "name"), CHOSEN, ids=lambda value: getattr(value, "name", value))
def test_the_tokens_are_the_same_and_no_session_or_page_stays(
    client: tierkv.Client, way: Way, name: str
) -> None:
    cache = cache_of(client, name, len(way.lengths), chunk_tokens=way.chunk_tokens)
    assert torch.equal(generate(way, name, attached(name).model, cache), wanted(way, name))
    # Rows of beams are forks: each is open, dropped ones are closed.
    assert client.stats()["sessions"] == len(cache.sessions)
    cache.close()
    until(lambda: holds_nothing(client), 5.0)


def test_beams_then_the_best_ones_second_turn_then_samples_of_it(client: tierkv.Client) -> None:
    model, cache = attached("llama").model, cache_of(client, "llama")
    best = greedy(model, prompt(19), cache, num_beams=4)
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(19 - cache.get_seq_length())
    second = longer(prompt(19) | {"input_ids": best}, prompt(7, seed=4)["input_ids"])
    said = greedy(model, second, cache)
    assert torch.equal(said, expected(plain("llama"), second))
    third = longer(second | {"input_ids": said}, prompt(5, seed=5)["input_ids"])
    want = sampled(plain("llama"), third, DynamicCache(), 3)
    assert torch.equal(sampled(model, third, cache, 3), want)
    cache.close()
    until(lambda: holds_nothing(client), 5.0)


def test_prompt_lookup_goes_on_with_a_session(client: tierkv.Client) -> None:
    model, cache = attached("llama").model, cache_of(client, "llama")
    inputs = {name: tensor.repeat(1, 4) for name, tensor in prompt(12).items()}
    said = greedy(model, inputs, cache, prompt_lookup_num_tokens=4)
    second = longer(inputs | {"input_ids": said}, prompt(12)["input_ids"])
    assert torch.equal(
        greedy(model, second, cache, prompt_lookup_num_tokens=4), expected(plain("llama"), second)
    )
    assert cache.sessions[0].horizon == cache.sessions[0].length == cache.get_seq_length()
    cache.close()
    until(lambda: holds_nothing(client), 5.0)


def test_beams_that_find_no_room_leave_one_session_that_goes_on() -> None:
    """12 pages: two of the text, and eight beams, each with a copy of the half-filled one, find no room for a third."""
    geometry = attached("llama").geometry("float32")
    with daemon(12 * geometry.page_bytes, timeout=0.5) as client:
        model, cache = attached("llama").model, cache_of(client, "llama", chunk_tokens=64)
        model(**prompt(20), **{CACHE: cache})
        kept = list(cache.sessions)
        second = longer(prompt(20), prompt(16, seed=3)["input_ids"])
        with pytest.raises(CapacityError):
            greedy(model, second, cache, num_beams=8)
        assert cache.sessions == kept
        until(lambda: client.stats()["sessions"] == 1, 5.0)
        assert torch.equal(greedy(model, second, cache), expected(plain("llama"), second))
        cache.close()
        until(lambda: holds_nothing(client), 5.0)
