"""Estimators: what a page may leave in HBM, and what a query reads from that. One contract, in plain numpy.

An estimator makes of the keys of a page, for each layer and KV head on its own, a *record* of `nbytes` bytes, and from
a record the page's log-mass for a query: the log of the sum over its tokens of the exponentials of `scale * q.k`.
Arrays have leading dimensions `...`, layers and heads for instance, that are the same in all arguments.

    keys      [..., pages, page_tokens, dim]  float32; what lies behind a page's last token counts for nothing
    counts    [pages]                         tokens of each page, at least 1
    records   [..., pages, nbytes]            uint8
    query     [..., queries, dim]             float32
    log_mass  [..., queries, pages]           float32; minus infinity where a record tells nothing

A record tells nothing where a key is NaN or infinite. Scales are float16 in every record: a vector of which the
largest number is beyond what they hold (65504 times the largest code) tells nothing either.

What a record holds is in `tierkv.prefetch.summaries`, `tierkv.prefetch.transform` and, for what the daemon writes and
attention reads, `tierkv.prefetch.digests`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Counts = NDArray[np.int64]


class Estimator(Protocol):
    """See the module (tests: `tests/contract/test_estimators.py`)."""

    @property
    def name(self) -> str: ...

    @property
    def bounds(self) -> bool:
        """Whether no page has more than its log-mass."""
        ...

    def nbytes(self, dim: int) -> int:
        """Of a record."""
        ...

    def summarize(self, keys: Floats, counts: Counts) -> Bytes: ...

    def log_mass(self, query: Floats, records: Bytes, counts: Counts, scale: float) -> Floats: ...


def cumulant(mean: Floats, variance: Floats, counts: Counts) -> Floats:
    """Log-mass of `counts` normal logits: `tierkv.prefetch.digests`, second cumulant or random-energy form.

    `mean` and `variance` are `[..., pages]`.
    """
    log_counts = np.log(counts.astype(np.float32))
    return np.asarray(log_counts + mean + rise(variance, counts), np.float32)


def rise(variance: Floats, counts: Counts) -> Floats:
    """What normal logits of that variance have above their mean, `[..., pages]`."""
    a = np.sqrt(2 * np.log(counts.astype(np.float32)))
    sigma = np.sqrt(variance)
    return np.asarray(np.where(sigma <= a, variance / 2, a * sigma - a * a / 2), np.float32)


def filled(keys: Floats, counts: Counts) -> NDArray[np.bool_]:
    """`[pages, page_tokens]`: slots that hold a token."""
    return np.arange(keys.shape[-2]) < counts[:, None]


def told(log_mass: Floats) -> Floats:
    """Minus infinity where it is not finite."""
    return np.where(np.isfinite(log_mass), log_mass, np.float32(-np.inf))


def pack(codes: NDArray[np.int64], bits: int) -> Bytes:
    """`[..., n]` codes 0..2**bits - 1 as `[..., bytes]`; the first one lies in the lowest bits."""
    if bits == 8:
        return codes.astype(np.uint8)
    planes = (codes[..., None] >> np.arange(bits)) & 1
    return np.packbits(planes.reshape(*codes.shape[:-1], -1).astype(np.uint8), axis=-1, bitorder="little")


def unpack(packed: Bytes, bits: int, count: int) -> NDArray[np.int64]:
    """The first `count` codes of what `pack` gave."""
    if bits == 8:
        return packed[..., :count].astype(np.int64)
    planes = np.unpackbits(packed, axis=-1, bitorder="little")[..., : count * bits]
    return planes.reshape(*packed.shape[:-1], count, bits).astype(np.int64) @ (1 << np.arange(bits))


def scale_bytes(scales: NDArray[np.float16]) -> Bytes:
    """`[...]` as `[..., 2]`."""
    return np.ascontiguousarray(scales)[..., None].view(np.uint8)


def scales_of(packed: Bytes) -> Floats:
    """`[..., 2]` as `[..., 1]`, so that they multiply vectors."""
    return np.ascontiguousarray(packed).view(np.float16).astype(np.float32)


__all__ = ["Bytes", "Counts", "Doubles", "Estimator", "Floats", "cumulant", "rise"]
