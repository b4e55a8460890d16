"""The demo's facts over caches whose old pages are all low-bit.

The model reads an episode once, exactly. For each form, whole groups of tokens behind the `SINKS` first ones are packed
and unpacked as soon as `RECENT` newer tokens follow: at once for the episode, then on and on while a question is read
and answered. So what is being written stays exact, and what was asked for, long ago in the episode, is not. A group is
a page of a codec's, 32 tokens of KIVI's, 64 of transformers' caches.

An answer counts as in the demo (`tierkv.study.episodes.recalled`), and ends when that is clear.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import torch
from transformers import DynamicCache

from tierkv.benchmarks.quant import RECENT, SINKS
from tierkv.benchmarks.quant.exact import prefill
from tierkv.benchmarks.quant.forms import Form
from tierkv.study import probe
from tierkv.study.episodes import Episode, spans

if TYPE_CHECKING:
    from transformers import Cache, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

EXACT_CACHE = "exact cache"
"""Of `ask`'s answers: those over a cache of which nothing is packed."""

Layers = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, `[kv_heads, tokens, head_dim]`."""


class Facts(msgspec.Struct):
    """Of one form."""

    bits_per_value: float
    facts: int = 0
    """Right answers."""
    facts_asked: int = 0
    facts_missed: dict[str, str] = msgspec.field(default_factory=dict)
    """How the answer began instead, by episode and fact."""
    cpu_seconds: float = 0.0
    """Of all but the model's reading of the episodes, which forms share."""

    def count(self, episode: str, answer: probe.Answer) -> None:
        self.facts_asked += 1
        self.facts += answer.correct
        if not answer.correct:
            self.facts_missed[f"{episode}: {answer.probe.gold}"] = answer.text


class Aging(DynamicCache):  # type: ignore[misc]
    """One sequence, of which `age` makes all low-bit that is old by now. No `form`: it stays exact."""

    def __init__(
        self, config: PretrainedConfig, form: Form | None, layers: Layers, packed: int = SINKS
    ) -> None:
        super().__init__(config=config)
        self.config, self.form = config, form
        self.packed = packed
        """Sinks and packed tokens: a prefix."""
        for layer, (keys, values) in enumerate(layers):
            self.update(keys[None], values[None], layer)
        self.bits_per_value = 8.0 * keys.itemsize
        """Of what is packed; of all where nothing is."""

    def age(self) -> None:
        """Whole groups before the recent tokens become what the form gives back."""
        if self.form is None:
            return
        groups = (self.get_seq_length() - RECENT - self.packed) // self.form.group
        if groups <= 0:
            return
        span = slice(self.packed, self.packed + groups * self.form.group)
        old = [torch.cat((layer.keys[:, :, span], layer.values[:, :, span])) for layer in self.layers]
        held = self.form.hold(torch.stack(old))
        held.encode()
        held.decode()
        for layer, (keys, values) in zip(self.layers, held.kv(), strict=True):
            layer.keys[0, :, span] = keys
            layer.values[0, :, span] = values
        self.packed = span.stop
        self.bits_per_value = held.bits_per_value

    @contextmanager
    def fork(self) -> Iterator[Cache]:
        """A copy."""
        layers = ((layer.keys[0], layer.values[0]) for layer in self.layers)
        yield Aging(self.config, self.form, layers, self.packed)


def forward(model: PreTrainedModel, cache: Cache, tokens: Sequence[int]) -> int:
    """Run `tokens` over an `Aging` cache; the likeliest next token."""
    following = probe.forward(model, cache, tokens)
    cache.age()
    return following


@torch.inference_mode()
def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    forms: Sequence[Form],
    episodes: Sequence[Episode],
    told: Callable[[int, int, str], None],
) -> dict[str, Facts]:
    """Every probe of `episodes` over each form and over the exact cache, by form's name and `EXACT_CACHE`."""
    named = {EXACT_CACHE: None, **{form.name: form for form in forms}}
    found = dict[str, Facts]()
    for done, episode in enumerate(episodes):
        told(done, len(episodes), f"facts: {episode.name}")
        tokens = [token for span in spans(episode, tokenizer) for token in span.tokens]
        kv = prefill(model, tokens)
        for name, form in named.items():
            begin = time.process_time()
            cache = Aging(model.config, form, kv)
            cache.age()
            known = found.setdefault(name, Facts(cache.bits_per_value))
            for one in episode.probes:
                answer = probe.ask(model, tokenizer, cache.fork, one, forward=forward, whole=False)
                known.count(episode.name, answer)
            known.cpu_seconds += time.process_time() - begin
    return found
