"""Whose opinion of cold pages counts, learned from a model on texts: `tierkv.prefetch.opinions`, at calibration.

A text's last part asks, as an agent's newest tokens do: some queries, evenly spaced. Full pages that are far from all
of them are cold. What a digest of such a page leads each head to expect is held against what the page gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tierkv import model_support
from tierkv.geometry import PAGE_TOKENS
from tierkv.prefetch.opinions import Opinions, of_mean_one
from tierkv.prefetch.transform import State, Transform
from tierkv.study.own_attention import take_over

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ASKING = 48
"""Queries of a text."""

LAST_PART = 4
"""Queries are of the last such fraction of a text."""

_IMPLEMENTATION = "tierkv-head-weights"


class _Asked(NamedTuple):
    """One text: which tokens ask, and which pages they are asked of."""

    queries: torch.Tensor  # [N] positions, ascending
    first: int  # token of the first cold page
    pages: int

    @classmethod
    def of(cls, tokens: int, sinks: int, recent: int) -> _Asked | None:
        """`None`: the text has no cold page."""
        begin = tokens - max(1, tokens // LAST_PART)
        first = -(-sinks // PAGE_TOKENS) * PAGE_TOKENS
        pages = (begin - recent - first) // PAGE_TOKENS
        if pages < 1:
            return None
        queries = torch.linspace(begin, tokens - 1, min(ASKING, tokens - begin)).long()
        return cls(queries, first, pages)


@torch.inference_mode()
def head_weights(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], state: State, size: int, sinks: int, recent: int,
    told: Callable[[int], None] | None = None,
) -> State:  # fmt: skip
    """The state with weights for transform digests of `size` bytes. The model runs over each text once, and is
    afterwards what it was before. Texts that are too short to have a cold page are passed over.

    Args:
        state: of `transform.solve`, for the layers that have pages.
        told: is called with a text's number, from 0, when its turn comes.
    """
    own = model_support.own_layers(model)
    layers = [layer for layer in range(model_support.num_layers(model)) if layer not in own]
    opinions, heads = Opinions(state.weights.size), state.weights.shape[1]
    seen: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    asked: _Asked | None = None

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> None:
        if asked is not None and layer in layers:
            at = layers.index(layer)
            mine = State(*(part[at : at + 1] for part in state))
            q = query[0, :, asked.queries].float()
            q = q.view(heads, -1, *q.shape[1:])  # [H, G, N, D]
            seen[at] = _shares(q, key[0].float(), scale, asked, Transform(mine, size))

    before = model.config._attn_implementation
    take_over(model, _IMPLEMENTATION, attend)
    try:
        for number, text in enumerate(texts):
            asked = _Asked.of(len(text), sinks, recent)
            if told is not None:
                told(number)
            if asked is None:
                continue
            model(input_ids=torch.tensor([list(text)], device=model.device), use_cache=False)
            estimated = np.concatenate([seen[at][0] for at in range(len(layers))])
            opinions.add(estimated, np.mean([seen[at][1] for at in range(len(layers))], 0))
    finally:
        model.set_attn_implementation(before)
    return state._replace(weights=of_mean_one(opinions.weights()).reshape(state.weights.shape))


def _shares(
    query: torch.Tensor, key: torch.Tensor, scale: float, asked: _Asked, transform: Transform
) -> tuple[np.ndarray, np.ndarray]:
    """Estimated shares of the cold pages `[H, N * pages]`, mean of a KV head's query heads, and true ones
    `[N * pages]`, mean of all.

    Args:
        query: `[H, G, N, D]`.
        key: `[H, tokens, D]`.
    """
    heads, group, count, dim = query.shape
    stop = asked.first + asked.pages * PAGE_TOKENS
    logits = torch.einsum("hgnd,htd->hgnt", query, key) * scale
    later = torch.arange(key.shape[1], device=key.device) > asked.queries.to(key.device)[:, None]
    logits.masked_fill_(later, -torch.inf)
    shares = logits.softmax(-1)[..., asked.first : stop]
    true = shares.reshape(*shares.shape[:-1], asked.pages, PAGE_TOKENS).sum(-1)
    logits[..., asked.first : stop] = -torch.inf
    near = logits.logsumexp(-1, keepdim=True)
    pages = key[:, asked.first : stop].reshape(1, heads, asked.pages, PAGE_TOKENS, dim).cpu().numpy()
    counts = np.full(asked.pages, PAGE_TOKENS, np.int64)
    records = transform.summarize(pages, counts)
    asking = query.reshape(1, heads, group * count, dim).cpu().numpy()
    told = torch.from_numpy(transform.log_mass(asking, records, counts, scale)).view(heads, group, count, -1)
    estimated = torch.cat([near.cpu(), told], -1).softmax(-1)[..., 1:]
    return estimated.mean(1).flatten(1).numpy(), true.mean((0, 1)).flatten().cpu().numpy()
