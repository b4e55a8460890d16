"""What is recorded against attention computed in one go, and questions over placements against plain generation."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tierkv.benchmarks.recall import probes
from tierkv.benchmarks.recall.inputs import Ask, Input
from tierkv.benchmarks.recall.recorded import record, recorded
from tierkv.geometry import Geometry
from tierkv.quant import get
from tierkv.regions import Region, Run
from tierkv.study.episodes import Probe
from tierkv.study.probe import dynamic_cache, forward, replay

TOKENS = list(range(1, 41))
ASKS = [Ask([50, 51, 52], 2), Ask([60, 61], 2)]
GIVEN = Input("demo", "tiny", [Run(Region.SYSTEM, 20), Run(Region.USER, 20)], TOKENS, ASKS)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def weights_of(model, tokens):
    """Attention probabilities `[layers, heads, tokens, tokens]`, eager."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.inference_mode():
        return torch.stack(eager(torch.tensor([tokens]), output_attentions=True).attentions)[:, 0]


def test_shares_are_those_of_eager_attention(model):
    before = model.config._attn_implementation
    one = record(model, GIVEN)
    assert model.config._attn_implementation == before
    assert one.layout.counts.tolist() == [16, 4, 16, 4] and one.asks.tolist() == [0, 0, 1, 1]
    starts = [0, 16, 20, 36, 40]
    for number, ask in enumerate(ASKS):
        true = weights_of(model, TOKENS + ask.tokens)[:, :, -2:]
        pages = torch.stack([true[..., a:b].sum(-1) for a, b in pairwise(starts)], -1)
        assert torch.allclose(one.shares[:, :, one.asks == number], pages, atol=1e-4)


def test_keys_and_queries_give_the_masses(model):
    one = record(model, GIVEN)
    keys = one.keys.float().repeat_interleave(2, 1)
    logits = torch.einsum("lqnd,lqtd->lqnt", one.queries, keys) * one.scale
    assert torch.allclose(one.layout.log_mass(logits), one.masses, atol=0.02)


def test_attention_is_recorded_once(model, tmp_path):
    first = recorded(tmp_path, model, GIVEN)
    again = recorded(tmp_path, None, GIVEN)
    assert len(list(tmp_path.iterdir())) == 1
    assert torch.equal(first.masses, again.masses) and (first.layout.counts == again.layout.counts).all()
    assert first.scale == again.scale


class Tokenizer:
    """Characters are tokens."""

    def __call__(self, text, add_special_tokens=False):
        from types import SimpleNamespace

        return SimpleNamespace(input_ids=[ord(letter) - 48 for letter in text])

    def decode(self, tokens):
        return "".join(chr(48 + token) for token in tokens)


def plain(model, keep, count=3):
    """Greedy tokens after the question `12`, the context's tokens outside `keep` hidden from all but the question."""
    cache = dynamic_cache(model)
    with torch.inference_mode():
        replay(model, cache, TOKENS, burst=0)
        found = [forward(model, cache, [1, 2])]
        for layer in cache.layers:
            layer.keys, layer.values = (
                torch.cat((part[:, :, :40][:, :, keep], part[:, :, 40:]), 2)
                for part in (layer.keys, layer.values)
            )
        while len(found) < count:
            position = torch.tensor([[42 + len(found) - 1]])
            logits = model(torch.tensor([found[-1:]]), past_key_values=cache, position_ids=position).logits
            found.append(int(logits[0, -1].argmax()))
    return found


@pytest.mark.parametrize("hidden", [[], [1], [1, 2]])
def test_answers_are_those_of_a_cache_without_what_is_hidden(model, hidden):
    counts, pages = [16, 4, 16, 4], [p for p in range(4) for _ in range([16, 4, 16, 4][p])]
    keep = [t for t in range(40) if pages[t] not in hidden]
    expected = Tokenizer().decode(plain(model, keep))
    geometry = Geometry(2, 2, 16, "float32")
    ask = Ask([1, 2], 1, Probe(Region.USER, "12", expected + "\ufffe"))
    asker = probes.Asker(
        copy.deepcopy(model), Tokenizer(), GIVEN._replace(asks=[ask]), geometry, get("exact")
    )
    attendable = torch.tensor([p not in hidden for p in range(len(counts))])
    said = []
    real, probes.recalled = probes.recalled, lambda answer, gold: said.append(answer) or True
    try:
        asker.ask(0, {"placed": attendable})
    finally:
        probes.recalled = real
    assert said[0][:3] == expected
