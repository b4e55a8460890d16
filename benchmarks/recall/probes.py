"""Questions answered over a placement: the question reads everything, exactly and in place, as a chunk does; the steps
that follow see attendable pages only, exact or as their low-bit form gives them back.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierkv.benchmarks.recall.inputs import Input
from tierkv.geometry import Geometry
from tierkv.quant.contract import Codec
from tierkv.study.episodes import recalled, settled
from tierkv.study.estimators import Layout, grouped, layout_of
from tierkv.study.own_attention import take_over
from tierkv.study.probe import ANSWER_TOKENS, dynamic_cache, forward, replay

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

FIT_PAGES = 32
"""Exact pages that the codec's state is fitted from, as in the daemon."""


class Asker:
    """A model over one context. Its attention is taken over: make one after the other."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        given: Input,
        geometry: Geometry,
        codec: Codec,
    ) -> None:
        self._model, self._tokenizer, self._given = model, tokenizer, given
        self._hidden: torch.Tensor | None = None  # [tokens] bool, of the context
        take_over(model, "tierkv_asker", self._attend)
        self._layout = layout_of(given.runs)
        with torch.inference_mode():
            self._exact = dynamic_cache(model)
            replay(model, self._exact, given.tokens, burst=0)
            self._low = _low_bit(self._exact, self._layout, geometry, codec)

    @torch.inference_mode()
    def ask(self, number: int, placements: dict[str, torch.Tensor | None]) -> dict[str, bool]:
        """Whether the question is answered over each placement, `[P]` bool; `None` is the whole exact context."""
        probe = self._given.asks[number].probe
        assert probe is not None
        asked = copy.deepcopy(self._exact)
        self._hidden = None
        first = forward(self._model, asked, self._tokenizer(probe.prompt, add_special_tokens=False).input_ids)
        right = {}
        for name, attendable in placements.items():
            cache = copy.deepcopy(asked)
            if attendable is not None:
                for layer, (keys, values) in zip(cache.layers, self._low, strict=True):
                    layer.keys[:, :, : keys.shape[2]] = keys
                    layer.values[:, :, : values.shape[2]] = values
                self._hidden = ~attendable[self._layout.page_of]
            answer = [first]
            while len(answer) < ANSWER_TOKENS and not settled(self._tokenizer.decode(answer), probe.gold):
                answer.append(forward(self._model, cache, answer[-1:]))
            right[name] = recalled(self._tokenizer.decode(answer), probe.gold)
            self._hidden = None
        return right

    def _attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor | None:
        """A decode step over what is not hidden."""
        if self._hidden is None:
            return None
        logits = grouped(query[0], key[0]) * scale
        logits[..., : len(self._hidden)].masked_fill_(self._hidden, -torch.inf)
        weights = logits.softmax(-1).reshape(key.shape[1], -1, key.shape[2])
        return (weights @ value[0]).reshape(query.shape[1:]).transpose(0, 1).unsqueeze(0)


def _low_bit(
    cache: Cache, layout: Layout, geometry: Geometry, codec: Codec
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of the context by layer, `[1, kv_heads, tokens, head_dim]`: what low-bit pages decode to, and the
    first and the last page as they are.
    """
    whole = torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])
    starts, counts = layout.starts.tolist(), layout.counts.tolist()
    pages = []
    for start, count in zip(starts, counts, strict=True):
        exact = torch.zeros(geometry.shape)
        exact[..., :count, :] = whole[..., start : start + count, :]
        pages.append(exact.flatten().view(torch.uint8).numpy())
    state = codec.fit_state(geometry, pages[1 : 1 + FIT_PAGES], counts[1 : 1 + FIT_PAGES])
    packed = np.zeros(codec.page_bytes(geometry), np.uint8)
    for start, count, page in zip(starts[1:-1], counts[1:-1], pages[1:-1], strict=True):
        codec.encode(geometry, page, count, state, packed)
        codec.decode(geometry, packed, count, state, page)
        decoded = torch.from_numpy(page).view(torch.float32).view(geometry.shape)
        whole[..., start : start + count, :] = decoded[..., :count, :]
    return [(layer[0][None], layer[1][None]) for layer in whole]
