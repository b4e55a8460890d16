"""Prefill over pages, whatever reads them and wherever they lie: online softmax over bounded blocks of dense keys and
values.

Each block is attended by torch's flash kernel, which also returns the log-sum-exp by which blocks are merged (the
public `scaled_dot_product_attention` does not): the CPU's for float32, CUDA's for the half types. The query heads of
one KV head are the kernel's heads and KV heads its batch, so that grouped queries read the same keys through a stride
of zero.
What no flash kernel takes (capped logits; on CUDA float32 or heads of more than FLASH_DIM) is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from tierkv.attention.contract import Attended, Scale

BLOCK_TOKENS = 4096
"""Tokens of earlier pages that are dense at a time: 16 MiB of keys and values for 8 heads of 64 values. Smaller blocks
cost more merges.
"""

QUERIES = 256
"""Queries whose capped logits are in memory at a time: 9 MiB of them for 9 heads and a block of tokens."""


FLASH_DIM = 256
"""Values of a head that CUDA's flash kernel takes at most, in eights."""


class Block(NamedTuple):
    """Some earlier tokens, in order."""

    keys: torch.Tensor  # [kv_heads, tokens, head_dim] in the dtype that is computed in
    values: torch.Tensor  # [kv_heads, tokens, head_dim]
    tokens: torch.Tensor  # [tokens] int64, where each lies in the mass array


Blocks = Callable[[], Iterable[Block]]
"""Blocks that can be walked through more than once."""


def flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: Scale, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`query` `[kv_heads, group, chunk, head_dim]` -> float32 out of that shape and log-sum-exp without head_dim."""
    if scale.cap > 0 or (query.is_cuda and not _cuda_flash_takes(query)):
        return _written_out(query.float(), keys.float(), values.float(), scale, causal)
    keys, values = (heads.unsqueeze(1).expand(-1, query.shape[1], -1, -1) for heads in (keys, values))
    if query.is_cuda:
        out, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, causal, False, scale=scale.factor
        )
        return out.float(), log_sum_exp
    out, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, scale=scale.factor
    )
    return out, log_sum_exp


def _cuda_flash_takes(query: torch.Tensor) -> bool:
    return query.dtype != torch.float32 and query.shape[-1] % 8 == 0 and query.shape[-1] <= FLASH_DIM


def _written_out(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: Scale, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash` with capped logits, some queries at a time. A causal chunk's query `t` sees keys `0..t`."""
    out, log_sum_exp = torch.empty_like(query), query.new_empty(query.shape[:-1])
    for start in range(0, query.shape[2], QUERIES):
        here = slice(start, min(start + QUERIES, query.shape[2]))
        seen = here.stop if causal else keys.shape[1]
        logits = logits_of(query[:, :, here], keys[:, :seen], scale)
        if causal:
            there = torch.arange(seen, device=query.device)
            hidden = there > there[here.start :].unsqueeze(-1)
            logits.masked_fill_(hidden, -torch.inf)
        log_sum_exp[:, :, here] = logits.logsumexp(-1)
        out[:, :, here] = _shared(torch.softmax(logits, -1), values[:, :seen])
    return out, log_sum_exp


def logits_of(query: torch.Tensor, keys: torch.Tensor, scale: Scale) -> torch.Tensor:
    """`[kv_heads, group, queries, tokens]` of float32 queries `[kv_heads, group, queries, head_dim]`."""
    logits = _shared(query, keys.float().transpose(-1, -2)).mul_(scale.factor)
    return logits.div_(scale.cap).tanh_().mul_(scale.cap) if scale.cap > 0 else logits


def _shared(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`[kv_heads, group, n, k]` times `[kv_heads, k, m]`. A broadcast product would copy the matrix for each head."""
    return torch.matmul(rows.flatten(1, 2), matrix).reshape(*rows.shape[:3], matrix.shape[-1])


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: Scale,
    sinks: torch.Tensor | None, earlier: Blocks, new_tokens: int, token_mass: torch.Tensor | None, window: int,
    more: Callable[[torch.Tensor, torch.Tensor], Blocks] | None = None, dtype: torch.dtype = torch.float32,
) -> Attended:  # fmt: skip
    """`PagedAttention.prefill`; `earlier()` yields the pages' blocks.

    Args:
        new_tokens: where the chunk's own tokens start in `token_mass`.
        more: given the queries `[kv_heads, group, chunk, head_dim]` and the log-sum-exp of each so far, names further
            blocks to attend.
        dtype: what products are taken in; that of the blocks.
    """
    kv_heads, chunk, dim = keys.shape
    grouped = query.detach().to(dtype).reshape(kv_heads, -1, chunk, dim)
    new = Block(
        keys.detach().to(dtype),
        values.detach().to(dtype),
        torch.arange(new_tokens, new_tokens + chunk, device=keys.device),
    )
    last = grouped[:, :, -min(window, chunk) :]
    looked = _Looked(last.float(), scale) if token_mass is not None and window else None
    so_far = flash(grouped, new.keys, new.values, scale, causal=True)
    so_far = _merge(grouped, scale, earlier(), *so_far, looked)
    if sinks is not None:
        so_far = _join_sinks(sinks.detach().float().reshape(kv_heads, -1, 1), *so_far)
    further = () if more is None else more(grouped, so_far[1])()
    out, log_sum_exp = _merge(grouped, scale, further, *so_far, looked)
    if looked is not None and token_mass is not None:
        for block in _pieces(new):
            looked.see(block, new_tokens, chunk)
        looked.add_mass(log_sum_exp, token_mass)
    return Attended(out.reshape(query.shape), log_sum_exp.reshape(query.shape[:-1]))


def _merge(
    grouped: torch.Tensor, scale: Scale, blocks: Iterable[Block], out: torch.Tensor, log_sum_exp: torch.Tensor,
    looked: _Looked | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention over what was attended so far and over further blocks, all of whose tokens every query sees."""
    for block in blocks:
        if looked is not None:
            looked.see(block)
        part, part_log = flash(grouped, block.keys, block.values, scale, causal=False)
        merged = torch.logaddexp(log_sum_exp, part_log)
        mine, theirs = ((log - merged).exp_().unsqueeze(-1) for log in (log_sum_exp, part_log))
        out, log_sum_exp = part.mul_(theirs).add_(out.mul_(mine)), merged
    return out, log_sum_exp


def _join_sinks(
    sinks: torch.Tensor, out: torch.Tensor, log_sum_exp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[kv_heads, group, 1]` without values, seen by every query."""
    joined = torch.logaddexp(log_sum_exp, sinks)
    return out * (log_sum_exp - joined).exp_().unsqueeze(-1), joined


def _pieces(block: Block) -> Iterator[Block]:
    for start in range(0, len(block.tokens), BLOCK_TOKENS):
        piece = slice(start, start + BLOCK_TOKENS)
        yield Block(block.keys[:, piece], block.values[:, piece], block.tokens[piece])


class _Looked:
    """Logits of a chunk's last queries, kept block by block until their log-sum-exp is known.

    A block need not be read again for its mass: 16 queries of 9 heads are 576 bytes a token, its keys and values 1,536.
    """

    def __init__(self, query: torch.Tensor, scale: Scale) -> None:
        self._query, self._scale = query, scale  # [kv_heads, group, last, head_dim]
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def see(self, block: Block, new_tokens: int | None = None, chunk: int = 0) -> None:
        """With `new_tokens` the block is part of the chunk: query `t` of the chunk sees its tokens `0..t`."""
        logits = logits_of(self._query, block.keys, self._scale)
        if new_tokens is not None:
            asks = torch.arange(chunk - self._query.shape[2], chunk, device=logits.device).unsqueeze(-1)
            logits.masked_fill_(block.tokens - new_tokens > asks, -torch.inf)
        self._seen.append((logits, block.tokens))

    def add_mass(self, log_sum_exp: torch.Tensor, token_mass: torch.Tensor) -> None:
        """Add each token's mass, averaged over heads and queries."""
        last = log_sum_exp[:, :, -self._query.shape[2] :].unsqueeze(-1)
        for logits, tokens in self._seen:  # a token lies in one block only
            token_mass.index_add_(0, tokens, logits.sub_(last).exp_().mean(dim=(0, 1, 2)))


__all__ = ["BLOCK_TOKENS", "Block", "Blocks", "attend", "flash"]
