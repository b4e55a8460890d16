"""Attention over pages: one contract, several implementations (tests: `tests/contract/test_attention.py`).

`decode` attends one query token a row over the row's attendable pages, exact and low-bit mixed, in place: no dense
K/V is built. Each page is a split of an online softmax, so its mass falls out for free; on observation steps the
mass of every token is added up too. `prefill` attends many query tokens of one row over earlier pages and, causally,
over the new K/V of the chunk.

**Cold pages.** A page whose replicas left HBM lies in the host pool and leaves a digest in HBM
(`tierkv.prefetch.digests`), from which attention estimates at each layer that has digests what it misses. With
`est[p, h]` the estimated log-mass of cold page `p` for query head `h`, its estimated share of attention is

    exp(est[p, h] - logaddexp(log_sum_exp[h] of what lies in HBM, log sum over the row's cold pages of exp(est[., h])))

normalized jointly, because against what lies in HBM alone every cold page would look hot. The `Cold.read` pages with
the largest shares (summed over a KV head's query heads; the lowest index first where they are equal) are attended in
place from the host pool, by that KV head alone. A page without a digest, or whose estimate is not finite, has share
zero and is never chosen. Masses are shares of everything that was attended.

**Soft-capping and sinks.** With `softcap` a logit is `softcap * tanh(logit / softcap)` wherever one is computed, and
an estimate is that of such logits. A sink is one more token that every query of a head sees, always in HBM, with a
logit of its own and a value of zeros: it counts in `log_sum_exp` and so in every share, but is no page's and no token's
mass. What the masses lack to 1 is what the sinks took.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.geometry import Geometry
from tierkv.prefetch.digests import Digests
from tierkv.quant.contract import Codec


class Pages(NamedTuple):
    """The attendable pages of a batch of rows, built once a step and read by every layer.

    Row `b` attends pages `row_starts[b]:row_starts[b + 1]`, in token order. `token_starts[p]` is where page `p`'s
    first token lies in the mass arrays; `total_tokens` is their length.
    """

    offsets: NDArray[np.int64]  # [pages] byte offset of the replica in the pool
    kinds: NDArray[np.int8]  # [pages] table.Kind: EXACT, QUANTIZED or MIDDLE
    counts: NDArray[np.int32]  # [pages] tokens to attend, 1..page_tokens
    token_starts: NDArray[np.int64]  # [pages]
    row_starts: NDArray[np.int64]  # [rows + 1]
    total_tokens: int


class PoolView(NamedTuple):
    """A mapped pool as attention reads it: of HBM or, for cold pages, of host memory."""

    data: NDArray[np.uint8]  # the whole pool; empty where it is `tensor`
    geometry: Geometry
    codec: Codec
    codec_state: NDArray[np.float32]  # the codec's per-model state (empty until it exists)
    digests: Digests | None = None  # how cold pages' digests in this pool are read; `None`: there are none
    middle: Codec | None = None  # form of MIDDLE pages, `in_model_space`; `None` where there are none
    tensor: torch.Tensor | None = None  # the pool as bytes on a device; None: it is `data`

    @property
    def digest_layers(self) -> int:
        """The last so many layers have digests."""
        return 0 if self.digests is None else self.digests.shape.layers

    @property
    def nbytes(self) -> int:
        return self.data.size if self.tensor is None else self.tensor.numel()

    @property
    def address(self) -> int:
        """Where it begins: views of one pool have the same."""
        return self.data.ctypes.data if self.tensor is None else self.tensor.data_ptr()


Sums = NDArray[np.float32] | torch.Tensor
"""What attention adds shares to, float32: an array, or for attention on a device a tensor there."""


class Leaving(Protocol):
    """Sums on their way from where they were added up to where they are read."""

    @property
    def arrived(self) -> bool:
        """Whether `arrays` would not wait."""
        ...

    def arrays(self) -> list[NDArray[np.float32]]: ...


class ColdPages(NamedTuple):
    """Pages of the batch's rows that lie in host memory only; row `b` has `row_starts[b]:row_starts[b + 1]`."""

    digests: NDArray[
        np.int64
    ]  # [pages] byte offset of the digest in the HBM pool, table.NOWHERE if there is none
    offsets: NDArray[np.int64]  # [pages] byte offset of the replica in the host pool
    kinds: NDArray[np.int8]  # [pages] table.Kind: EXACT, QUANTIZED or MIDDLE
    counts: NDArray[np.int32]  # [pages] tokens, 1..page_tokens
    token_starts: NDArray[np.int64]  # [pages] as in `Pages`, of the same mass arrays
    row_starts: NDArray[np.int64]  # [rows + 1]


READ_ALL = -1
"""`Cold.read`: every cold page is read by every head at every layer, whether it has a digest or not."""


class Cold(NamedTuple):
    """Cold pages and how many of them attention may read where they are."""

    pages: ColdPages
    host: PoolView  # the mapped host pool; geometry, codec and codec_state are those of HBM
    read: int
    """Pages that a KV head reads in place at most, chosen anew at each layer with digests; `READ_ALL`: all of them."""


class ColdSeen(NamedTuple):
    """Sums to which a call adds what it saw of the cold pages; averages over query heads, which count as much as
    `Digests.weights` says in estimates.

    `true` and `attended` make the call an audit: it computes the logits of every cold page from host memory.
    """

    estimates: Sums  # [cold pages] estimated share; only layers with digests add to it
    true: Sums | None = None  # [cold pages] share of attention over HBM and ALL cold pages
    attended: Sums | None = None  # [rows] of that, what was attended: in HBM or read in place


CHOOSING_QUERIES = 4
"""Queries at the end of a chunk whose mean estimate chooses the pages that the chunk reads in place.

Picked on SmolLM2's recall probes, beside each query's own choice and the mean or the maximum over a whole chunk.
"""


class Scale(NamedTuple):
    """What makes a logit of a query's product with a key."""

    factor: float
    cap: float  # of `cap * tanh(logit / cap)`; 0: none


class Attended(NamedTuple):
    out: torch.Tensor  # float32, shape of the query
    log_sum_exp: torch.Tensor  # float32, the query's shape without head_dim


class PagedAttention(Protocol):
    """An implementation: `reference` (torch, readable), `cpu` (numba, parallel, nogil) or `triton` (on a device).

    Sums that a call adds to are the implementation's own, of `zeros`.
    """

    name: str

    def check(self, pool: PoolView) -> None:
        """Raises ConfigError where this implementation cannot attend pages of the pool: before the first step."""
        ...

    def zeros(self, pool: PoolView, count: int) -> Sums:
        """Sums of `count` numbers over pages of the pool."""
        ...

    def leave(self, sums: Sequence[Sums]) -> Leaving:
        """Send sums to where they are read, when nothing more is added to them. Does not wait."""
        ...

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
        page_mass: Sums | None = None, token_mass: Sums | None = None,
        cold: Cold | None = None, seen: ColdSeen | None = None,
        softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> Attended:  # fmt: skip
        """One query a row over its pages.

        Args:
            query: `[rows, q_heads, head_dim]`; q_heads is a multiple of kv_heads (grouped-query attention).
            layer: index into the pages' layers.
            scale: factor on the logits.
            page_mass: `[pages]`, gets the attention probability of each page added, averaged over query heads.
            token_mass: `[total_tokens]`, the same for each token, those of cold pages read in place included (query
                heads that did not read a page count as zero).
            cold: the rows' cold pages; none are chosen at a layer without digests.
            seen: gets what was seen of the cold pages added; ignored without `cold`.
            softcap: what logits are capped to; 0 for none.
            sinks: `[q_heads]` logits, any float dtype.

        A row that attends nothing gets zeros and `log_sum_exp = -inf` (or its sinks).
        """
        ...

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pool: PoolView, pages: Pages,
        layer: int, scale: float, token_mass: Sums | None = None, window: int = 0,
        cold: Cold | None = None, seen: ColdSeen | None = None,
        softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> Attended:  # fmt: skip
        """A chunk of ONE row: query `t` attends all of `pages` and new tokens `0..t`.

        Cold pages precede the chunk. Each KV head names those it would read by their mean share over the chunk's last
        `CHOOSING_QUERIES` queries; every query of every head then attends what any of them named.

        Args:
            query: `[q_heads, chunk, head_dim]`; keys, values: `[kv_heads, chunk, head_dim]` (not yet in `pages`).
            token_mass: `[total_tokens + chunk]`, gets the mass of earlier and new tokens added, averaged over query
                heads and over the chunk's last `window` queries.
            cold: the row's cold pages; their `token_starts` lie below `total_tokens`.
            seen: gets what the chunk's last query saw of them added.
            softcap, sinks: as of `decode`.
        """
        ...
