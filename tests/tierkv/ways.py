"""Every way of generating that transformers 5.23 and 5.24 offer: the prompt, the options, and what shows that it ran.

A way is run over transformers' own cache and over pages; the tokens must be identical.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from tests.tierkv.tiny_models import CACHE, build, greedy, prompt
from tierkv.model import AttachedModel, attach

SEED = 11
NEW = 16
"""Tokens a row that a way generates; fewer where it stops early."""

Inputs = dict[str, torch.Tensor]


class Way(NamedTuple):
    name: str
    lengths: tuple[int, ...]  # tokens of each row's prompt; shorter ones are padded on the left
    options: Callable[[str, Inputs], dict[str, Any]]  # of generate, for a model's name and the prompt
    chunk_tokens: int | None = None
    repeats: int = 1  # how often the prompt says the same
    embedded: bool = False  # the prompt is given as embeddings

    @property
    def inputs(self) -> Inputs:
        return {name: tensor.repeat(1, self.repeats) for name, tensor in prompt(*self.lengths).items()}


@functools.cache
def plain(name: str) -> PreTrainedModel:
    """A model that was never attached."""
    return build(name)


@functools.cache
def attached(name: str) -> AttachedModel:
    return attach(build(name))


@functools.cache
def options_of(way: Way, name: str) -> dict[str, Any]:
    return way.options(name, way.inputs)


def generate(way: Way, name: str, model: PreTrainedModel, cache: Any) -> torch.Tensor:
    inputs = way.inputs
    options = {"max_new_tokens": NEW, "do_sample": False} | options_of(way, name)
    if way.embedded:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    torch.manual_seed(SEED)
    tokens: torch.Tensor = model.generate(**inputs, **{CACHE: cache}, **options)
    return tokens


def sampled(model: PreTrainedModel, inputs: Inputs, cache: Any, samples: int) -> torch.Tensor:
    """Always the same draws."""
    torch.manual_seed(SEED)
    return greedy(model, inputs, cache, num_return_sequences=samples, **SAMPLE)


@functools.cache
def wanted(way: Way, name: str) -> torch.Tensor:
    """What transformers' own cache says."""
    model = plain(name)
    return generate(way, name, model, DynamicCache(config=model.config))


# Options -------------------------------------------------------------------------------------------------------------


def always(**options: Any) -> Callable[[str, Inputs], dict[str, Any]]:
    return lambda name, inputs: options


@functools.cache
def assistant(name: str) -> PreTrainedModel:
    """The model with some noise on its last weights: some of its four drafts are right."""
    model = build(name)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.add_(torch.randn(head.shape, generator=generator), alpha=0.7 * float(head.std()))
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.assistant_confidence_threshold = 0
    return model


def with_assistant(**options: Any) -> Callable[[str, Inputs], dict[str, Any]]:
    return lambda name, inputs: {"assistant_model": assistant(name), **options}


def greedy_tail(name: str, inputs: Inputs) -> torch.Tensor:
    """`[rows, NEW]`: what the model says greedily."""
    tokens = plain(name).generate(**inputs, max_new_tokens=NEW, do_sample=False)
    return tokens[:, -NEW:]


def end_of_text(name: str, inputs: Inputs) -> dict[str, Any]:
    """A token that the first row says in its middle and the last row never: rows finish one by one."""
    said = greedy_tail(name, inputs).tolist()
    lasting = said[-1] if len(said) > 1 else []
    return {"eos_token_id": next(t for t in said[0][4:] if t > 1 and t not in said[0][:4] + lasting)}


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """97 tokens, each a character."""
    characters = (string.ascii_letters + string.digits + string.punctuation + "äöü")[:97]
    core = Tokenizer(models.BPE({character: index for index, character in enumerate(characters)}, []))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=characters[0])


def stop_string(name: str, inputs: Inputs) -> dict[str, Any]:
    """Two characters in the middle of what the last row says, over two tokens; that row is padded from there on."""
    said = greedy_tail(name, inputs)[-1, NEW // 2 - 1 : NEW // 2 + 1]
    return {"stop_strings": [tokenizer().decode(said)], "tokenizer": tokenizer(), "eos_token_id": 1}


def by_a_grammar(row: int, ids: torch.Tensor) -> list[int]:
    """What may follow: another third of the vocabulary for each last token."""
    return list(range(2 + int(ids[-1]) % 3, 97, 3))


SAMPLE: dict[str, Any] = {"do_sample": True, "top_k": 40, "temperature": 1.1}
MANY_ENDS = list(range(2, 14))
"""Enough ends of text that beams meet some."""

WAYS = [
    Way("greedy", (37,), always()),
    Way("a left-padded batch", (5, 37, 18), always()),
    Way("a prompt in slices", (90, 41), always(), chunk_tokens=16),
    Way("transformers' own slices", (45, 30), always(prefill_chunk_size=16)),
    Way("slices of transformers in slices", (45, 30), always(prefill_chunk_size=20), chunk_tokens=8),
    Way("an embedded prompt", (37, 20), always(), chunk_tokens=16, embedded=True),
    Way("several logits kept", (37,), always(logits_to_keep=5), chunk_tokens=16),
    Way("four beams", (19,), always(num_beams=4)),
    Way("four beams, three returned", (19,), always(num_beams=4, num_return_sequences=3)),
    Way("four beams of each row", (19, 8), always(num_beams=4, num_return_sequences=2)),
    Way("four beams of a prompt in slices", (50, 21), always(num_beams=4), chunk_tokens=16),
    Way("beams that stop early", (19, 8), always(num_beams=4, early_stopping=True, eos_token_id=MANY_ENDS)),
    Way(
        "beams that never stop early", (19,),
        always(num_beams=4, early_stopping="never", length_penalty=2.0, eos_token_id=MANY_ENDS),
    ),
    Way("beams within a grammar", (19, 8), always(num_beams=3, prefix_allowed_tokens_fn=by_a_grammar)),
    Way("sampled beams", (19, 8), always(num_beams=4, num_return_sequences=2, **SAMPLE)),
    Way("three samples", (19,), always(num_return_sequences=3, **SAMPLE)),
    Way("two samples of each row", (30, 8), always(num_return_sequences=2, **SAMPLE)),
    Way("prompt lookup", (12,), always(prompt_lookup_num_tokens=4, repetition_penalty=0.3), repeats=4),
    Way("prompt lookup in slices", (30,), always(prompt_lookup_num_tokens=3, repetition_penalty=0.3), 16, 2),
    Way("an assistant", (37,), with_assistant()),
    Way("an assistant, sampled", (37,), with_assistant(**SAMPLE)),
    Way("an assistant and an end of text", (37,), lambda *given: with_assistant()(*given) | end_of_text(*given)),
    Way("its own first layers as assistant", (37,), always(assistant_early_exit=1)),
    Way("guided away from nothing", (19, 8), always(guidance_scale=1.5)),
    Way("rows that end one by one", (30, 12, 21), end_of_text),
    Way("a stop string", (30,), stop_string),
    Way("a stop string in one row", (30, 12, 21), stop_string),
]  # fmt: skip
