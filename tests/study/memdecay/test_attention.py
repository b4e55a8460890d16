"""A tiny random model: recorded masses against eager attention, masked questions against caches that were cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tierkv.regions import Region
from tierkv.study.memdecay.ask import Question, ask
from tierkv.study.memdecay.attention import SharedContext, StudyAttention
from tierkv.study.memdecay.record import Context, Reading, record
from tierkv.study.memdecay.scenarios import Fact
from tierkv.study.memdecay.traces import Trace
from tierkv.study.probe import ANSWER_TOKENS, cache_argument

TOKENS = np.random.default_rng(4).integers(5, 90, 60).tolist()


class Letters:
    """A tokenizer: one token a character."""

    def __call__(self, text: str, **_: object) -> object:
        return type("Coded", (), {"input_ids": [ord(c) % 85 + 5 for c in text]})

    def batch_decode(self, rows: torch.Tensor) -> list[str]:
        return ["".join(chr(33 + t) for t in row) for row in rows.tolist()]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=90, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=False,
        initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def recorded(model: LlamaForCausalLM) -> tuple[Context, Trace]:
    regions = [Region.SYSTEM] * 20 + [Region.USER] * 40
    return record(
        model, StudyAttention(model), Reading("tiny", TOKENS, regions, [0, 20], [25, 60]), window=10
    )


def test_a_trace_holds_eager_attention_averaged_over_layers_and_heads(
    model: LlamaForCausalLM, recorded: tuple[Context, Trace]
) -> None:
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = model(torch.tensor([TOKENS]), output_attentions=True).attentions
    expected = torch.stack(attentions)[:, 0].mean((0, 1)).numpy()
    queries = [query for query, _ in recorded[1].rows()]
    assert queries == [*range(15, 25), *range(50, 60)]
    for query, mass in recorded[1].rows():
        assert mass == pytest.approx(expected[query, : query + 1], abs=2e-4)  # float16


def test_by_head_a_trace_holds_every_head_of_every_layer(
    model: LlamaForCausalLM, recorded: tuple[Context, Trace]
) -> None:
    attention = StudyAttention(model)
    _, by_head = record(model, attention, Reading("t", TOKENS, [2] * 60, [0], [25, 60]), 10, every=1)
    assert by_head.mass.shape[0] == 3 * 6
    for (_, heads), (_, mean) in zip(by_head.rows(), recorded[1].rows(), strict=True):
        assert heads.mean(0) == pytest.approx(mean, abs=3e-4)


def cut(model: LlamaForCausalLM, context: Context, kept: torch.Tensor, prompt: list[int]) -> list[int]:
    """Greedy tokens over a DynamicCache out of which everything but `kept` was really cut."""
    model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=model.config)
    for layer, (keys, values) in enumerate(zip(context.keys, context.values, strict=True)):
        cache.update(keys[None, :, kept], values[None, :, kept], layer)
    ids, at, answer = prompt, context.tokens, []
    with torch.inference_mode():
        while len(answer) < ANSWER_TOKENS:
            positions = torch.arange(at, at + len(ids))[None]
            out = model(torch.tensor([ids]), position_ids=positions, **{cache_argument(model): cache})
            at += len(ids)
            ids = [int(out.logits[0, -1].argmax())]
            answer += ids
    return answer


def test_a_question_over_a_mask_is_answered_as_over_a_cache_that_was_cut(
    model: LlamaForCausalLM, recorded: tuple[Context, Trace]
) -> None:
    context, tokenizer, rng = recorded[0], Letters(), np.random.default_rng(7)
    questions, golds = [], []
    for prompt in ("what is it", "and", "the other one that is longer is"):  # padded to one width
        for share in (1.0, 0.5, 0.1):
            kept = torch.from_numpy(rng.random(context.tokens) < share)
            expected = cut(model, context, kept, tokenizer(prompt).input_ids)
            golds.append(tokenizer.batch_decode(torch.tensor([expected]))[0])
            questions.append(Question(Fact(Region.USER, prompt, golds[-1], 0, 0, 0), kept))
    assert len(set(golds)) > 5  # what is kept matters
    assert ask(model, tokenizer, StudyAttention(model), context, questions) == [True] * 9
    wrong = [
        Question(q.fact._replace(gold=("\x7f" if q.fact.gold[0] != "\x7f" else "a")), q.kept)
        for q in questions
    ]
    assert ask(model, tokenizer, StudyAttention(model), context, wrong) == [False] * 9


def test_a_row_sees_neither_other_rows_nor_its_own_future() -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    keys, values = [draw(2, 7, 4)], [draw(2, 7, 4)]
    seen = torch.tensor([[True] * 7, [False, True, False, True, False, False, True]])
    own = torch.tensor([[False, True, True], [True, True, True]])
    query, key, value = draw(2, 4, 3, 4), draw(2, 2, 3, 4), draw(2, 2, 3, 4)
    out = SharedContext(keys, values, seen, own).attend(0, query, key, value, 0.5)
    for row in range(2):
        for place in range(3):
            if not own[row, place]:
                continue
            for head in range(4):
                group = head // 2
                mine = own[row].clone()
                mine[place + 1 :] = False
                k = torch.cat([keys[0][group, seen[row]], key[row, group, mine]])
                v = torch.cat([values[0][group, seen[row]], value[row, group, mine]])
                expected = (k @ query[row, head, place] * 0.5).softmax(-1) @ v
                assert torch.allclose(out[row, place, head], expected, atol=1e-5)
