"""The quantize-everything baseline keeps what its bytes hold, exact where the codec is, and drops the oldest first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tierkv import quant
from tierkv.geometry import Geometry
from tierkv.quant.contract import Bytes, Codec, Floats
from tierkv.regions import Region
from tierkv.study import probe as probing
from tierkv.study import quantized
from tierkv.study.episodes import load_episodes, spans
from tierkv.study.model import load_smollm2
from tierkv.study.quantized import QuantizedCache, forward

TOKENS = [(7 * i * i + 3 * i) % 26 for i in range(60)]
GEOMETRY = Geometry(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_tokens=4)
PAGE = 2 * 2 * 2 * 4 * 8 * 4  # layers, K and V, heads, tokens, head_dim, bytes of a float32
STATE = 4 * 3
run = partial(forward, chunk_tokens=8)


class Exact(Codec):
    """Keeps every byte and claims to need a quarter of them. Its state is the number of pages that it was fitted on."""

    name: ClassVar[str] = "exact"
    code: ClassVar[int] = 99

    def page_bytes(self, geometry: Geometry) -> int:
        return geometry.page_bytes // 4

    def state_floats(self, geometry: Geometry) -> int:
        return 3

    def fit_state(self, geometry: Geometry, pages: Sequence[Bytes], counts: Sequence[int]) -> Floats:
        self.kept: list[Bytes] = []
        return np.zeros(3, np.float32)

    def encode(self, geometry: Geometry, exact: Bytes, count: int, state: Floats, out: Bytes) -> None:
        self.kept.append(exact.copy())

    def decode(self, geometry: Geometry, packed: Bytes, count: int, state: Floats, out: Bytes) -> None:
        out[:] = self.kept[-1]

    def reference_encode(self, geometry: Geometry, exact: Bytes, count: int, state: Floats) -> Bytes:
        return exact

    def reference_decode(self, geometry: Geometry, packed: Bytes, count: int, state: Floats) -> Floats:
        return packed.view(np.float32).reshape(geometry.shape)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=26, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def cache_of(model, budget=None, codec=None) -> QuantizedCache:
    return QuantizedCache(model.config, GEOMETRY, codec or Exact(), budget)


def keys(cache) -> torch.Tensor:
    return torch.stack([layer.keys for layer in cache.layers])


def test_with_room_for_all_and_a_codec_that_loses_nothing_it_is_the_full_cache(model, monkeypatch):
    monkeypatch.setattr(quantized, "FIT_PAGES", 2)
    full, cache = probing.dynamic_cache(model), cache_of(model)
    cache.label(Region.SYSTEM, 10)  # pages end where regions do: 4 + 4 + 2
    probing.replay(model, full, TOKENS, burst=5)
    probing.replay(model, cache, TOKENS, burst=5, forward=run)
    torch.testing.assert_close(keys(cache), keys(full))
    assert [page.tokens for page in cache.pages[:4]] == [4, 4, 2, 4]
    assert sum(page.tokens for page in cache.pages) == len(TOKENS) == cache.length
    assert [page.low for page in cache.pages] == [False] + 15 * [True] + [
        False
    ]  # all but the sink and the open one


def test_its_bytes_never_exceed_the_budget(model):
    budget = 5 * PAGE + STATE
    cache = cache_of(model, budget)
    seen = []
    for token in TOKENS:
        run(model, cache, [token])
        seen.append(cache.bytes)
    assert max(seen) == cache.bytes_peak <= budget
    # The sink and the open page are exact; the other 3 x 4 quarters are low-bit pages.
    assert (
        cache.bytes == PAGE + 13 * (PAGE // 4) + STATE or cache.bytes == 2 * PAGE + 12 * (PAGE // 4) + STATE
    )


def test_the_oldest_leave_first_but_the_first_page_stays(model):
    # 15 pages of one region; room for the sink, and 4 x 2 low-bit pages: tokens 0-3 and the last 32.
    full, cache = probing.dynamic_cache(model), cache_of(model, 3 * PAGE + STATE)
    probing.replay(model, full, TOKENS[:8], burst=0)
    probing.replay(model, cache, TOKENS[:8], burst=0, forward=run)
    torch.testing.assert_close(
        keys(cache), keys(full)
    )  # nothing has left yet: these rows are as they should be
    run(model, cache, TOKENS[8:])
    assert cache.length == 60
    assert [page.tokens for page in cache.pages] == [4] * 9
    assert keys(cache).shape[3] == 36
    torch.testing.assert_close(keys(cache)[:, :, :, :4], keys(full)[:, :, :, :4])


def test_tokens_keep_their_positions_when_earlier_ones_leave(model):
    """The first layer's keys depend on token and position only: they are those of the full cache."""
    full, cache = probing.dynamic_cache(model), cache_of(model, 3 * PAGE + STATE)
    probing.forward(model, full, TOKENS)
    run(model, cache, TOKENS)
    first = full.layers[0].keys
    torch.testing.assert_close(cache.layers[0].keys, torch.cat((first[:, :, :4], first[:, :, 28:]), 2))


def test_a_budget_below_the_sink_and_the_open_page_is_an_error(model):
    with pytest.raises(ValueError, match="hold not even"):
        run(model, cache_of(model, PAGE), TOKENS)


def page_1(cache) -> torch.Tensor:
    """Tokens 4 to 7 in a page's layout."""
    whole = torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])
    return whole[:, :, :, 4:8].contiguous()


def test_a_low_bit_page_holds_what_the_codec_decodes(model):
    codec, full = quant.get("k3v2"), probing.dynamic_cache(model)
    cache = cache_of(model, 4 * PAGE, codec)
    run(model, cache, TOKENS[:8])  # fits exact; the next slice does not
    with torch.inference_mode():
        probing.forward(model, full, TOKENS[:8])
    torch.testing.assert_close(keys(cache), keys(full))
    run(model, cache, TOKENS[8:20])
    assert cache._state is not None
    packed = codec.reference_encode(GEOMETRY, page_1(full).numpy().view(np.uint8).ravel(), 4, cache._state)
    decoded = torch.from_numpy(codec.reference_decode(GEOMETRY, packed, 4, cache._state))
    torch.testing.assert_close(page_1(cache), decoded.view(GEOMETRY.shape), rtol=1e-5, atol=1e-6)


def test_a_question_over_a_fork_leaves_no_trace(model):
    cache = cache_of(model, 4 * PAGE)
    probing.replay(model, cache, TOKENS, burst=5, forward=run)
    before, pages = keys(cache).clone(), [(page.tokens, page.low) for page in cache.pages]
    with probing.fork_dynamic(cache)() as fork:
        run(model, fork, TOKENS[:13])
    torch.testing.assert_close(keys(cache), before)
    assert [(page.tokens, page.low) for page in cache.pages] == pages
    assert cache.length == len(TOKENS)


@pytest.mark.model
def test_low_bit_pages_answer_what_exact_ones_do():
    """Every page of an episode in k3v2 but the first: the demo's 24 facts, which the full cache knows, but for one.

    A greedy answer starts with the gold when each of its tokens is the likeliest after those before it: one forward.
    """
    model, tokenizer = load_smollm2()
    config = model.config
    geometry = Geometry(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, "bfloat16")
    known: dict[str, bool] = {}
    for episode in load_episodes():
        cache = QuantizedCache(config, geometry, quant.get("k3v2"))
        for span in spans(episode, tokenizer):
            cache.label(span.region, len(span.tokens))
            forward(model, cache, span.tokens, chunk_tokens=256)
        assert all(page.low for page in cache.pages[1:-1])
        for probe in episode.probes:
            prompt, text = tokenizer([probe.prompt, f"{probe.prompt} {probe.gold}"]).input_ids
            positions = torch.arange(cache.length, cache.length + len(text))[None]
            with probing.fork_dynamic(cache)() as fork, torch.inference_mode():
                given = {probing.cache_argument(model): fork}
                logits = model(torch.tensor([text]), position_ids=positions, **given).logits[0]
            likeliest = logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
            known[f"{episode.name}: {probe.gold}"] = likeliest == text[len(prompt) :]
    assert len(known) == 24
    assert sum(known.values()) >= 23, [fact for fact, right in known.items() if not right]
