"""Prefill over pages, whatever reads them: online softmax over bounded blocks of dense float32 keys and values.

Each block is attended by torch's flash kernel for CPUs, which also returns the log-sum-exp by which blocks are merged
(the public `scaled_dot_product_attention` does not). The query heads of one KV head are the kernel's heads and KV heads
its batch, so that grouped queries read the same keys through a stride of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.attention.contract import Attended

BLOCK_TOKENS = 1024
"""Tokens of earlier pages that are dense at a time: 4 MiB of keys and values for 8 heads of 64 values."""


class Block(NamedTuple):
    """Some earlier tokens, in order."""

    keys: torch.Tensor  # [kv_heads, tokens, head_dim] float32
    values: torch.Tensor  # [kv_heads, tokens, head_dim] float32
    tokens: NDArray[np.int64]  # [tokens] where each lies in the mass array


def flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`query` `[kv_heads, group, chunk, head_dim]` -> out of that shape and log-sum-exp `[kv_heads, group, chunk]`."""
    group = query.shape[1]
    out, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query,
        keys.unsqueeze(1).expand(-1, group, -1, -1),
        values.unsqueeze(1).expand(-1, group, -1, -1),
        0.0,
        causal,
        scale=scale,
    )
    return out, log_sum_exp


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float,
    earlier: Callable[[], Iterable[Block]], new_tokens: int,
    token_mass: NDArray[np.float32] | None, window: int,
) -> Attended:  # fmt: skip
    """`PagedAttention.prefill`; `earlier()` yields the pages' blocks (twice, if masses are wanted).

    `new_tokens` is where the chunk's own tokens start in `token_mass`.
    """
    kv_heads, chunk, dim = keys.shape
    grouped = query.detach().float().reshape(kv_heads, -1, chunk, dim)
    new = Block(
        keys.detach().float(),
        values.detach().float(),
        np.arange(new_tokens, new_tokens + chunk, dtype=np.int64),
    )
    out, log_sum_exp = flash(grouped, new.keys, new.values, scale, causal=True)
    for block in earlier():
        part, part_log = flash(grouped, block.keys, block.values, scale, causal=False)
        merged = torch.logaddexp(log_sum_exp, part_log)
        out = out * (log_sum_exp - merged).exp_().unsqueeze(-1) + part * (part_log - merged).exp_().unsqueeze(
            -1
        )
        log_sum_exp = merged
    if token_mass is not None and window > 0:
        last = min(window, chunk)
        for block in earlier():
            _add_mass(grouped[:, :, -last:], log_sum_exp[:, :, -last:], block, scale, chunk, token_mass)
        for block in _pieces(new):
            _add_mass(
                grouped[:, :, -last:], log_sum_exp[:, :, -last:], block, scale, chunk, token_mass, new_tokens
            )
    return Attended(out.reshape(query.shape), log_sum_exp.reshape(query.shape[:-1]))


def _pieces(block: Block) -> Iterator[Block]:
    for start in range(0, len(block.tokens), BLOCK_TOKENS):
        piece = slice(start, start + BLOCK_TOKENS)
        yield Block(block.keys[:, piece], block.values[:, piece], block.tokens[piece])


def _add_mass(
    query: torch.Tensor, log_sum_exp: torch.Tensor, block: Block, scale: float, chunk: int,
    token_mass: NDArray[np.float32], new_tokens: int | None = None,
) -> None:  # fmt: skip
    """Add a block's mass, averaged over heads and queries; `query` `[kv_heads, group, last, head_dim]`.

    With `new_tokens` the block is part of the chunk: query `t` of the chunk sees its tokens `0..t`.
    """
    last = query.shape[2]
    logits = torch.matmul(query, block.keys.unsqueeze(1).transpose(-1, -2)) * scale
    mass = (logits - log_sum_exp.unsqueeze(-1)).exp_()
    if new_tokens is not None:
        asks = torch.arange(chunk - last, chunk).unsqueeze(-1)
        mass *= torch.from_numpy(block.tokens - new_tokens) <= asks
    np.add.at(token_mass, block.tokens, mass.mean(dim=(0, 1, 2)).numpy())


__all__ = ["BLOCK_TOKENS", "Block", "attend", "flash"]
