"""An arm: one model over one cache, its next step, and what it holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch

from tierkv.study.probe import cache_argument

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

Dense = list[tuple[torch.Tensor, torch.Tensor]]
"""Exact K/V of one row: for each layer keys and values, `[1, kv_heads, tokens, head_dim]`."""


class Held(NamedTuple):
    """Bytes; see the package."""

    kv: int
    host: int = 0
    attended: int = 0
    pages: dict[str, int] | None = None


class Arm(ABC):
    """`note` says what is particular about it."""

    def __init__(
        self, name: str, model: PreTrainedModel, cache: Cache, fill_seconds: float, note: str = ""
    ) -> None:
        self.name, self.model, self.cache = name, model, cache
        self.fill_seconds, self.note = fill_seconds, note
        self._argument = cache_argument(model)

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor) -> None:
        """One forward of `[batch, tokens]`."""
        self.model(tokens, logits_to_keep=1, **{self._argument: self.cache})

    @property
    def packs_every(self) -> int:
        """After how many new tokens it packs all of them anew; 0: it does not."""
        return 0

    @abstractmethod
    def held(self) -> Held:
        """What it holds now."""

    @abstractmethod
    def close(self) -> None:
        """Give back what others would want."""
