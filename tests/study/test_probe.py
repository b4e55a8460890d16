"""Replaying and asking, on a random two-layer model: what an arm measures depends on its cache only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tierkv.regions import Region
from tierkv.study import probe as probing
from tierkv.study.episodes import Probe

CONTEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


class Letters:
    """Token `i` is the `i`-th letter of the alphabet and some."""

    def __call__(self, text: str, add_special_tokens: bool = False) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(letter) - ord("a") for letter in text])

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=26, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def greedy(model, tokens, count):
    """The independent answer: no cache at all, the whole text again for each token."""
    tokens = list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[-count:]


def test_an_answer_over_a_fork_is_the_answer_to_context_and_question(model):
    cache = probing.dynamic_cache(model)
    probing.replay(model, cache, CONTEXT, burst=6)
    expected = Letters().decode(greedy(model, [*CONTEXT, *range(4)], probing.ANSWER_TOKENS))
    question = Probe(Region.USER, "abcd", expected)
    for _ in range(2):  # the first question leaves no trace
        answer = probing.ask(model, Letters(), probing.fork_dynamic(cache), question)
        assert answer.text == expected
        assert answer.correct
        assert len(answer.decode_seconds) == probing.ANSWER_TOKENS - 1


def test_a_replay_decodes_the_burst_token_by_token(model):
    cache = probing.dynamic_cache(model)
    done = probing.replay(model, cache, CONTEXT, burst=6)
    assert len(done.decode_seconds) == 6
    assert cache.get_seq_length() == len(CONTEXT)


def test_a_label_comes_before_the_question(model):
    cache = probing.dynamic_cache(model)
    probing.replay(model, cache, CONTEXT, burst=2)
    told = []
    probing.ask(
        model, Letters(), probing.fork_dynamic(cache), Probe(Region.USER, "abc", "x"),
        lambda fork, tokens: told.append((fork.get_seq_length(), tokens)),
    )  # fmt: skip
    assert told == [(len(CONTEXT), 3)]


def test_recall_counts_each_region():
    def answer(region, correct):
        return probing.Answer(Probe(region, "", ""), "", correct, [])

    result = probing.recall(
        [
            answer(Region.USER, True),
            answer(Region.USER, False),
            answer(Region.SYSTEM, True),
            answer(Region.USER, False),
        ]
    )
    assert result.total == 0.5
    assert result.by_region == {"user": pytest.approx(1 / 3), "system": 1.0}


def test_recall_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no answers"):
        probing.recall([])
