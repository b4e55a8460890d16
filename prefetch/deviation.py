"""Digests of means and deviations: the mean of a page's keys and how far they spread, dimension by dimension, in a byte
each. They need nothing to be known of a model.

A query `q` then tells the page's share of attention without its keys. If the page's logits `s q.k` over its `n` tokens
were normal, their mean would be `s q.mean` and their variance `sigma**2 = s**2 sum_d (q_d deviation_d)**2` (dimensions
taken as independent), and the page's log-mass, the log of the sum of the logits' exponentials, about

    log(n) + s q.mean + 1/2 sigma**2                  if sigma <= a, where a = sqrt(2 ln n)
    log(n) + s q.mean + a sigma - 1/2 a**2            if sigma > a

The first line is the second cumulant. The second is the random-energy model of Derrida (1981), "Random-energy model: An
exactly solvable model of disordered systems", Phys. Rev. B 24, 2613: among n tokens the largest logit lies about
`a sigma` above the mean, and where sigma is large it alone makes up the sum, which so cannot explode as sigma**2 does.
The lines and their slopes meet at sigma = a; one token (a = 0) gives its own logit.

A record:

    float32  mean_scale           mean[d] = mean_scale * mean code
    float32  deviation_scale      deviation[d] = deviation_scale * deviation code
    int8     mean[head_dim]       codes -127..127
    uint8    deviation[head_dim]  codes 0..255; the standard deviation over the page's tokens

Both scales are NaN if a key of the page's layer and head is NaN or infinite, or if the page has no token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.geometry import Geometry
from tierkv.numba_setup import kernel
from tierkv.prefetch.digests import Bytes, DigestShape, Doubles, Floats, Words, digest_shape
from tierkv.quant.floats import BFLOAT16, KIND, store_float, widen

SCALES_BYTES = 8
"""Two float32 lead each record."""

MEAN_CODES, DEVIATION_CODES = 127, 255
"""The largest codes."""


class Digest(NamedTuple):
    """A digest as numbers; NaN where a record tells nothing."""

    mean: NDArray[np.float32]  # [layers, kv_heads, head_dim]
    deviation: NDArray[np.float32]  # [layers, kv_heads, head_dim]


class DeviationForm:
    name = "deviation"

    def shape(self, geometry: Geometry, layers: int) -> DigestShape:
        return digest_shape(geometry, layers, SCALES_BYTES + 2 * geometry.head_dim)

    def state_floats(self, geometry: Geometry) -> int:
        return 0

    def of(self, geometry: Geometry, layers: int, state: Floats | None = None) -> DeviationDigests:
        return DeviationDigests(self.shape(geometry, layers))


DEVIATION = DeviationForm()


class DeviationDigests:
    """The kernel and the reference agree bit for bit."""

    def __init__(self, shape: DigestShape) -> None:
        self.shape = shape
        self.weights = np.ones((shape.layers, shape.geometry.num_kv_heads), np.float32)

    def write(self, exact: Bytes, count: int, out: Bytes) -> None:
        words, out = self.shape.checked(exact, count, out)
        write_kernel(words, KIND[self.shape.geometry.dtype] == BFLOAT16, self.shape.layers, count, out)

    def reference_write(self, exact: Bytes, count: int, out: Bytes) -> None:
        shape, heads, dim = self.shape, self.shape.geometry.num_kv_heads, self.shape.geometry.head_dim
        words, out = shape.checked(exact, count, out)
        keys = as_float64(words[-shape.layers :, 0, :, :count], shape.geometry.dtype)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            mean = sum((keys[:, :, t] for t in range(count)), np.zeros((shape.layers, heads, dim))) / count
            square = sum(((keys[:, :, t] - mean) ** 2 for t in range(count)), np.zeros_like(mean))
            deviation = np.sqrt(square / count)
            mean_scale = np.float32(np.abs(mean).max(-1) / MEAN_CODES)
            deviation_scale = np.float32(deviation.max(-1) / DEVIATION_CODES)
            finite = np.isfinite(mean).all(axis=-1, keepdims=True)
        out[:] = 0
        size = shape.record_bytes * shape.layers * heads
        records = out[:size].reshape(shape.layers, heads, shape.record_bytes)
        scales = np.where(finite, np.stack([mean_scale, deviation_scale], -1), np.float32(np.nan))
        records[..., :SCALES_BYTES] = scales.view(np.uint8)
        mean_codes = _codes(mean, scales[..., :1], MEAN_CODES).astype(np.int8)
        records[..., SCALES_BYTES : SCALES_BYTES + dim] = mean_codes.view(np.uint8)
        records[..., SCALES_BYTES + dim :] = _codes(deviation, scales[..., 1:], DEVIATION_CODES).astype(
            np.uint8
        )

    def read(self, digest: Bytes) -> Digest:
        """A digest's numbers."""
        shape, heads, dim = self.shape, self.shape.geometry.num_kv_heads, self.shape.geometry.head_dim
        size = shape.record_bytes * shape.layers * heads
        records = np.ascontiguousarray(digest[:size]).reshape(shape.layers, heads, shape.record_bytes)
        scales = np.ascontiguousarray(records[..., :SCALES_BYTES]).view(np.float32)
        mean = np.ascontiguousarray(records[..., SCALES_BYTES : SCALES_BYTES + dim]).view(np.int8)
        return Digest(scales[..., :1] * mean, scales[..., 1:] * records[..., SCALES_BYTES + dim :])

    def log_mass(
        self, digest: Bytes, layer: int, query: Doubles, count: int, scale: float, cap: float
    ) -> Doubles:
        at, numbers = layer - self.shape.first_layer, self.read(digest)
        mean, deviation = (part[at].astype(np.float64)[:, None] for part in numbers)
        means = (query * mean).sum(-1) * scale
        sigmas = np.sqrt(((query * deviation) ** 2).sum(-1)) * abs(scale)
        with np.errstate(invalid="ignore"):
            found = np.vectorize(log_mass, otypes=[np.float64])(means, sigmas, count, cap)
        return np.where(np.isfinite(found), found, -np.inf)


def log_mass(mean: float, sigma: float, count: int, cap: float = 0.0) -> float:
    """Estimated log of the sum of `count` exponentials of logits with that mean and standard deviation (see above).

    With a `cap` the logits are `cap * tanh(logit / cap)`: their mean is taken to be the capped mean, their deviation
    follows by the slope there, and none is above `cap`.
    """
    if count < 1:
        return -math.inf
    if cap > 0:
        bent = math.tanh(mean / cap)
        mean, sigma = cap * bent, sigma * (1.0 - bent * bent)
    a = math.sqrt(2.0 * math.log(count))
    above = 0.5 * sigma * sigma if sigma <= a else a * sigma - 0.5 * a * a
    if cap > 0:
        above = min(above, cap - mean)
    return math.log(count) + mean + above


def as_float64(words: Words, dtype: str) -> NDArray[np.float64]:
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.ascontiguousarray(words).view(dtype).astype(np.float64)


def _codes(values: NDArray[np.float64], scales: NDArray[np.float32], most: int) -> NDArray[np.float64]:
    """`values / scales` as whole numbers -most..most, 0 where a scale is 0 or NaN."""
    wide = scales.astype(np.float64)
    told = wide > 0.0
    return np.clip(np.rint(np.where(told, values, 0.0) / np.where(told, wide, 1.0)), -most, most)


@kernel()
def write_record(words: Words, is_bfloat16: bool, count: int, mean: NDArray[np.float64],
                 deviation: NDArray[np.float64], out: Bytes) -> None:  # fmt: skip
    """One record from the keys `words` `[page_tokens, head_dim]`; `mean` and `deviation` `[head_dim]` are scratch.

    Tokens are added in order and nothing is fused, so that the bytes equal the reference's.
    """
    dim = words.shape[1]
    mean[:] = 0.0
    deviation[:] = 0.0
    for t in range(count):
        row = words[t]
        for d in range(dim):
            mean[d] += np.float64(widen(row[d], is_bfloat16))
    finite = count > 0
    mean_top = deviation_top = 0.0
    for d in range(dim):
        mean[d] /= count
        finite = finite and math.isfinite(mean[d])
        mean_top = max(mean_top, abs(mean[d]))
    if not finite:
        store_float(out, 0, np.float32(np.nan))
        store_float(out, 4, np.float32(np.nan))
        out[SCALES_BYTES:] = 0
        return
    for t in range(count):
        row = words[t]
        for d in range(dim):
            off = np.float64(widen(row[d], is_bfloat16)) - mean[d]
            deviation[d] += off * off
    for d in range(dim):
        deviation[d] = math.sqrt(deviation[d] / count)
        deviation_top = max(deviation_top, deviation[d])
    mean_scale = np.float32(mean_top / MEAN_CODES)
    deviation_scale = np.float32(deviation_top / DEVIATION_CODES)
    store_float(out, 0, mean_scale)
    store_float(out, 4, deviation_scale)
    mean_step = np.float64(mean_scale) if mean_scale > 0 else np.inf
    deviation_step = np.float64(deviation_scale) if deviation_scale > 0 else np.inf
    for d in range(dim):
        code = np.int64(min(max(np.rint(mean[d] / mean_step), -MEAN_CODES), MEAN_CODES))
        out[SCALES_BYTES + d] = np.uint8(code & 0xFF)
        code = np.int64(min(np.rint(deviation[d] / deviation_step), DEVIATION_CODES))
        out[SCALES_BYTES + dim + d] = np.uint8(code)


@kernel()
def write_kernel(words: Words, is_bfloat16: bool, layers: int, count: int, out: Bytes) -> None:
    """The digest of the last `layers` layers of `words` `[num_layers, 2, kv_heads, page_tokens, head_dim]`."""
    num_layers, _, heads, _, dim = words.shape
    mean, deviation = np.empty(dim), np.empty(dim)
    size = SCALES_BYTES + 2 * dim
    at = 0
    for layer in range(num_layers - layers, num_layers):
        for head in range(heads):
            write_record(words[layer, 0, head], is_bfloat16, count, mean, deviation, out[at : at + size])
            at += size
    out[at:] = 0


__all__ = ["DEVIATION", "DeviationDigests", "DeviationForm", "Digest", "log_mass"]
