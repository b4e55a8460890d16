"""Attention over pages as it is written on paper: decode every page, join, softmax. In float64, and slow on purpose."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.attention.contract import Attended, Pages, PoolView
from tierkv.table import Kind

TORCH_DTYPE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class ReferenceAttention:
    """`PagedAttention` in plain torch, for any codec that has a `reference_decode`."""

    name = "reference"

    def write(
        self, pool: PoolView, layer: int, offsets: NDArray[np.int64], slots: NDArray[np.int32],
        keys: torch.Tensor, values: torch.Tensor,
    ) -> None:  # fmt: skip
        for token, (offset, slot) in enumerate(zip(offsets.tolist(), slots.tolist(), strict=True)):
            page = _exact_page(pool, offset)
            page[layer, 0, :, slot] = keys[token].to(page.dtype)
            page[layer, 1, :, slot] = values[token].to(page.dtype)

    def decode(
        self, query: torch.Tensor, pool: PoolView, pages: Pages, layer: int, scale: float,
        page_mass: NDArray[np.float32] | None = None, token_mass: NDArray[np.float32] | None = None,
    ) -> Attended:  # fmt: skip
        out = torch.zeros(query.shape, dtype=torch.float64)
        log_sum_exp = torch.full(query.shape[:-1], -torch.inf, dtype=torch.float64)
        for row in range(query.shape[0]):
            first, last = int(pages.row_starts[row]), int(pages.row_starts[row + 1])
            if first == last:
                continue
            keys, values = _dense(pool, pages, first, last, layer)
            logits = _logits(query[row].unsqueeze(1), keys, scale).squeeze(1)
            log_sum_exp[row] = logits.logsumexp(-1)
            probabilities = logits.softmax(-1)
            out[row] = _weighted(probabilities.unsqueeze(1), values).squeeze(1)
            mean = probabilities.mean(0).float().numpy()
            for page, part in _split(pages, first, last, mean):
                if page_mass is not None:
                    page_mass[page] += part.sum()
                if token_mass is not None:
                    start = pages.token_starts[page]
                    token_mass[start : start + len(part)] += part
        return Attended(out.float(), log_sum_exp.float())

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pool: PoolView, pages: Pages,
        layer: int, scale: float, token_mass: NDArray[np.float32] | None = None, window: int = 0,
    ) -> Attended:  # fmt: skip
        chunk, count = query.shape[1], len(pages.offsets)
        old_keys, old_values = _dense(pool, pages, 0, count, layer)
        old = old_keys.shape[1]
        logits = _logits(query, torch.cat([old_keys, keys.double()], 1), scale)
        future = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)
        logits[:, :, old:].masked_fill_(future, -torch.inf)
        probabilities = logits.softmax(-1)
        if token_mass is not None and window > 0:
            mean = probabilities[:, -window:].mean((0, 1)).float().numpy()
            for page, part in _split(pages, 0, count, mean[:old]):
                token_mass[pages.token_starts[page] :][: len(part)] += part
            token_mass[pages.total_tokens : pages.total_tokens + chunk] += mean[old:]
        out = _weighted(probabilities, torch.cat([old_values, values.double()], 1))
        return Attended(out.float(), logits.logsumexp(-1).float())


def _exact_page(pool: PoolView, offset: int) -> torch.Tensor:
    """An exact page as a tensor of `geometry.shape` over the pool's own bytes."""
    page = torch.from_numpy(np.asarray(pool.data)[offset : offset + pool.geometry.page_bytes])
    return page.view(TORCH_DTYPE[pool.geometry.dtype]).view(pool.geometry.shape)


def _dense(
    pool: PoolView, pages: Pages, first: int, last: int, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[kv_heads, tokens, head_dim]` float64 of the pages `[first, last)`."""
    geometry = pool.geometry
    parts = [torch.zeros(2, geometry.num_kv_heads, 0, geometry.head_dim, dtype=torch.float64)]
    for page in range(first, last):
        offset, count = int(pages.offsets[page]), int(pages.counts[page])
        if pages.kinds[page] == Kind.EXACT:
            decoded = _exact_page(pool, offset)
        else:
            packed = np.asarray(pool.data)[offset : offset + pool.codec.page_bytes(geometry)]
            decoded = torch.from_numpy(pool.codec.reference_decode(geometry, packed, count, pool.codec_state))
        parts.append(decoded[layer, :, :, :count].double())
    keys, values = torch.cat(parts, 2)
    return keys, values


def _logits(query: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """`[q_heads, queries, tokens]`; query head `h` reads KV head `h // group`."""
    group = query.shape[0] // keys.shape[0]
    return query.double() @ keys.repeat_interleave(group, 0).transpose(1, 2) * scale


def _weighted(probabilities: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`[q_heads, queries, head_dim]`."""
    return probabilities @ values.repeat_interleave(probabilities.shape[0] // values.shape[0], 0)


def _split(
    pages: Pages, first: int, last: int, mass: NDArray[np.float32]
) -> list[tuple[int, NDArray[np.float32]]]:
    """The mass of each page's tokens."""
    ends = np.cumsum(pages.counts[first:last])
    return list(zip(range(first, last), np.split(mass, ends[:-1]), strict=True)) if last > first else []
