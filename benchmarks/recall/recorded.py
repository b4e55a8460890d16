"""Attention as it was: keys of a context, queries that came after it, and what each query gave to each page.

A model runs once over an input; what it attended is kept as safetensors, so that estimators are compared without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
import xxhash
from safetensors.torch import load_file, save_file

from tierkv.benchmarks.recall.inputs import Input
from tierkv.study.estimators import Layout, grouped, layout_of
from tierkv.study.own_attention import take_over
from tierkv.study.probe import dynamic_cache, fork_dynamic, forward, replay

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEEN = 32
"""Last queries of the context whose attention is kept: what was known of pages before the first question."""

VERSION = 1
"""Of a file."""


class Recorded(NamedTuple):
    """L layers, H KV heads, Q query heads, head_dim D; T tokens in P pages; N queries. Logs are natural."""

    keys: torch.Tensor  # [L, H, T, D] float16, after RoPE
    queries: torch.Tensor  # [L, Q, N, D] float32
    masses: torch.Tensor  # [L, Q, N, P] float32: log of a page's sum of exponentials of logits
    own: torch.Tensor  # [L, Q, N] float32: the same of what came after the context
    seen: torch.Tensor  # [L, Q, P] float32: mean share of a page over the context's last queries
    asks: torch.Tensor  # [N] int64: which ask a query is of; queries of one follow each other
    layout: Layout
    scale: float

    @property
    def shares(self) -> torch.Tensor:
        """`[L, Q, N, P]`: what each page got of each query's attention."""
        total = torch.logaddexp(self.masses.logsumexp(-1), self.own)
        return (self.masses - total.unsqueeze(-1)).exp()


class _Recorder:
    """A model's attention is that of SDPA; while `layout` is set, the last `watched` queries are kept."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.layout: Layout | None = None
        self.watched = 0
        self.scale = 1.0
        self.found: dict[int, tuple[torch.Tensor, ...]] = {}
        take_over(model, "tierkv_recorder", self._attend)

    def _attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor | None:
        if self.layout is not None:
            keys, asking, tokens = key[0].float(), query[0, :, -self.watched :].float(), self.layout.tokens
            n = asking.shape[1]
            future = torch.ones(n, keys.shape[1], dtype=torch.bool).triu(keys.shape[1] - n + 1)
            logits = (grouped(asking, keys) * scale).masked_fill_(future, -torch.inf)
            own = logits[..., tokens:].logsumexp(-1)
            self.found[layer] = (asking, self.layout.log_mass(logits[..., :tokens]), own)
            self.scale = scale
        return None

    def take(self) -> list[torch.Tensor]:
        """What was kept since the last time, `[L, ...]` each."""
        stacked = [
            torch.stack(one) for one in zip(*(self.found[at] for at in sorted(self.found)), strict=True)
        ]
        self.found = {}
        return stacked


@torch.inference_mode()
def record(model: PreTrainedModel, given: Input) -> Recorded:
    """Runs the model, whose attention is afterwards as it was."""
    before = model.config._attn_implementation
    layout = layout_of(given.runs)
    recorder, cache = _Recorder(model), dynamic_cache(model)
    try:
        recorder.layout, recorder.watched = layout, SEEN
        replay(model, cache, given.tokens, burst=0)
        _, seen, _ = recorder.take()
        keys = torch.stack([layer.keys[0] for layer in cache.layers]).half()
        found, asks = [], []
        for number, ask in enumerate(given.asks):
            recorder.watched = ask.watched
            with fork_dynamic(cache)() as fork:
                forward(model, fork, ask.tokens)
            found.append(recorder.take())
            asks += [number] * ask.watched
    finally:
        model.set_attn_implementation(before)
    queries, masses, own = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
    shares = seen.softmax(-1).mean(2)
    return Recorded(keys, queries, masses, own, shares, torch.tensor(asks), layout, recorder.scale)


def recorded(folder: Path, model: PreTrainedModel, given: Input) -> Recorded:
    """From the folder, where it was recorded before; otherwise it is now."""
    known = msgspec.json.encode([VERSION, given.tokens, given.runs, [ask[:2] for ask in given.asks]])
    file = folder / f"{xxhash.xxh3_64_hexdigest(known)}.safetensors"
    if not file.is_file():
        one = record(model, given)
        folder.mkdir(parents=True, exist_ok=True)
        kept = {name: getattr(one, name).contiguous() for name in Recorded._fields[:6]}
        kept |= {"counts": torch.from_numpy(one.layout.counts), "scale": torch.tensor(one.scale)}
        fresh = file.with_suffix(".part")
        save_file(kept, fresh)
        fresh.rename(file)
    held = load_file(file)
    layout, scale = Layout(held.pop("counts").numpy()), float(held.pop("scale"))
    return Recorded(**held, layout=layout, scale=scale)
