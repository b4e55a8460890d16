"""Attention over pages on CPU cores: numba kernels that read pages in place, without the GIL."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.attention.cold import Arrays, ColdScratch, audit, gather, look, read, wants_audit
from tierkv.attention.contract import CHOOSING_QUERIES, Attended, Cold, ColdSeen, Pages, PoolView, Scale, Sums
from tierkv.attention.decode_kernels import PAGES_AT_ONCE
from tierkv.attention.decode_kernels import decode as decode_kernel
from tierkv.attention.layer_view import LayerView, LayerViews
from tierkv.attention.mass_kernels import add_masses
from tierkv.attention.online_softmax import Floats
from tierkv.attention.page_kernels import read_block, store_narrowed, store_words
from tierkv.attention.prefill import BLOCK_TOKENS, Block, Blocks, attend
from tierkv.attention.sums import ArraySums, array_of
from tierkv.geometry import Geometry
from tierkv.numba_setup import ensure_threading_layer, thread_count

NO_MASS = np.zeros(0, np.float32)
NO_SINKS = np.zeros(0, np.float32)
NO_PAGES = np.zeros((0, 0), np.float32)
NO_WEIGHTS = np.zeros((0, 0, 0), np.float32)

TORCH_DTYPE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Scratch:
    """Working memory of `decode` for one thread and one shape; see `decode_kernels` for the arrays' meaning."""

    def __init__(self, rows: int, q_heads: int, kv_heads: int, head_dim: int, page_tokens: int) -> None:
        group, lanes = q_heads // kv_heads, thread_count()
        segments = rows * kv_heads + lanes
        self.shape = (rows, q_heads, kv_heads, head_dim, page_tokens)
        self.arrays = (
            np.empty((lanes, group, page_tokens), np.float32),  # page_rows
            np.empty((lanes, group, PAGES_AT_ONCE * page_tokens), np.float32),  # weights
            np.empty((lanes, group, head_dim), np.float32),  # low_query
            np.empty((lanes, group), np.float32),  # low_bias
            np.empty((segments, group), np.float32),  # tops
            np.empty((segments, group), np.float32),  # totals
            np.empty((segments, group, head_dim), np.float32),  # exact_sums
            np.empty((segments, group, head_dim), np.float32),  # low_sums
            np.empty(segments, np.bool_),  # has_low
        )
        self._kept = NO_WEIGHTS
        self._page_sums = np.zeros((2, 0, 0), np.float32)

    def kept(self, pages: int) -> Floats:
        """`[pages, q_heads, page_tokens]`; grows by halves, because a sequence grows by a page at a time."""
        if len(self._kept) < pages:
            self._kept = np.empty((pages + pages // 2, self.shape[1], self.shape[4]), np.float32)
        return self._kept[:pages]

    def page_sums(self, pages: int) -> tuple[Floats, Floats]:
        """Tops and totals of each page, `[pages, q_heads]` each."""
        if self._page_sums.shape[1] < pages:
            self._page_sums = np.empty((2, pages + pages // 2, self.shape[1]), np.float32)
        return self._page_sums[0, :pages], self._page_sums[1, :pages]


class Memory(threading.local):
    """What each thread has of its own."""

    def __init__(self) -> None:
        self.views = LayerViews()
        self.cold = ColdScratch()
        self._scratch: Scratch | None = None

    def scratch(self, *shape: int) -> Scratch:
        """A new shape replaces it."""
        if self._scratch is None or self._scratch.shape != shape:
            self._scratch = Scratch(*shape)
        return self._scratch


class CpuAttention(ArraySums):
    """`PagedAttention` on all cores of this process. One instance may be used by several threads."""

    name = "cpu"

    def __init__(self) -> None:
        ensure_threading_layer()
        self._memory = Memory()

    def write(
        self, pool: PoolView, layer: int, offsets: NDArray[np.int64], slots: NDArray[np.int32],
        keys: torch.Tensor, values: torch.Tensor,
    ) -> None:  # fmt: skip
        geometry = pool.geometry
        view = self._memory.views.of(pool, layer)
        if keys.dtype == values.dtype == TORCH_DTYPE[geometry.dtype]:
            bits = torch.int32 if geometry.item_bytes == 4 else torch.int16
            k, v = (x.detach().contiguous().view(bits).numpy().view(view.words.dtype) for x in (keys, values))
            store_words(view.words, view.layer, geometry.page_tokens, offsets, slots, k, v)
        elif geometry.dtype == "float32":
            k, v = _floats(keys).view(np.uint32), _floats(values).view(np.uint32)
            store_words(view.words, view.layer, geometry.page_tokens, offsets, slots, k, v)
        else:
            store_narrowed(
                view.words, view.is_bfloat16, view.layer, geometry.page_tokens, offsets, slots,
                _floats(keys), _floats(values),
            )  # fmt: skip

    def decode(
        self, query: torch.Tensor, pool: PoolView, pages: Pages, layer: int, scale: float,
        page_mass: Sums | None = None, token_mass: Sums | None = None,
        cold: Cold | None = None, seen: ColdSeen | None = None,
        softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> Attended:  # fmt: skip
        rows, q_heads, head_dim = query.shape
        geometry = pool.geometry
        scratch = self._memory.scratch(rows, q_heads, geometry.num_kv_heads, head_dim, geometry.page_tokens)
        asked = _floats(query)
        count = len(pages.offsets)
        kept = NO_WEIGHTS if token_mass is None else scratch.kept(count)
        masses = page_mass is not None or token_mass is not None
        page_tops, page_totals = scratch.page_sums(count) if masses else (NO_PAGES, NO_PAGES)
        out = np.empty((rows, q_heads, head_dim), np.float32)
        log_sum_exp = np.empty((rows, q_heads), np.float32)
        view, to_logits = self._memory.views.of(pool, layer), _float32(Scale(scale, softcap))
        decode_kernel(
            asked, view.words, view.packed, view.is_bfloat16, view.code, view.state,
            view.middle, view.layer, view.num_layers, geometry.num_kv_heads, to_logits,
            pages.offsets, pages.kinds, pages.counts, pages.row_starts, NO_SINKS if sinks is None else _floats(sinks),
            *scratch.arrays, page_tops, page_totals, kept, out, log_sum_exp,
        )  # fmt: skip
        if cold is not None:
            self._attend_cold(
                asked, pool, layer, to_logits, scratch.arrays, None if token_mass is None else array_of(token_mass),
                cold, seen, out, log_sum_exp,
            )  # fmt: skip
        if masses:
            add_masses(
                page_tops, page_totals, kept, pages.counts, pages.token_starts, pages.row_starts, log_sum_exp,
                NO_MASS if page_mass is None else array_of(page_mass),
                NO_MASS if token_mass is None else array_of(token_mass),
            )  # fmt: skip
        return Attended(torch.from_numpy(out), torch.from_numpy(log_sum_exp))

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pool: PoolView, pages: Pages,
        layer: int, scale: float, token_mass: Sums | None = None, window: int = 0,
        cold: Cold | None = None, seen: ColdSeen | None = None,
        softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> Attended:  # fmt: skip
        to_logits = Scale(scale, softcap)
        in_kernels = _float32(to_logits)
        mass = None if token_mass is None else torch.from_numpy(array_of(token_mass))

        def earlier() -> Iterator[Block]:
            return _blocks(self._memory.views.of(pool, layer), pool.geometry, pages)

        if cold is None:
            return attend(query, keys, values, to_logits, sinks, earlier, pages.total_tokens, mass, window)
        memory = self._memory
        q_heads, chunk, head_dim = query.shape
        heads = pool.geometry.num_kv_heads
        hbm_log = np.empty((1, q_heads), np.float32)

        def named(grouped: torch.Tensor, log_sum_exp: torch.Tensor) -> Blocks:
            """The cold pages that any KV head names, asked with the chunk's last queries."""
            hbm_log[0] = _floats(log_sum_exp[:, :, -1]).reshape(-1)
            asking = min(CHOOSING_QUERIES, chunk)
            asked = _floats(grouped[:, :, -asking:]).reshape(1, q_heads * asking, head_dim)
            logs = _floats(log_sum_exp[:, :, -asking:]).reshape(1, q_heads * asking)
            choice = look(memory.cold, asked, pool, cold, layer, in_kernels, logs, asking, seen)
            union = gather(cold.pages, np.unique(choice.pages))
            return lambda: _blocks(memory.cold.host(cold.host, layer), pool.geometry, union)

        got = attend(query, keys, values, to_logits, sinks, earlier, pages.total_tokens, mass, window, named)
        if wants_audit(seen):
            arrays = memory.scratch(1, q_heads, heads, head_dim, pool.geometry.page_tokens).arrays
            audit(
                memory.cold, arrays, _floats(query[:, -1]).reshape(1, q_heads, head_dim), cold, layer,
                in_kernels, hbm_log, _floats(got.log_sum_exp[:, -1]).reshape(1, q_heads), seen,
            )  # fmt: skip
        return got

    def _attend_cold(
        self, query: Floats, pool: PoolView, layer: int, scale: Scale, arrays: Arrays,
        token_mass: NDArray[np.float32] | None, cold: Cold, seen: ColdSeen | None, out: Floats, log_sum_exp: Floats,
    ) -> None:  # fmt: skip
        """Estimate and read the rows' cold pages; `out` and `log_sum_exp` hold what lies in HBM, and get the rest."""
        scratch = self._memory.cold
        hbm_log = log_sum_exp.copy()
        choice = look(scratch, query, pool, cold, layer, scale, hbm_log, 1, seen)
        read(scratch, arrays, query, cold, choice, layer, scale, token_mass, out, log_sum_exp)
        audit(scratch, arrays, query, cold, layer, scale, hbm_log, log_sum_exp, seen)


def _blocks(view: LayerView, geometry: Geometry, pages: Pages) -> Iterator[Block]:
    """The pages' keys and values, a bounded number of tokens at a time."""
    step = max(1, BLOCK_TOKENS // geometry.page_tokens)
    for first in range(0, len(pages.offsets), step):
        part = slice(first, first + step)
        counts = pages.counts[part]
        places = np.cumsum(counts, dtype=np.int64) - counts
        total = int(counts.sum())
        keys = np.empty((geometry.num_kv_heads, total, geometry.head_dim), np.float32)
        values = np.empty_like(keys)
        read_block(
            *view, geometry.num_kv_heads, geometry.page_tokens,
            pages.offsets[part], pages.kinds[part], counts, places, thread_count(), keys, values,
        )  # fmt: skip
        tokens = np.repeat(pages.token_starts[part] - places, counts) + np.arange(total, dtype=np.int64)
        yield Block(torch.from_numpy(keys), torch.from_numpy(values), torch.from_numpy(tokens))


def _float32(scale: Scale) -> Scale:
    """As the kernels are compiled for it."""
    return Scale(*(np.float32(number) for number in scale))  # type: ignore[arg-type]


def _floats(tensor: torch.Tensor) -> Floats:
    """Contiguous float32 of any float tensor; no copy if it is that already."""
    floats: Floats = tensor.detach().to(torch.float32).contiguous().numpy()
    return floats
