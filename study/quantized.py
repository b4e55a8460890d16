"""The baseline that tiers must beat: everything low-bit in the same bytes, and when those are full, the oldest leave.

A page becomes low-bit as soon as it is full (or its region ends). What counts against the budget: low-bit pages, the
first page and the one that is still written (both exact), and the codec's state. Wherever this can be kind to the
baseline, it is:

- the first page, the attention sink, stays, and stays exact: without it a small model breaks down, whatever else it
  keeps, and low-bit it costs three of the demo's 24 answers even when nothing leaves;
- a slice of a prompt is exact and free while it is computed; it is counted, made low-bit and cut afterwards;
- pages lie without gaps, and no byte goes to page tables or digests;
- the codec's state is fitted from this text's own pages, once there are enough of them or the budget asks for it.

It needs no daemon: a `DynamicCache` holds what the pages decode to, and what left is cut out of its tensors. Tokens
keep their positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import DynamicCache

from tierkv.geometry import Geometry
from tierkv.quant.contract import Codec, Floats
from tierkv.regions import Region, Run, default_region
from tierkv.study.probe import cache_argument
from tierkv.table import lay_out

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

SINK_PAGES = 1
"""First pages that stay as they are."""

FIT_PAGES = 32
"""Exact pages that a codec's state is fitted from, as in the daemon; fewer where the budget has no room for so many."""

_TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Page:
    """`tokens` consecutive columns of the cache's tensors."""

    region: Region
    tokens: int
    low: bool = False


class QuantizedCache(DynamicCache):  # type: ignore[misc]
    """One sequence. Run it through `forward` of this module, which slices prompts and makes room after each slice.

    Args:
        config: the model's.
        geometry: of pages; its dtype is what exact pages are rounded to.
        codec: low-bit form of a page.
        budget: bytes for all of it; `None` has no end, so that nothing leaves.
    """

    def __init__(
        self, config: PretrainedConfig, geometry: Geometry, codec: Codec, budget: int | None = None
    ) -> None:
        super().__init__(config=config)
        self.geometry, self.codec, self.budget = geometry, codec, budget
        self.pages: list[Page] = []
        self.length = 0
        """Tokens seen, also those that left: the position of the next one."""
        self.bytes_peak = 0
        self._state: Floats | None = None
        self._labels: deque[Run] = deque()

    @property
    def bytes(self) -> int:
        """What is counted against the budget now."""
        low = sum(page.low for page in self.pages)
        exact = len(self.pages) - low
        state = 4 * self.codec.state_floats(self.geometry)
        return exact * self.geometry.page_bytes + low * self.codec.page_bytes(self.geometry) + state

    def label(self, region: Region, tokens: int) -> None:
        """Region of the next tokens, after those labelled already; as `Session.label`."""
        self._labels.append(Run(region, tokens))

    def settle(self, tokens: int) -> None:
        """A forward wrote `tokens` new ones: lay them over pages, make full pages low-bit, cut what does not fit.

        Raises:
            ValueError: the sink and the page that is written alone are more than the budget.
        """
        self.length += tokens
        tail = self.pages[-1] if self.pages else None
        runs = self._take_labels(tokens)
        for placed in lay_out(
            tail.region if tail else None, tail.tokens if tail else 0, runs, self.geometry.page_tokens, False
        ):
            if placed.fresh:
                self.pages.append(Page(placed.region, 0))
            self.pages[-1].tokens += placed.tokens
        self._round(tokens)
        sealed = self._sealed()
        if self._state is None and sealed and (len(sealed) >= FIT_PAGES or self._too_large()):
            self._fit(sealed)
        if self._state is not None:
            for index in sealed:
                self._quantize(index)
        while self._too_large():
            if len(self.pages) <= SINK_PAGES + 1:
                raise ValueError(
                    f"{self.budget:,} bytes hold not even the first page and the open one, {self.bytes:,} bytes"
                )
            self._cut(SINK_PAGES)
        self.bytes_peak = max(self.bytes_peak, self.bytes)

    def _take_labels(self, tokens: int) -> list[Run]:
        runs = []
        while tokens:
            if not self._labels:
                self._labels.append(Run(default_region(tokens), tokens))
            region, labelled = self._labels.popleft()
            take = min(tokens, labelled)
            runs.append(Run(region, take))
            if labelled > take:
                self._labels.appendleft(Run(region, labelled - take))
            tokens -= take
        return runs

    def _too_large(self) -> bool:
        return self.budget is not None and self.bytes > self.budget

    def _sealed(self) -> list[int]:
        """Exact pages behind the sink that take no more tokens."""
        last = len(self.pages) - 1
        return [
            index
            for index, page in enumerate(self.pages)
            if index >= SINK_PAGES
            and not page.low
            and (index < last or page.tokens == self.geometry.page_tokens)
        ]

    def _columns(self, index: int) -> slice:
        start = sum(page.tokens for page in self.pages[:index])
        return slice(start, start + self.pages[index].tokens)

    def _round(self, tokens: int) -> None:
        """The last `tokens` columns become what exact pages can hold."""
        dtype = _TORCH[self.geometry.dtype]
        for layer in self.layers:
            for held in (layer.keys, layer.values):
                new = held[:, :, -tokens:]
                new.copy_(new.to(dtype))

    def _exact(self, index: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The page's bytes, `[layers, 2, kv_heads, page_tokens, head_dim]` flat; tokens not written are zero."""
        columns, count = self._columns(index), self.pages[index].tokens
        whole = torch.zeros(self.geometry.shape, dtype=_TORCH[self.geometry.dtype])
        for at, layer in enumerate(self.layers):
            whole[at, 0, :, :count] = layer.keys[0, :, columns]
            whole[at, 1, :, :count] = layer.values[0, :, columns]
        flat: np.ndarray[tuple[int], np.dtype[np.uint8]] = whole.flatten().view(torch.uint8).numpy()
        return flat

    def _fit(self, sealed: list[int]) -> None:
        """From sealed pages. Never from the sink, whose keys are unlike all others."""
        pages, counts = [self._exact(i) for i in sealed], [self.pages[i].tokens for i in sealed]
        self._state = self.codec.fit_state(self.geometry, pages, counts)

    def _quantize(self, index: int) -> None:
        """The page's columns become what its low-bit form decodes to."""
        assert self._state is not None
        page, columns = self.pages[index], self._columns(index)
        exact = self._exact(index)
        packed = np.zeros(self.codec.page_bytes(self.geometry), np.uint8)
        self.codec.encode(self.geometry, exact, page.tokens, self._state, packed)
        self.codec.decode(self.geometry, packed, page.tokens, self._state, exact)
        decoded = torch.from_numpy(exact).view(_TORCH[self.geometry.dtype]).view(self.geometry.shape)
        for at, layer in enumerate(self.layers):
            layer.keys[0, :, columns] = decoded[at, 0, :, : page.tokens].to(layer.keys.dtype)
            layer.values[0, :, columns] = decoded[at, 1, :, : page.tokens].to(layer.values.dtype)
        page.low = True

    def _cut(self, index: int) -> None:
        """The page leaves for good."""
        columns = self._columns(index)
        for layer in self.layers:
            for name in ("keys", "values"):
                held = getattr(layer, name)
                setattr(layer, name, torch.cat((held[:, :, : columns.start], held[:, :, columns.stop :]), 2))
        del self.pages[index]


@torch.inference_mode()
def forward(model: PreTrainedModel, cache: QuantizedCache, tokens: Sequence[int], chunk_tokens: int) -> int:
    """Run `tokens`, at most `chunk_tokens` at a time; the likeliest next token."""
    for start in range(0, len(tokens), chunk_tokens):
        ids = torch.tensor([tokens[start : start + chunk_tokens]])
        positions = torch.arange(cache.length, cache.length + ids.shape[1])[None]
        logits = model(ids, position_ids=positions, logits_to_keep=1, **{cache_argument(model): cache}).logits
        cache.settle(ids.shape[1])
    return int(logits[0, -1].argmax())
