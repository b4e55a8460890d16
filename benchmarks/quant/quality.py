"""What a form loses on one text."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from tierkv.benchmarks.quant.exact import Exact, continue_over
from tierkv.study.replay import quality

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Loss(NamedTuple):
    """See the package for each figure."""

    kl: float
    top1: float
    dnll: float
    attn_error: list[float]  # by layer


class Judge:
    """Holds what is right about one text, and measures any K/V in the place of the exact ones."""

    def __init__(self, model: PreTrainedModel, exact: Exact) -> None:
        self.model, self.exact = model, exact
        self._attended = [exact.attend(layer, kv) for layer, kv in enumerate(exact.kv)]
        self._nll = cross_entropy(exact.logits, exact.following)

    def measure(self, kv: torch.Tensor) -> Loss:
        """`kv` `[layers, 2, kv_heads, context, head_dim]`."""
        logits = continue_over(self.model, kv, self.exact.forced)
        found = quality(self.exact.logits, logits)
        worse = float(cross_entropy(logits, self.exact.following) - self._nll)
        return Loss(found.kl, found.top1, worse, self.attention_error(kv))

    def attention_error(self, kv: torch.Tensor) -> list[float]:
        """Relative squared error of each layer's attention."""
        errors = []
        for layer, right in enumerate(self._attended):
            error = self.exact.attend(layer, kv[layer]) - right
            errors.append(float(error.square().sum() / right.square().sum()))
        return errors
