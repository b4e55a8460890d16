"""Keys in a few bits each, to be asked and never attended: the page's keys as one block, coded by a transform that is
fitted to the model's keys and queries.

**Transform.** An error `e` of a key moves a logit by `q.e`, and so costs `e^T M e`, `M` the second moment of queries.
In that metric keys have the covariance `M^1/2 S M^1/2 = U L U^T`; along U they are uncorrelated, and queries take the
inverse way (`axes`). Along a page's tokens a cosine transform follows: neighbours are alike, so the first of its 16
coefficients, the mean, holds most of the variance. The slots behind a page's last token repeat its mean.

**Bits.** The coefficients of a page, tokens times dimensions, get `bits` 0 to 5, one after the other to where it
reduces the error most ("reverse water-filling", Cover and Thomas, ch. 10). Codes are Lloyd's and Max's for a Gaussian
of the coefficient's variance (`tierkv.quant.klt_levels`). All but the page's mean are first divided by the page's
*gain*: pages differ much in how far their tokens lie apart, and that is what decides which one holds a large logit.

**Reading.** The query is turned once a head; its products with a page's codes, turned back along the tokens, are the
logits. What codes lack is known on average (`DISTORTIONS`) and taken for normal noise on the logits
(`estimators.rise`).

A record is the gain, a byte (`exp((byte - 128) / 8)`; 255: the record tells nothing), then, from the lowest bit of the
next byte on and without gaps, the codes of the coefficients that have bits, token by token. A code is its magnitude's
index, and in its top bit the sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.prefetch.estimators import Bytes, Counts, Doubles, Floats, filled, rise, told
from tierkv.prefetch.summaries import means
from tierkv.quant.klt_levels import BOUNDARIES, DISTORTIONS, LEVELS, STEPS
from tierkv.quant.moments import KeyTransform

GAINS = 8
"""Gains of a factor e."""

MIDDLE, NOTHING = 128, 255
"""The byte of gain 1, and of a record that tells nothing."""

GAIN: Floats = np.exp((np.arange(256, dtype=np.float32) - MIDDLE) / GAINS)
"""By a record's first byte."""

TINY = float(np.finfo(np.float32).tiny)

FLOOR = 1e-6
"""Of the largest eigenvalue: below it a direction counts as this large, so that matrices have inverses."""

EVEN = 0.02
"""Part of the metric that is the same for every direction: queries of the texts that it was fitted on are few."""


class Sample(NamedTuple):
    """What one text shows of a model, L layers and H KV heads."""

    keys: Floats  # [L, H, pages, page_tokens, D]
    counts: Counts  # [pages]
    queries: Floats  # [L, H, queries of the head's group, D]


State = KeyTransform
"""Of a model; the same for records of every length but for `bits`."""


def cosines(size: int) -> Doubles:
    """`[size, size]`: orthonormal, row `k` is the k-th cosine (Ahmed, Natarajan and Rao 1974, type II)."""
    order, at = np.arange(size)[:, None], np.arange(size)
    matrix: Doubles = np.cos(np.pi * (at + 0.5) * order / size) * np.sqrt(2 / size)
    matrix[0] /= np.sqrt(2)
    return matrix


class KeySums:
    """What a fit needs to know of one layer's heads, summed over texts: float64 of H KV heads."""

    def __init__(self, heads: int, page_tokens: int, dim: int) -> None:
        self.pages = 0
        self.keys = np.zeros((heads, dim))  # over slots
        self.rows = np.zeros((heads, page_tokens, dim, dim))  # second moments of cosine coefficients

    def add(self, keys: Floats, counts: Counts) -> None:
        """One text: keys `[H, pages, page_tokens, D]`, counts `[pages]`."""
        whole = _whole(keys, counts).astype(np.float64)
        rows = np.swapaxes(cosines(keys.shape[2]) @ whole, 1, 2)  # [H, page_tokens, pages, D]
        self.pages += keys.shape[1]
        self.keys += whole.sum((1, 2))
        self.rows += _second(rows)


def fit(samples: Sequence[Sample]) -> State:
    """From at least one text. A text counts as much as it has pages, queries of all texts the same."""
    layers, heads, _, page_tokens, dim = samples[0].keys.shape
    sums = [KeySums(heads, page_tokens, dim) for _ in range(layers)]
    for one in samples:
        for layer, held in enumerate(sums):
            held.add(one.keys[layer], one.counts)
    return solve(sums, np.sum([_second(one.queries) / one.queries.shape[2] for one in samples], 0))


def solve(sums: Sequence[KeySums], asked: Floats | Doubles) -> State:
    """The state of as many layers, which have seen the same pages, at least one; all heads count the same.

    Args:
        asked: `[L, H, D, D]`, second moment of queries; its size does not matter.
    """
    pages, rows = sums[0].pages, np.stack([one.rows for one in sums])
    page_tokens, dim = rows.shape[2:4]
    mean = np.stack([one.keys for one in sums]) / (pages * page_tokens)
    rows = rows / pages
    rows[:, :, 0] -= page_tokens * mean[..., :, None] * mean[..., None, :]  # the other cosines see no mean
    level = np.trace(asked, axis1=-2, axis2=-1)[..., None, None] / dim
    root, inverse = _root(
        np.where(level > 0, asked, np.eye(dim)) / np.where(level > 0, level, 1.0) + EVEN * np.eye(dim)
    )
    _, vectors = np.linalg.eigh(root @ rows.mean(2) @ root)
    vectors = vectors[..., ::-1]
    analysis = root @ vectors
    variance = np.einsum("lhki,lhtkj,lhji->lhti", analysis, rows, analysis, optimize=True)
    return State(
        mean.astype(np.float32),
        analysis.astype(np.float32),
        (inverse @ vectors).astype(np.float32),
        np.maximum(variance, np.finfo(np.float32).tiny).astype(np.float32),
        np.ones(mean.shape[:2], np.float32),
    )


def coefficients(state: State, keys: Floats, counts: Counts) -> Floats:
    """`[L, H, pages, page_tokens, D]`: along the tokens, then along the axes."""
    off = _whole(keys, counts) - state.mean[:, :, None, None]
    turned = off @ state.analysis[:, :, None]
    return np.asarray(cosines(keys.shape[3]).astype(np.float32) @ turned, np.float32)


def shared_bits(variance: Floats, total: int) -> NDArray[np.int64]:
    """Bits of the coefficients `[L, H, page_tokens, D]`, `total` in each head: as many as reduce its error most."""
    gains = -np.diff(np.array(DISTORTIONS)) * variance[..., None].astype(np.float64)
    flat = gains.reshape(*variance.shape[:2], -1)
    total = min(total, flat.shape[-1])
    chosen = np.zeros(flat.shape, np.int64)
    np.put_along_axis(chosen, np.argsort(-flat, -1, kind="stable")[..., :total], 1, -1)
    bits: NDArray[np.int64] = chosen.reshape(gains.shape).sum(-1)
    return bits


class Transform:
    """Records of `size` bytes of the state's layers and heads: leading dimensions are always `[L, H]`.

    Attributes:
        bits: `[L, H, page_tokens, D]` int64.
        lost: `[L, H, D]`, what codes lack of a token, where the gain is 1.
    """

    bounds = False

    def __init__(self, state: State, size: int) -> None:
        self.state, self._size = state, size
        self.bits = shared_bits(state.variance, 8 * (size - 1))
        distortion = np.array(DISTORTIONS)[self.bits] * state.variance
        self.lost: Floats = distortion.mean(2).astype(np.float32)

    @property
    def name(self) -> str:
        return f"transform-{self._size}"

    def nbytes(self, dim: int) -> int:
        return self._size

    def summarize(self, keys: Floats, counts: Counts) -> Bytes:
        with np.errstate(invalid="ignore", over="ignore"):
            found = coefficients(self.state, keys, counts)
        finite = np.asarray(np.isfinite(found).all((-1, -2)))
        found = np.where(finite[..., None, None], found, np.float32(0))
        variance = self.state.variance[:, :, None]
        spread = np.square(found[..., 1:, :], dtype=np.float64).sum((-1, -2))
        usual = variance[..., 1:, :].sum((-1, -2), dtype=np.float64)
        gain = np.sqrt(np.maximum(spread, np.finfo(np.float64).tiny) / np.maximum(usual, TINY))
        code = np.clip(np.rint(GAINS * np.log(gain)) + MIDDLE, 0, NOTHING - 1).astype(np.int64)
        with np.errstate(over="ignore"):
            unit: Floats = np.asarray(found / np.sqrt(variance), np.float32)
        unit[..., 1:, :] /= GAIN[code][..., None, None]
        records = np.zeros((*keys.shape[:3], self._size), np.uint8)
        records[..., 0] = np.where(finite, code, NOTHING)
        for head in np.ndindex(*keys.shape[:2]):
            bits = self.bits[head].ravel()
            which, shift = _places(bits)
            codes = _codes(unit[head].reshape(len(counts), -1), bits)
            packed = np.packbits(((codes[:, which] >> shift) & 1).astype(np.uint8), -1, bitorder="little")
            records[head][:, 1 : 1 + packed.shape[1]] = packed
        return records

    def log_mass(
        self, query: Floats, records: Bytes, counts: Counts, scale: float, cap: float = 0.0
    ) -> Floats:
        """With a `cap`, of logits `cap * tanh(logit / cap)`: bent token by token. What codes lack is then taken to
        count as much as the slope at the tokens' log-mean does, and to lift no page above `cap`.
        """
        out = np.empty((*query.shape[:3], len(counts)), np.float32)
        for head in np.ndindex(*query.shape[:2]):
            out[head] = self.log_mass_of(head, query[head], records[head], counts, scale, cap)
        return told(out)

    def log_mass_of(
        self,
        head: tuple[int, ...],
        query: Floats,
        records: Bytes,
        counts: Counts,
        scale: float,
        cap: float = 0.0,
    ) -> Floats:
        """`[queries, pages]` of one head; may be NaN where nothing is told."""
        state, slots = self.state, self.state.variance.shape[2]
        keys = self._decode(head, records)  # [pages, page_tokens, D]
        turned = query @ state.axes[head]
        common = query @ state.mean[head][:, None]
        logits = np.float32(scale) * (common + turned @ keys.reshape(-1, keys.shape[-1]).T)
        logits = logits.reshape(len(query), len(counts), slots)
        if cap:
            logits = np.float32(cap) * np.tanh(logits / np.float32(cap))
        logits = np.where(np.arange(slots) < counts[:, None], logits, np.float32(-np.inf))
        top = logits.max(-1)
        level = top + np.log(np.exp(logits - top[..., None]).mean(-1) * np.float32(slots) / counts)
        noise = np.float32(scale**2) * (turned**2 @ self.lost[head])[:, None]
        noise = noise * GAIN[records[:, 0]] ** 2
        if cap:
            noise = noise * (1 - (level / np.float32(cap)) ** 2) ** 2
        above = rise(noise, counts)
        if cap:
            above = np.minimum(above, np.float32(cap) - level)
        known = np.log(counts.astype(np.float32)) + level + above
        return np.where(records[:, 0] == NOTHING, np.float32(-np.inf), known)

    def _decode(self, head: tuple[int, ...], records: Bytes) -> Floats:
        """Keys along the axes, without the mean."""
        bits = self.bits[head]
        unit = _values(unpacked(records[:, 1:], bits.ravel()), bits.ravel()).reshape(-1, *bits.shape)
        unit[:, 1:] *= GAIN[records[:, 0]][:, None, None]
        turned = unit * np.sqrt(self.state.variance[head])
        return np.asarray(cosines(bits.shape[0]).astype(np.float32).T @ turned, np.float32)


def unpacked(packed: Bytes, bits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Codes `[pages, coefficients]`, 0 where there are no bits."""
    which, shift = _places(bits)
    planes = np.unpackbits(packed, axis=-1, bitorder="little")[:, : len(which)].astype(np.int64) << shift
    codes = np.zeros((len(packed), len(bits)), np.int64)
    starts = np.flatnonzero(shift == 0)
    if len(starts):
        codes[:, which[starts]] = np.add.reduceat(planes, starts, axis=1)
    return codes


def _places(bits: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each bit of a record's codes: which coefficient it is of, and where in its code it stands."""
    which = np.repeat(np.arange(len(bits)), bits)
    first = np.cumsum(bits) - bits
    return which, np.arange(len(which)) - first[which]


def _whole(keys: Floats, counts: Counts) -> Floats:
    """The keys, with their mean in slots that hold no token."""
    slots = filled(keys, counts)[..., None]
    return np.where(slots, keys, means(keys, counts)[..., None, :].astype(np.float32))


def _second(vectors: Floats | Doubles) -> Doubles:
    """`[..., n, D]` to `[..., D, D]`."""
    wide = vectors.astype(np.float64)
    return np.asarray(np.swapaxes(wide, -1, -2) @ wide, np.float64)


def _root(metric: Doubles) -> tuple[Doubles, Doubles]:
    """The square root of a positive matrix, and its inverse."""
    values, vectors = np.linalg.eigh(metric)
    root = np.sqrt(np.maximum(values, values[..., -1:] * FLOOR))[..., None, :]
    turned = np.swapaxes(vectors, -1, -2)
    return (vectors * root) @ turned, (vectors / root) @ turned


def _codes(unit: Floats, bits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of `[pages, coefficients]` of unit variance."""
    codes = np.zeros(unit.shape, np.int64)
    for width in range(1, len(DISTORTIONS)):
        which = bits == width
        size, half = np.abs(unit[:, which]), 1 << (width - 1)
        if width in STEPS:
            index = np.minimum(size / STEPS[width], half - 1).astype(np.int64)
        else:
            index = np.searchsorted(BOUNDARIES[width], size, side="right")
        codes[:, which] = index + half * (unit[:, which] < 0)
    return codes


def _values(codes: NDArray[np.int64], bits: NDArray[np.int64]) -> Floats:
    """What codes stand for."""
    values = np.zeros(codes.shape, np.float32)
    for width in range(1, len(DISTORTIONS)):
        which, half = bits == width, 1 << (width - 1)
        own = codes[:, which]
        values[:, which] = np.where(own >= half, -1, 1) * LEVELS[width][own % half]
    return values


__all__ = ["Sample", "State", "Transform", "fit"]
