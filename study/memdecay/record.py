"""Run the model over a context once and keep what was seen: its keys and values, and an attention trace.

The context is read stage by stage. Since every token is given (teacher-forced), a query's attention is the same whether
it comes in a chunk or alone, so the last `WINDOW` queries of each stage serve as decode steps.
"""

from __future__ import annotations

from itertools import pairwise
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

CHUNK_TOKENS = 1024
"""Of a stage at a time: what is read at once bounds the memory that reading takes."""


class Reading(NamedTuple):
    """What the model is to read; `stages`: tokens up to which each stage reaches, `blocks`: first tokens of blocks."""

    name: str
    tokens: list[int]
    regions: list[int]
    blocks: list[int]
    stages: list[int]


class Context(NamedTuple):
    """Of each layer, `[kv_heads, tokens, head_dim]`."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[1]


def of_episode(episode: Episode) -> Reading:
    regions = [int(block.region) for block in episode.blocks for _ in range(block.start, block.stop)]
    starts = [block.start for block in episode.blocks]
    return Reading(episode.name, episode.tokens, regions, starts, list(episode.stages))


@torch.inference_mode()
def record(
    model: PreTrainedModel, attention: StudyAttention, reading: Reading, window: int = WINDOW, every: int = 0
) -> tuple[Context, Trace]:
    """The context, and the trace of the last `window` queries of each stage, averaged over layers and heads, or of each
    `every`-th of all (layer, head) alone.
    """
    cache, name = dynamic_cache(model), cache_argument(model)
    config = model.config
    kept = slice(0, config.num_hidden_layers * config.num_attention_heads, every) if every else None
    masses: list[torch.Tensor] = []
    queries: list[int] = []
    begin = 0
    for end in reading.stages:
        last = max(begin, end - max(window, CHUNK_TOKENS))  # the observed queries are all in the last chunk
        for start, stop in pairwise([*range(begin, last, CHUNK_TOKENS), last]):
            model(torch.tensor([reading.tokens[start:stop]]), logits_to_keep=1, **{name: cache})
        observing = Observing(config.num_hidden_layers, window, by_head=bool(every))
        with attention.using(observing):
            model(torch.tensor([reading.tokens[last:end]]), logits_to_keep=1, **{name: cache})
        for mass in observing.masses:
            masses.append(mass.half() if kept is None else mass.flatten(0, 1)[kept].half().clone())
        queries += range(max(begin, end - window), end)
        begin = end
    trace = Trace(
        reading.name, label(model),
        np.array(reading.tokens, np.int32), np.array(reading.regions, np.int8),
        np.array(reading.blocks, np.int32), np.array(reading.stages, np.int32), np.array(queries, np.int32),
        torch.cat(masses, -1).numpy(),
    )  # fmt: skip
    layers = cache.layers
    return Context([layer.keys[0] for layer in layers], [layer.values[0] for layer in layers]), trace


def record_episode(
    model: PreTrainedModel, attention: StudyAttention, episode: Episode, window: int = WINDOW
) -> tuple[Context, Trace]:
    return record(model, attention, of_episode(episode), window)


def label(model: PreTrainedModel) -> str:
    """The model's name, and its dtype where that is not float32: rates of one are not those of another."""
    name = str(model.config.name_or_path).rstrip("/").rsplit("/", 1)[-1]
    return name if model.dtype is torch.float32 else f"{name} {str(model.dtype).removeprefix('torch.')}"
