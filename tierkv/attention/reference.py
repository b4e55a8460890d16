"""Attention over pages as it is written on paper: decode every page, join, softmax. In float64, and slow on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.attention.contract import (
    CHOOSING_QUERIES,
    READ_ALL,
    Attended,
    Cold,
    ColdPages,
    ColdSeen,
    Pages,
    PoolView,
    Scale,
    Sums,
)
from tierkv.attention.reference_cold import estimates_of, pages_read, shares_of, weighted_mean
from tierkv.attention.sums import ArraySums, array_of
from tierkv.table import Kind

TORCH_DTYPE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class ReferenceAttention(ArraySums):
    """`PagedAttention` in plain torch, for any codec that has a `reference_decode`."""

    name = "reference"

    def write(
        self, pool: PoolView, layer: int, offsets: NDArray[np.int64], slots: NDArray[np.int32],
        keys: torch.Tensor, values: torch.Tensor,
    ) -> None:  # fmt: skip
        for token, (offset, slot) in enumerate(zip(offsets.tolist(), slots.tolist(), strict=True)):
            page = _as_page(pool, np.asarray(pool.data)[offset : offset + pool.geometry.page_bytes])
            page[layer, 0, :, slot] = keys[token].to(page.dtype)
            page[layer, 1, :, slot] = values[token].to(page.dtype)

    def decode(
        self, query: torch.Tensor, pool: PoolView, pages: Pages, layer: int, scale: float,
        page_mass: Sums | None = None, token_mass: Sums | None = None,
        cold: Cold | None = None, seen: ColdSeen | None = None,
        softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> Attended:  # fmt: skip
        to_logits = Scale(scale, softcap)
        out = torch.zeros(query.shape, dtype=torch.float64)
        log_sum_exp = torch.full(query.shape[:-1], -torch.inf, dtype=torch.float64)
        for row in range(query.shape[0]):
            here = range(int(pages.row_starts[row]), int(pages.row_starts[row + 1]))
            keys, values = _dense(pool, pages, here, layer)
            q = query[row].double().unsqueeze(1)
            logits = _logits(q, keys, to_logits)
            got = _attend(q, keys, values, logits, pool, cold, row, layer, to_logits, sinks, seen, False)
            out[row], log_sum_exp[row] = got.out.squeeze(1), got.log_sum_exp.squeeze(1)
            mean = got.probabilities.mean((0, 1)).float().numpy()
            for page, part in _split(pages, here, mean):
                if page_mass is not None:
                    page_mass[page] += part.sum()
                if token_mass is not None:
                    array_of(token_mass)[pages.token_starts[page] :][: len(part)] += part
            if token_mass is not None:
                _add_cold_mass(cold, got, mean[keys.shape[1] :], array_of(token_mass))
        return Attended(out.float(), log_sum_exp.float())

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pool: PoolView, pages: Pages,
        layer: int, scale: float, token_mass: Sums | None = None, window: int = 0,
        cold: Cold | None = None, seen: ColdSeen | None = None,
        softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> Attended:  # fmt: skip
        to_logits = Scale(scale, softcap)
        chunk, here = query.shape[1], range(len(pages.offsets))
        old_keys, old_values = _dense(pool, pages, here, layer)
        old = old_keys.shape[1]
        keys, values = torch.cat([old_keys, keys.double()], 1), torch.cat([old_values, values.double()], 1)
        logits = _logits(query, keys, to_logits)
        future = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)
        logits[:, :, old:].masked_fill_(future, -torch.inf)
        got = _attend(
            query.double(), keys, values, logits, pool, cold, 0, layer, to_logits, sinks, seen, True
        )
        if token_mass is not None and window > 0:
            mean, token_mass = (
                got.probabilities[:, -window:].mean((0, 1)).float().numpy(),
                array_of(token_mass),
            )
            for page, part in _split(pages, here, mean[:old]):
                token_mass[pages.token_starts[page] :][: len(part)] += part
            token_mass[pages.total_tokens : pages.total_tokens + chunk] += mean[old : old + chunk]
            _add_cold_mass(cold, got, mean[old + chunk :], token_mass)
        return Attended(got.out.float(), got.log_sum_exp.float())


class _Row(NamedTuple):
    """What the queries of one row attended, in float64."""

    out: torch.Tensor  # [q_heads, queries, head_dim]
    log_sum_exp: torch.Tensor  # [q_heads, queries]
    probabilities: torch.Tensor  # [q_heads, queries, tokens + tokens of `cold`]
    cold: list[int]  # cold pages that some head read


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, logits: torch.Tensor,
    pool: PoolView, cold: Cold | None, row: int, layer: int, scale: Scale, sinks: torch.Tensor | None,
    seen: ColdSeen | None, together: bool,
) -> _Row:  # fmt: skip
    """Attention over `keys`, whose `logits` `[q_heads, queries, tokens]` are masked, and over the row's cold pages.

    Those are chosen by each KV head or, for a chunk, `together`.
    """
    if cold is None:
        return _Row(*_softmax(logits, values, sinks), [])
    first, last = int(cold.pages.row_starts[row]), int(cold.pages.row_starts[row + 1])
    read = torch.zeros(logits.shape[0], last - first, dtype=torch.bool)
    if layer >= pool.geometry.num_layers - pool.digest_layers:
        asking = slice(-CHOOSING_QUERIES, None)
        estimates = estimates_of(query[:, asking], pool, cold.pages, range(first, last), layer, scale)
        shares = shares_of(estimates, _log_sum_exp(logits[:, asking], sinks))
        if seen is not None:
            array_of(seen.estimates)[first:last] += weighted_mean(shares[:, -1], pool, layer).float().numpy()
        if cold.read != READ_ALL:
            read = pages_read(estimates, shares, keys.shape[0], cold.read, together)
    if cold.read == READ_ALL:
        read[:] = True
    chosen = (read.any(0).nonzero().squeeze(-1) + first).tolist()
    cold_keys, cold_values = _dense(cold.host, cold.pages, chosen, layer)
    unread = ~_by_token(read[:, [page - first for page in chosen]], cold.pages, chosen)
    cold_logits = _logits(query, cold_keys, scale).masked_fill(unread.unsqueeze(1), -torch.inf)
    got = _softmax(torch.cat([logits, cold_logits], -1), torch.cat([values, cold_values], 1), sinks)
    if seen is not None and (seen.true is not None or seen.attended is not None):
        _audit(query[:, -1:], logits[:, -1:], cold, row, layer, scale, sinks, read, seen)
    return _Row(*got, chosen)


def _audit(
    query: torch.Tensor, logits: torch.Tensor, cold: Cold, row: int, layer: int, scale: Scale,
    sinks: torch.Tensor | None, read: torch.Tensor, seen: ColdSeen,
) -> None:  # fmt: skip
    """True shares of one query `[q_heads, 1, head_dim]`; `read` `[q_heads, pages]`."""
    here = range(int(cold.pages.row_starts[row]), int(cold.pages.row_starts[row + 1]))
    keys, _ = _dense(cold.host, cold.pages, here, layer)
    everything = torch.cat([logits, _logits(query, keys, scale)], -1)
    total = _log_sum_exp(everything, sinks)
    everything = everything.squeeze(1)
    probabilities = torch.where(total.isneginf(), 0.0, torch.exp(everything - total))[:, logits.shape[-1] :]
    if seen.true is not None:
        for page, part in _split(cold.pages, here, probabilities.mean(0).float().numpy()):
            seen.true[page] += part.sum()
    if seen.attended is not None:
        missed = probabilities.masked_fill(_by_token(read, cold.pages, here), 0.0).sum(-1)
        seen.attended[row] += float(1.0 - missed.mean())


def _log_sum_exp(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """`[q_heads, queries]`, the sinks' logits among them."""
    log_sum_exp = logits.logsumexp(-1)
    return log_sum_exp if sinks is None else torch.logaddexp(log_sum_exp, sinks.double().unsqueeze(-1))


def _softmax(
    logits: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, log-sum-exp and probabilities; zeros for a query that attends nothing."""
    log_sum_exp = _log_sum_exp(logits, sinks)
    nothing = log_sum_exp.isneginf().unsqueeze(-1)
    probabilities = torch.exp(logits - log_sum_exp.unsqueeze(-1)).masked_fill(nothing, 0.0)
    return _weighted(probabilities, values), log_sum_exp, probabilities


def _add_cold_mass(
    cold: Cold | None, got: _Row, mass: NDArray[np.float32], token_mass: NDArray[np.float32]
) -> None:
    if cold is not None:
        for page, part in _split(cold.pages, got.cold, mass):
            token_mass[cold.pages.token_starts[page] :][: len(part)] += part


def _as_page(pool: PoolView, exact: NDArray[np.uint8]) -> torch.Tensor:
    """An exact page's bytes as a tensor of `geometry.shape` over the same memory."""
    return torch.from_numpy(exact).view(TORCH_DTYPE[pool.geometry.dtype]).view(pool.geometry.shape)


def _dense(
    pool: PoolView, pages: Pages | ColdPages, which: Sequence[int], layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[kv_heads, tokens, head_dim]` float64 of some pages."""
    geometry = pool.geometry
    parts = [torch.zeros(2, geometry.num_kv_heads, 0, geometry.head_dim, dtype=torch.float64)]
    for page in which:
        offset, count = int(pages.offsets[page]), int(pages.counts[page])
        if pages.kinds[page] == Kind.EXACT:
            exact = np.asarray(pool.data)[offset : offset + geometry.page_bytes]
            decoded = _as_page(pool, exact.copy())  # a host pool is mapped read-only, which torch warns of
        else:
            codec = pool.middle if pages.kinds[page] == Kind.MIDDLE else pool.codec
            assert codec is not None
            packed = np.asarray(pool.data)[offset : offset + codec.page_bytes(geometry)]
            decoded = torch.from_numpy(codec.reference_decode(geometry, packed, count, pool.codec_state))
        parts.append(decoded[layer, :, :, :count].double())
    keys, values = torch.cat(parts, 2)
    return keys, values


def _logits(query: torch.Tensor, keys: torch.Tensor, scale: Scale) -> torch.Tensor:
    """`[q_heads, queries, tokens]`; query head `h` reads KV head `h // group`."""
    group = query.shape[0] // keys.shape[0]
    logits = query.double() @ keys.repeat_interleave(group, 0).transpose(1, 2) * scale.factor
    return scale.cap * torch.tanh(logits / scale.cap) if scale.cap > 0 else logits


def _weighted(probabilities: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`[q_heads, queries, head_dim]`."""
    return probabilities @ values.repeat_interleave(probabilities.shape[0] // values.shape[0], 0)


def _by_token(by_page: torch.Tensor, pages: ColdPages, which: Sequence[int]) -> torch.Tensor:
    """Columns of `by_page` `[n, len(which)]`, each repeated for its page's tokens."""
    counts = torch.tensor([int(pages.counts[page]) for page in which], dtype=torch.int64)
    return by_page.repeat_interleave(counts, 1)


def _split(
    pages: Pages | ColdPages, which: Sequence[int], mass: NDArray[np.float32]
) -> list[tuple[int, NDArray[np.float32]]]:
    """The mass of each page's tokens; `mass` starts with the first page's."""
    ends = np.cumsum([int(pages.counts[page]) for page in which], dtype=np.int64)
    return [
        (page, mass[end - pages.counts[page] : end]) for page, end in zip(which, ends.tolist(), strict=True)
    ]
