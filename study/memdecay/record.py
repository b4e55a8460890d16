"""Run the model over a context once and keep what was seen: its keys and values, and an attention trace.

The context is read stage by stage, a stage a forward. Since every token is given (teacher-forced), a query's attention
is the same whether it comes in a chunk or alone, so the last `WINDOW` queries of each stage serve as decode steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tierkv.study.memdecay.attention import Observing, StudyAttention
from tierkv.study.memdecay.scenarios import Episode
from tierkv.study.memdecay.traces import Trace
from tierkv.study.probe import cache_argument, dynamic_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WINDOW = 48
"""Queries that are recorded at the end of each stage: the paper's longest burst."""


class Context(NamedTuple):
    """Of each layer, `[kv_heads, tokens, head_dim]`."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[1]


@torch.inference_mode()
def record(
    model: PreTrainedModel,
    attention: StudyAttention,
    name: str,
    tokens: Sequence[int],
    regions: Sequence[int],
    blocks: Sequence[int],
    stages: Sequence[int],
    window: int = WINDOW,
    by_head: bool = False,
) -> tuple[Context, Trace]:
    """The context of `tokens` and its trace. `stages`: tokens up to which each stage reaches."""
    observing = Observing(model.config.num_hidden_layers, window, by_head)
    cache = dynamic_cache(model)
    queries: list[int] = []
    begin = 0
    for end in stages:
        with attention.using(observing):
            model(torch.tensor([tokens[begin:end]]), logits_to_keep=1, **{cache_argument(model): cache})
        queries += range(max(begin, end - window), end)
        begin = end
    masses = [m.flatten(0, 1) if by_head else m for m in observing.masses]
    trace = Trace(
        name,
        model.config.name_or_path.rstrip("/").rsplit("/", 1)[-1],
        np.array(tokens, np.int32),
        np.array(regions, np.int8),
        np.array(blocks, np.int32),
        np.array(stages, np.int32),
        np.array(queries, np.int32),
        torch.cat(masses, -1).half().numpy(),
    )
    layers = cache.layers
    return Context([layer.keys[0] for layer in layers], [layer.values[0] for layer in layers]), trace


def record_episode(
    model: PreTrainedModel, attention: StudyAttention, episode: Episode, window: int = WINDOW
) -> tuple[Context, Trace]:
    regions = np.concatenate([np.full(b.stop - b.start, b.region, np.int8) for b in episode.blocks])
    starts = [block.start for block in episode.blocks]
    return record(
        model, attention, episode.name, episode.tokens, regions.tolist(), starts, episode.stages, window
    )
