"""Ask questions over what a policy has kept, many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from tierkv.study.episodes import BEFORE_GOLD, recalled
from tierkv.study.memdecay.attention import SharedContext, StudyAttention
from tierkv.study.memdecay.record import Context
from tierkv.study.memdecay.scenarios import Fact
from tierkv.study.probe import ANSWER_TOKENS, cache_argument, dynamic_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROWS = 48
"""Questions in one batch: enough to share the weights' way through memory, few beside the context's tokens."""


class Question(NamedTuple):
    fact: Fact
    kept: torch.Tensor  # [tokens of the context] bool


@torch.inference_mode()
def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    attention: StudyAttention,
    context: Context,
    questions: Sequence[Question],
) -> list[bool]:
    """Whether the greedy answer to each question names its gold first, after `episodes.recalled`."""
    right: list[bool] = []
    for first in range(0, len(questions), ROWS):
        batch = questions[first : first + ROWS]
        answers = _answer(model, tokenizer, attention, context, batch)
        right += [recalled(text, q.fact.gold) for text, q in zip(answers, batch, strict=True)]
    return right


def _answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    attention: StudyAttention,
    context: Context,
    batch: Sequence[Question],
) -> list[str]:
    prompts = [tokenizer(q.fact.prompt, add_special_tokens=False).input_ids for q in batch]
    width = max(map(len, prompts))
    pads = torch.tensor([width - len(p) for p in prompts])
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    places = torch.arange(width + ANSWER_TOKENS)
    positions = (context.tokens + places[None] - pads[:, None]).clamp(min=0)
    shared = SharedContext(
        context.keys, context.values, torch.stack([q.kept for q in batch]), places[None] >= pads[:, None]
    )
    cache, argument = dynamic_cache(model), cache_argument(model)
    answer: list[torch.Tensor] = []
    texts = [""] * len(batch)
    at = 0
    with attention.using(shared):
        while len(answer) < ANSWER_TOKENS and any(map(_open, texts, batch)):
            stop = at + ids.shape[1]
            logits = model(
                ids, position_ids=positions[:, at:stop], logits_to_keep=1, **{argument: cache}
            ).logits
            ids, at = logits[:, -1].argmax(-1, keepdim=True), stop
            answer.append(ids)
            texts = tokenizer.batch_decode(torch.cat(answer, 1))
    return texts


def _open(text: str, question: Question) -> bool:
    """More tokens can still change whether the answer is right."""
    said, gold = text.lstrip(BEFORE_GOLD), question.fact.gold
    return gold.startswith(said) or said == gold
