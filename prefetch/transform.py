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

A record is the gain, a byte (`exp((byte - 128) / 8)`; 255: the record tells nothing), then bit planes, lowest first:
plane `b` holds, least significant bit first, bit `b` of the coefficients that have more than `b` bits, in order. A code
is its magnitude's index, and in its top bit the sign.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.prefetch.estimators import Bytes, Counts, Doubles, Floats, filled, rise, told
from tierkv.prefetch.summaries import means
from tierkv.quant.klt_levels import BOUNDARIES, DISTORTIONS, LEVELS, STEPS

GAINS = 8
"""Gains of a factor e."""

MIDDLE, NOTHING = 128, 255
"""The byte of gain 1, and of a record that tells nothing."""

FLOOR = 1e-6
"""Of the largest eigenvalue: below it a direction counts as this large, so that matrices have inverses."""

EVEN = 0.02
"""Part of the metric that is the same for every direction: queries of the texts that it was fitted on are few."""


class Sample(NamedTuple):
    """What one text shows of a model, L layers and H KV heads."""

    keys: Floats  # [L, H, pages, page_tokens, D]
    counts: Counts  # [pages]
    queries: Floats  # [L, H, queries of the head's group, D]


class State(NamedTuple):
    """Of a model; the same for records of every length but for `bits`."""

    mean: Floats  # [L, H, D]
    analysis: Floats  # [L, H, D, D]: (key - mean) @ analysis are coefficients
    axes: Floats  # [L, H, D, D]: query @ axes takes coefficients
    variance: Floats  # [L, H, page_tokens, D]


def cosines(size: int) -> Doubles:
    """`[size, size]`: orthonormal, row `k` is the k-th cosine (Ahmed, Natarajan and Rao 1974, type II)."""
    order, at = np.arange(size)[:, None], np.arange(size)
    matrix: Doubles = np.cos(np.pi * (at + 0.5) * order / size) * np.sqrt(2 / size)
    matrix[0] /= np.sqrt(2)
    return matrix


def fit(samples: Sequence[Sample]) -> State:
    """From at least one text. A text counts as much as it has pages, queries of all texts the same."""
    tokens = sum(sample.keys.shape[2] * sample.keys.shape[3] for sample in samples)
    pages = sum(sample.keys.shape[2] for sample in samples)
    mean = _total(_whole(one.keys, one.counts).sum((2, 3), dtype=np.float64) for one in samples) / tokens
    asked = _total(_second(one.queries) / one.queries.shape[2] for one in samples)
    dim = mean.shape[-1]
    level = np.trace(asked, axis1=-2, axis2=-1)[..., None, None] / dim
    root, inverse = _root(
        np.where(level > 0, asked, 1.0) / np.where(level > 0, level, 1.0) + EVEN * np.eye(dim)
    )
    covariance = _total(_about(mean, one) for one in samples)
    _, vectors = np.linalg.eigh(root @ (covariance / tokens) @ root)
    vectors = vectors[..., ::-1]
    state = State(
        mean.astype(np.float32),
        (root @ vectors).astype(np.float32),
        (inverse @ vectors).astype(np.float32),
        np.zeros((*mean.shape[:2], samples[0].keys.shape[3], dim), np.float32),
    )
    squares = (coefficients(state, one.keys, one.counts) ** 2 for one in samples)
    variance = _total(one.sum(2, dtype=np.float64) for one in squares) / pages
    return state._replace(variance=np.maximum(variance, np.finfo(np.float32).tiny).astype(np.float32))


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
    """Records of `size` bytes of the state's layers and heads: leading dimensions are always `[L, H]`."""

    bounds = False

    def __init__(self, state: State, size: int) -> None:
        self._state, self._size = state, size
        self._bits = shared_bits(state.variance, 8 * (size - 1))
        distortion = np.array(DISTORTIONS)[self._bits] * state.variance
        self._lost = distortion.mean(2).astype(np.float32)  # [L, H, D], of a token
        weight = state.variance[:, :, 1:]
        self._weight = weight / weight.sum((2, 3), keepdims=True)

    @property
    def name(self) -> str:
        return f"transform-{self._size}"

    def nbytes(self, dim: int) -> int:
        return self._size

    def summarize(self, keys: Floats, counts: Counts) -> Bytes:
        with np.errstate(invalid="ignore", over="ignore"):
            found = coefficients(self._state, keys, counts)
        finite = np.asarray(np.isfinite(found).all((-1, -2)))
        unit: Floats = np.where(finite[..., None, None], found, np.float32(0))
        unit /= np.sqrt(self._state.variance)[:, :, None]
        gain = np.sqrt((unit[..., 1:, :] ** 2 * self._weight[:, :, None]).sum((-1, -2)))
        code = np.rint(GAINS * np.log(np.maximum(gain, np.finfo(np.float32).tiny))) + MIDDLE
        code = np.clip(code, 0, NOTHING - 1).astype(np.int64)
        unit[..., 1:, :] /= _gain(code)[..., None, None]
        records = np.zeros((*keys.shape[:3], self._size), np.uint8)
        records[..., 0] = np.where(finite, code, NOTHING)
        for head in np.ndindex(*keys.shape[:2]):
            bits = self._bits[head].ravel()
            codes = _codes(unit[head].reshape(len(counts), -1), bits)
            planes = [(codes[:, bits > plane] >> plane) & 1 for plane in range(bits.max(initial=0))]
            if planes:
                packed = np.packbits(np.concatenate(planes, -1).astype(np.uint8), axis=-1, bitorder="little")
                records[head][:, 1 : 1 + packed.shape[1]] = packed
        return records

    def log_mass(self, query: Floats, records: Bytes, counts: Counts, scale: float) -> Floats:
        out = np.empty((*query.shape[:3], len(counts)), np.float32)
        for head in np.ndindex(*query.shape[:2]):
            out[head] = self._log_mass(head, query[head], records[head], counts, scale)
        return told(out)

    def _log_mass(
        self, head: tuple[int, ...], query: Floats, records: Bytes, counts: Counts, scale: float
    ) -> Floats:
        """`[queries, pages]` of one head."""
        state, slots = self._state, self._state.variance.shape[2]
        keys = self._decode(head, records)  # [pages, page_tokens, D]
        turned = query @ state.axes[head]
        common = query @ state.mean[head][:, None]
        logits = np.float32(scale) * (common + turned @ keys.reshape(-1, keys.shape[-1]).T)
        logits = logits.reshape(len(query), len(counts), slots)
        logits = np.where(np.arange(slots) < counts[:, None], logits, np.float32(-np.inf))
        top = logits.max(-1)
        known = top + np.log(np.exp(logits - top[..., None]).sum(-1))
        noise = np.float32(scale**2) * (turned**2 @ self._lost[head])[:, None]
        noise = noise * _gain(records[:, 0].astype(np.int64)) ** 2
        return np.where(records[:, 0] == NOTHING, np.float32(-np.inf), known + rise(noise, counts))

    def _decode(self, head: tuple[int, ...], records: Bytes) -> Floats:
        """Keys along the axes, without the mean."""
        bits = self._bits[head]
        flat, planes = bits.ravel(), np.unpackbits(records[:, 1:], axis=-1, bitorder="little")
        codes, at = np.zeros((len(records), flat.size), np.int64), 0
        for plane in range(flat.max(initial=0)):
            which = flat > plane
            codes[:, which] |= planes[:, at : at + which.sum()].astype(np.int64) << plane
            at += which.sum()
        unit = _values(codes, flat).reshape(-1, *bits.shape)
        unit[:, 1:] *= _gain(records[:, 0].astype(np.int64))[:, None, None]
        turned = unit * np.sqrt(self._state.variance[head])
        return np.asarray(cosines(bits.shape[0]).astype(np.float32).T @ turned, np.float32)


def _whole(keys: Floats, counts: Counts) -> Floats:
    """The keys, with their mean in slots that hold no token."""
    slots = filled(keys, counts)[..., None]
    return np.where(slots, keys, means(keys, counts)[..., None, :].astype(np.float32))


def _total(parts: Iterable[Doubles]) -> Doubles:
    return np.asarray(sum(parts), np.float64)


def _about(mean: Doubles, one: Sample) -> Doubles:
    """Second moment of the text's keys about `mean`, `[L, H, D, D]`, summed over slots."""
    off = _whole(one.keys, one.counts) - mean[:, :, None, None].astype(np.float32)
    return _second(off.reshape(*off.shape[:2], -1, off.shape[-1]))


def _second(vectors: Floats) -> Doubles:
    """`[..., n, D]` to `[..., D, D]`."""
    wide = vectors.astype(np.float64)
    return np.asarray(np.swapaxes(wide, -1, -2) @ wide, np.float64)


def _root(metric: Doubles) -> tuple[Doubles, Doubles]:
    """The square root of a positive matrix, and its inverse."""
    values, vectors = np.linalg.eigh(metric)
    root = np.sqrt(np.maximum(values, values[..., -1:] * FLOOR))[..., None, :]
    turned = np.swapaxes(vectors, -1, -2)
    return (vectors * root) @ turned, (vectors / root) @ turned


def _gain(code: NDArray[np.int64]) -> Floats:
    return np.exp((code.astype(np.float32) - MIDDLE) / GAINS)


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
