"""Estimators that keep one or two vectors a page, or of each of several parts of it: centroids, boxes, deviations.

A vector's numbers are codes of 8, 6 or 4 bits with one float16 scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierkv.prefetch.estimators import (
    Bytes,
    Counts,
    Doubles,
    Floats,
    cumulant,
    filled,
    pack,
    scale_bytes,
    scales_of,
    told,
    unpack,
)

SCALE_BYTES = 2


@dataclass(frozen=True)
class Vector:
    """A vector of `dim` numbers: a float16 scale, then whole multiples of it in `bits` bits each."""

    bits: int
    signed: bool

    @property
    def most(self) -> int:
        """The largest code."""
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 1

    def nbytes(self, dim: int) -> int:
        return SCALE_BYTES + -(-dim * self.bits // 8)

    def write(self, values: Doubles, up: bool = False) -> Bytes:
        """`[..., dim]` to the nearest code, or `up` to one whose multiple is no less."""
        scales = _scales(np.abs(values).max(-1) / self.most, up)
        step = scales.astype(np.float64)[..., None]
        known = np.isfinite(step) & (step > 0)
        ratio = np.where(known, values, 0.0) / np.where(known, step, 1.0)
        codes = np.clip(np.ceil(ratio) if up else np.rint(ratio), -self.most if self.signed else 0, self.most)
        shifted = codes.astype(np.int64) + (self.most if self.signed else 0)
        return np.concatenate([scale_bytes(scales), pack(shifted, self.bits)], -1)

    def read(self, packed: Bytes, dim: int) -> Floats:
        codes = unpack(packed[..., SCALE_BYTES:], self.bits, dim) - (self.most if self.signed else 0)
        return scales_of(packed[..., :SCALE_BYTES]) * codes.astype(np.float32)


def _scales(wanted: Doubles, up: bool) -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
    """float16, NaN where they are out of range; `up`: none is less than wanted."""
    with np.errstate(over="ignore", invalid="ignore"):
        scales = wanted.astype(np.float16)
        if up:
            scales = np.where(scales < wanted, np.nextafter(scales, np.float16(np.inf)), scales)
    return np.where(np.isfinite(scales), scales, np.float16(np.nan))


@dataclass(frozen=True)
class Centroid:
    """The mean key: every token is taken for it."""

    bits: int
    bounds: bool = False

    @property
    def name(self) -> str:
        return f"centroid-{self.bits}"

    @property
    def _vector(self) -> Vector:
        return Vector(self.bits, True)

    def nbytes(self, dim: int) -> int:
        return self._vector.nbytes(dim)

    def summarize(self, keys: Floats, counts: Counts) -> Bytes:
        return self._vector.write(means(keys, counts))

    def log_mass(self, query: Floats, records: Bytes, counts: Counts, scale: float) -> Floats:
        mean = self._vector.read(records, query.shape[-1])
        return told(_along(query, mean) * np.float32(scale) + np.log(counts.astype(np.float32)))


@dataclass(frozen=True)
class Box:
    """Middle and half-width of a box, read at its best corner for the query, where each of the n tokens is taken to be.

    max   the smallest box around the keys, rounded outward: a bound (Tang et al. 2024, "Quest: Query-aware sparsity for
          efficient long-context LLM inference")
    mean  mean and mean absolute deviation (Chen et al. 2024, "ArkVale: Efficient generative LLM inference with
          recallable key-value eviction")
    """

    kind: str
    bits: int

    @property
    def name(self) -> str:
        return f"cuboid-{self.kind}-{self.bits}"

    @property
    def bounds(self) -> bool:
        return self.kind == "max"

    @property
    def _middle(self) -> Vector:
        return Vector(self.bits, True)

    @property
    def _half(self) -> Vector:
        return Vector(self.bits, False)

    def nbytes(self, dim: int) -> int:
        return self._middle.nbytes(dim) + self._half.nbytes(dim)

    def summarize(self, keys: Floats, counts: Counts) -> Bytes:
        slots, dim = filled(keys, counts)[..., None], keys.shape[-1]
        if not self.bounds:
            mean = means(keys, counts)
            with np.errstate(invalid="ignore"):
                off = np.where(slots, np.abs(keys - mean[..., None, :]), 0.0).sum(-2) / counts[:, None]
            return np.concatenate([self._middle.write(mean), self._half.write(off)], -1)
        top = np.where(slots, keys, -np.inf).max(-2).astype(np.float64)
        bottom = np.where(slots, keys, np.inf).min(-2).astype(np.float64)
        middle = self._middle.write(top / 2 + bottom / 2)
        at = self._middle.read(middle, dim).astype(np.float64)
        return np.concatenate([middle, self._half.write(np.maximum(top - at, at - bottom), up=True)], -1)

    def box(self, records: Bytes, dim: int) -> tuple[Floats, Floats]:
        """Middle and half-width, `[..., pages, dim]`."""
        size = self._middle.nbytes(dim)
        return self._middle.read(records[..., :size], dim), self._half.read(records[..., size:], dim)

    def log_mass(self, query: Floats, records: Bytes, counts: Counts, scale: float) -> Floats:
        middle, half = self.box(records, query.shape[-1])
        corner = _along(query, middle) * np.float32(scale) + _along(np.abs(query), half) * np.float32(
            abs(scale)
        )
        return told(corner + np.log(counts.astype(np.float32)))


@dataclass(frozen=True)
class Deviation:
    """Mean and standard deviation of the keys, read as those of normal logits: `tierkv.prefetch.digests` at other
    widths. `parts` runs of a page's slots have a mean each; the deviation is of all tokens from their part's mean.
    """

    mean_bits: int
    bits: int
    parts: int = 1
    bounds: bool = False

    @property
    def name(self) -> str:
        name = f"deviation-{self.mean_bits}-{self.bits}"
        return name if self.parts == 1 else f"{name}-x{self.parts}"

    @property
    def _mean(self) -> Vector:
        return Vector(self.mean_bits, True)

    @property
    def _deviation(self) -> Vector:
        return Vector(self.bits, False)

    def nbytes(self, dim: int) -> int:
        return self.parts * self._mean.nbytes(dim) + self._deviation.nbytes(dim)

    def summarize(self, keys: Floats, counts: Counts) -> Bytes:
        size = keys.shape[-2] // self.parts
        squares, written = np.zeros((*keys.shape[:-2], keys.shape[-1])), []
        for part in range(self.parts):
            own, count = keys[..., part * size : (part + 1) * size, :], self._counts(counts, part, size)
            mean = np.where(count[:, None] > 0, means(own, np.maximum(count, 1)), 0.0)
            with np.errstate(invalid="ignore"):
                squares += (np.where(filled(own, count)[..., None], own - mean[..., None, :], 0.0) ** 2).sum(
                    -2
                )
            written.append(self._mean.write(mean))
        written.append(self._deviation.write(np.sqrt(squares / counts[:, None])))
        return np.concatenate(written, -1)

    def log_mass(self, query: Floats, records: Bytes, counts: Counts, scale: float) -> Floats:
        dim, each = query.shape[-1], self._mean.nbytes(query.shape[-1])
        deviation = self._deviation.read(records[..., self.parts * each :], dim)
        variance = _along(query**2, deviation**2) * np.float32(scale**2)
        size, logs = PAGE_SLOTS // self.parts, []
        for part in range(self.parts):
            mean = self._mean.read(records[..., part * each : (part + 1) * each], dim)
            count = counts if self.parts == 1 else self._counts(counts, part, size)
            found = cumulant(_along(query, mean) * np.float32(scale), variance, np.maximum(count, 1))
            logs.append(np.where(count > 0, found, -np.inf))
        with np.errstate(invalid="ignore"):
            return told(np.logaddexp.reduce(np.stack(logs), axis=0).astype(np.float32))

    @staticmethod
    def _counts(counts: Counts, part: int, size: int) -> Counts:
        return np.clip(counts - part * size, 0, size)


PAGE_SLOTS = 16
"""Of a page that is summarized in parts."""


def means(keys: Floats, counts: Counts) -> Doubles:
    """`[..., pages, dim]`."""
    slots = filled(keys, counts)[..., None]
    mean: Doubles = np.where(slots, keys, 0).sum(-2, dtype=np.float64) / counts[:, None]
    return mean


def _along(query: Floats, vectors: Floats) -> Floats:
    """Inner products `[..., queries, pages]`."""
    return np.asarray(query @ np.swapaxes(vectors, -1, -2), np.float32)
