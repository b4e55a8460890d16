"""Attention over pages: one contract, several implementations (tests: `tests/contract/test_attention.py`).

`decode` attends one query token a row over the row's attendable pages, exact and low-bit mixed, in place: no dense
K/V is built. Each page is a split of an online softmax, so its mass falls out for free; on observation steps the
mass of every token is added up too. `prefill` attends many query tokens of one row over earlier pages and, causally,
over the new K/V of the chunk.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.geometry import Geometry
from tierkv.quant.contract import Codec


class Pages(NamedTuple):
    """The attendable pages of a batch of rows, built once a step and read by every layer.

    Row `b` attends pages `row_starts[b]:row_starts[b + 1]`, in token order. `token_starts[p]` is where page `p`'s
    first token lies in the mass arrays; `total_tokens` is their length.
    """

    offsets: NDArray[np.int64]  # [pages] byte offset of the replica in the pool
    kinds: NDArray[np.int8]  # [pages] table.Kind: EXACT or QUANTIZED
    counts: NDArray[np.int32]  # [pages] tokens to attend, 1..page_tokens
    token_starts: NDArray[np.int64]  # [pages]
    row_starts: NDArray[np.int64]  # [rows + 1]
    total_tokens: int


class PoolView(NamedTuple):
    """A mapped HBM pool as attention reads it."""

    data: NDArray[np.uint8]  # the whole pool
    geometry: Geometry
    codec: Codec
    codec_state: NDArray[np.float32]  # the codec's per-model state (empty until it exists)


class Attended(NamedTuple):
    out: torch.Tensor  # float32, shape of the query
    log_sum_exp: torch.Tensor  # float32, the query's shape without head_dim


class PagedAttention(Protocol):
    """An implementation: `reference` (torch, readable) or `cpu` (numba, parallel, nogil)."""

    name: str

    def write(
        self, pool: PoolView, layer: int, offsets: NDArray[np.int64], slots: NDArray[np.int32],
        keys: torch.Tensor, values: torch.Tensor,
    ) -> None:  # fmt: skip
        """Store K/V of `n` tokens: token `i` goes to slot `slots[i]` of the exact page at `offsets[i]`.

        keys, values: `[n, kv_heads, head_dim]`, any float dtype; rounded to the pool's dtype (nearest even).
        """
        ...

    def decode(
        self, query: torch.Tensor, pool: PoolView, pages: Pages, layer: int, scale: float,
        page_mass: NDArray[np.float32] | None = None, token_mass: NDArray[np.float32] | None = None,
    ) -> Attended:  # fmt: skip
        """One query a row over its pages.

        Args:
            query: `[rows, q_heads, head_dim]`; q_heads is a multiple of kv_heads (grouped-query attention).
            layer: index into the pages' layers.
            scale: factor on the logits.
            page_mass: `[pages]`, gets the attention probability of each page added, averaged over query heads.
            token_mass: `[total_tokens]`, the same for each token.

        A row without pages gets zeros and `log_sum_exp = -inf`.
        """
        ...

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pool: PoolView, pages: Pages,
        layer: int, scale: float, token_mass: NDArray[np.float32] | None = None, window: int = 0,
    ) -> Attended:  # fmt: skip
        """A chunk of ONE row: query `t` attends all of `pages` and new tokens `0..t`.

        Args:
            query: `[q_heads, chunk, head_dim]`; keys, values: `[kv_heads, chunk, head_dim]` (not yet in `pages`).
            token_mass: `[total_tokens + chunk]`, gets the mass of earlier and new tokens added, averaged over query
                heads and over the chunk's last `window` queries.
        """
        ...
