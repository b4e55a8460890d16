"""Cold pages on CPU cores: what digests say of them, which are read in place, and the audit of both."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.attention.cold_kernels import add_read_mass, audit_pages, read_in_place
from tierkv.attention.contract import READ_ALL, Cold, ColdPages, ColdSeen, Pages, PoolView, Scale
from tierkv.attention.estimate_kernels import choose_pages, estimate_deviations
from tierkv.attention.layer_view import LayerView, LayerViews, unmarked
from tierkv.attention.online_softmax import Floats
from tierkv.attention.sums import array_of
from tierkv.attention.transform_kernels import estimate_transforms
from tierkv.numba_setup import thread_count
from tierkv.prefetch.transform_digests import TransformDigests

NOTHING = np.zeros(0, np.float32)

Arrays = tuple[Floats, Floats, Floats, Floats, Floats, Floats, Floats, Floats, NDArray[np.bool_]]
"""The working memory of `decode` (`cpu.Scratch.arrays`)."""


class Choice(NamedTuple):
    """Cold pages to read: pair `row * kv_heads + head` takes `pages[starts[pair]:starts[pair + 1]]`."""

    pages: NDArray[np.int64]  # [units]
    starts: NDArray[np.int64]  # [rows * kv_heads + 1]


class ColdScratch:
    """Working memory of one thread, and its views of the host pool.

    An array is made anew when its shape changes: pages come one in many steps.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, Floats] = {}
        self._everything: tuple[ColdPages, int, Choice] | None = None
        self._pools: tuple[PoolView, PoolView] | None = None
        self._views = LayerViews()

    def floats(self, name: str, *shape: int) -> Floats:
        """An array of that shape, of any content; valid until the next call of that name."""
        held = self._arrays.get(name)
        if held is None or held.shape != shape:
            held = self._arrays[name] = np.empty(shape, np.float32)
        return held

    def everything(self, pages: ColdPages, kv_heads: int) -> Choice:
        """Every page of a row for each of its KV heads; the same for all layers of a step."""
        if self._everything is None or self._everything[0] is not pages or self._everything[1] != kv_heads:
            self._everything = pages, kv_heads, _everything(pages.row_starts, kv_heads)
        return self._everything[2]

    def host(self, pool: PoolView, layer: int) -> LayerView:
        """A layer of the host pool, to be read."""
        if self._pools is None or self._pools[0] is not pool:
            self._pools = pool, pool._replace(data=unmarked(pool.data))
        return self._views.of(self._pools[1], layer)


def gather(pages: ColdPages, which: NDArray[np.int64]) -> Pages:
    """Some cold pages as the pages of one row."""
    counts = pages.counts[which]
    return Pages(
        pages.offsets[which], pages.kinds[which], counts, pages.token_starts[which],
        np.array([0, len(which)], np.int64), int(counts.sum()),
    )  # fmt: skip


def look(
    scratch: ColdScratch, query: Floats, pool: PoolView, cold: Cold, layer: int, scale: Scale, log_sum_exp: Floats,
    queries: int, seen: ColdSeen | None,
) -> Choice:  # fmt: skip
    """Estimate all cold pages, add to `seen.estimates`, and choose: nothing, at a layer without digests.

    Args:
        query: `[rows, q_heads * queries, head_dim]`, a head's queries next to each other.
        log_sum_exp: `[rows, q_heads * queries]` of what lies in HBM.
    """
    geometry, count = pool.geometry, len(cold.pages.offsets)
    rows, columns, dim = query.shape
    pairs = rows * geometry.num_kv_heads
    first_layer = geometry.num_layers - pool.digest_layers
    if cold.read == READ_ALL:
        if seen is not None:
            look(scratch, query, pool, cold._replace(read=0), layer, scale, log_sum_exp, queries, seen)
        return scratch.everything(cold.pages, geometry.num_kv_heads)
    starts = np.zeros(pairs + 1, np.int64)
    chosen = np.empty(pairs * cold.read, np.int64)
    if layer < first_layer or not count or (cold.read == 0 and seen is None):
        return Choice(chosen[:0], starts)
    digests, data = pool.digests, np.asarray(pool.data)
    assert digests is not None
    at = (layer - first_layer) * geometry.num_kv_heads * digests.shape.record_bytes
    estimates, wanted = (
        scratch.floats("estimates", columns, count),
        scratch.floats("wanted", geometry.num_kv_heads, count),
    )
    where = (data, cold.pages.digests, cold.pages.counts, cold.pages.row_starts, at)
    asking = (geometry.num_kv_heads, scale)
    if isinstance(digests, TransformDigests):
        estimate_transforms(
            query, *where, digests.shape.record_bytes, *asking, digests.layer(layer), thread_count(),
            scratch.floats("turned", rows, columns, dim), scratch.floats("common", rows, columns),
            scratch.floats("noise", rows, columns), estimates, wanted,
        )  # fmt: skip
    else:
        estimate_deviations(
            query, *where, *asking, scratch.floats("decoded", thread_count(), 2, dim), estimates, wanted
        )
    choose_pages(
        cold.pages.row_starts, geometry.num_kv_heads, digests.weights[layer - first_layer],
        log_sum_exp, queries, cold.read,
        estimates, scratch.floats("shares", columns, count), wanted,
        NOTHING if seen is None else array_of(seen.estimates), chosen, starts,
    )  # fmt: skip
    return Choice(chosen[: starts[-1]], starts)


def _everything(row_starts: NDArray[np.int64], kv_heads: int) -> Choice:
    """Every page of a row for each of its KV heads."""
    rows = [np.arange(first, last) for first, last in itertools.pairwise(row_starts.tolist())]
    pages = [row for row in rows for _ in range(kv_heads)]
    starts = np.concatenate(([0], np.cumsum([len(row) for row in pages]))).astype(np.int64)
    return Choice(np.concatenate([np.zeros(0, np.int64), *pages]), starts)


def read(
    scratch: ColdScratch, arrays: Arrays, query: Floats, cold: Cold, choice: Choice,
    layer: int, scale: Scale, token_mass: NDArray[np.float32] | None, out: Floats, log_sum_exp: Floats,
) -> None:  # fmt: skip
    """Attend the chosen pages in place and merge them into `out` and `log_sum_exp`; `arrays` as `decode` has them."""
    if not len(choice.pages):
        return
    geometry, view = cold.host.geometry, scratch.host(cold.host, layer)
    _, q_heads, dim = query.shape
    group = q_heads // geometry.num_kv_heads
    kept_units = 0 if token_mass is None else len(choice.pages)
    tops, totals = (scratch.floats(name, kept_units, q_heads) for name in ("page_tops", "page_totals"))
    kept = scratch.floats("kept", kept_units, q_heads, geometry.page_tokens)
    read_in_place(
        query, view.words, view.packed, view.is_bfloat16, view.code, view.state, view.middle,
        view.layer, view.num_layers, geometry.num_kv_heads, scale,
        cold.pages.offsets, cold.pages.kinds, cold.pages.counts, choice.pages, choice.starts,
        *arrays, tops, totals, kept,
        scratch.floats("part", group, dim), scratch.floats("part_log", group), out, log_sum_exp,
    )  # fmt: skip
    if token_mass is not None:
        add_read_mass(
            tops, kept, choice.pages, cold.pages.counts, choice.starts, cold.pages.token_starts, geometry.num_kv_heads,
            log_sum_exp, token_mass,
        )  # fmt: skip


def audit(
    scratch: ColdScratch, arrays: Arrays, query: Floats, cold: Cold, layer: int, scale: Scale,
    hbm_log: Floats, attended_log: Floats, seen: ColdSeen | None,
) -> None:  # fmt: skip
    """Add the true shares, if `seen` asks for them; `hbm_log`, `attended_log` `[rows, q_heads]`."""
    if not wants_audit(seen):
        return
    assert seen is not None
    page_rows, _, low_query, low_bias, *_ = arrays
    audit_pages(
        query, *scratch.host(cold.host, layer), cold.host.geometry.num_kv_heads, scale,
        cold.pages.offsets, cold.pages.kinds, cold.pages.counts, cold.pages.row_starts,
        page_rows, low_query, low_bias,
        scratch.floats("page_logs", len(cold.pages.offsets), query.shape[1]), hbm_log, attended_log,
        *(NOTHING if sums is None else array_of(sums) for sums in (seen.true, seen.attended)),
    )  # fmt: skip


def wants_audit(seen: ColdSeen | None) -> bool:
    return seen is not None and (seen.true is not None or seen.attended is not None)
