"""One set of weights under several models, and what a prompt's K/V are."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

import tierkv
from tierkv.benchmarks.decode.arm import Dense
from tierkv.study.probe import cache_argument, dynamic_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tierkv.model import AttachedModel

PIECE = 1024
"""Tokens that a forward of the prompt takes: all of 8,192 at once would take gigabytes."""


class Models(NamedTuple):
    plain: PreTrainedModel  # sdpa
    eager: PreTrainedModel
    paged: AttachedModel


def models(plain: PreTrainedModel) -> Models:
    """`plain` stays as it is; the others read its weights."""
    eager = sharing(plain)
    eager.set_attn_implementation("eager")
    return Models(plain, eager, tierkv.attach(sharing(plain)))


def sharing(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose parameters are the model's own."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


@torch.inference_mode()
def read(model: PreTrainedModel, tokens: Sequence[int]) -> Dense:
    """The K/V of a prompt."""
    cache, argument = dynamic_cache(model), cache_argument(model)
    for start in range(0, len(tokens), PIECE):
        model(torch.tensor([tokens[start : start + PIECE]]), logits_to_keep=1, **{argument: cache})
    return [(layer.keys, layer.values) for layer in cache.layers]


def first(dense: Dense, tokens: int) -> Dense:
    """The K/V of the first tokens: nothing after a token changes its own."""
    return [(keys[:, :, :tokens], values[:, :, :tokens]) for keys, values in dense]
