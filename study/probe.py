"""Replay an episode over a cache once, then ask each probe over a fork of it. Any transformers cache will do.

The replay is what an agent's worker does: the context comes as prompt, and the last `BURST_TOKENS` tokens, which the
agent writes itself, come one decode step at a time. All arms see the same tokens, so answers differ by cache only.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from tierkv.study.episodes import Probe, recalled, settled

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

BURST_TOKENS = 16
"""Decode steps at the end of an episode: a half-life of a scratchpad token."""

ANSWER_TOKENS = 8
"""Tokens of a greedy answer; the longest gold has five."""

Fork = Callable[[], AbstractContextManager["Cache"]]
"""Makes a cache that holds the same tokens and may be written; the original stays as it is."""

Forward = Callable[["PreTrainedModel", "Cache", Sequence[int]], int]
"""Runs tokens over a cache; the likeliest next token."""


class Replay(NamedTuple):
    prefill_seconds: float
    decode_seconds: list[float]  # of each burst step


class Answer(NamedTuple):
    probe: Probe
    text: str
    correct: bool
    decode_seconds: list[float]  # of each generated token but the first, which the prompt's forward gives


class Recall(NamedTuple):
    """Right answers over all probes, and over those of each region (by label)."""

    total: float
    by_region: dict[str, float]


def dynamic_cache(model: PreTrainedModel) -> Cache:
    """transformers' own cache: the full arm."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def fork_dynamic(cache: Cache) -> Fork:
    """A fork copies every tensor."""

    @contextmanager
    def fork() -> Iterator[Cache]:
        yield copy.deepcopy(cache)

    return fork


def forward(model: PreTrainedModel, cache: Cache, tokens: Sequence[int]) -> int:
    """Run `tokens` over the cache; the likeliest next token."""
    ids = torch.tensor([tokens])
    logits = model(ids, logits_to_keep=1, **{cache_argument(model): cache}).logits
    return int(logits[0, -1].argmax())


def cache_argument(model: PreTrainedModel) -> str:
    """`cache` from transformers 5.24 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.inference_mode()
def replay(
    model: PreTrainedModel,
    cache: Cache,
    tokens: Sequence[int],
    burst: int = BURST_TOKENS,
    forward: Forward = forward,
) -> Replay:
    """Fill `cache` with `tokens`: a prompt, then `burst` decode steps."""
    prompt, written = tokens[: len(tokens) - burst], tokens[len(tokens) - burst :]
    begin = time.perf_counter()
    forward(model, cache, prompt)
    prefill_seconds = time.perf_counter() - begin
    decode_seconds = []
    for token in written:
        begin = time.perf_counter()
        forward(model, cache, [token])
        decode_seconds.append(time.perf_counter() - begin)
    return Replay(prefill_seconds, decode_seconds)


@torch.inference_mode()
def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    fork: Fork,
    probe: Probe,
    label: Callable[[Cache, int], None] | None = None,
    forward: Forward = forward,
    whole: bool = True,
) -> Answer:
    """Continue the probe's prompt greedily over a fork.

    Args:
        label: is told the prompt's token count before it runs.
        whole: go on when it is already clear whether the answer is right.
    """
    prompt = tokenizer(probe.prompt, add_special_tokens=False).input_ids
    answer: list[int] = []
    decode_seconds = []
    with fork() as cache:
        if label is not None:
            label(cache, len(prompt))
        answer.append(forward(model, cache, prompt))
        while len(answer) < ANSWER_TOKENS and (whole or not settled(tokenizer.decode(answer), probe.gold)):
            begin = time.perf_counter()
            answer.append(forward(model, cache, answer[-1:]))
            decode_seconds.append(time.perf_counter() - begin)
    text = tokenizer.decode(answer)
    return Answer(probe, text, recalled(text, probe.gold), decode_seconds)


def recall(answers: Iterable[Answer]) -> Recall:
    """Raises `ValueError` without any answer."""
    right: dict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        right[answer.probe.region.label].append(answer.correct)
    if not right:
        raise ValueError("recall of no answers; ask at least one probe")
    everything = [correct for region in right.values() for correct in region]
    by_region = {region: sum(correct) / len(correct) for region, correct in right.items()}
    return Recall(sum(everything) / len(everything), by_region)
