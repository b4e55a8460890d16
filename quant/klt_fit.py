"""klt2's state: from moments of a model (the Karhunen-Loeve transform and who gets how many bits), or without any.

A key's error `e` moves a logit by `q . e`, so what counts is `e^T M e`, with the second moment `M` of queries; a
value's moves the layer's output, with `M = W_o^T W_o`. In the metric of M the covariance S of what is coded has the
eigenvectors U, `M^1/2 S M^1/2 = U L U^T`, and along them the least error a bit is reached when each channel's share of
it is the same: the largest get the most bits ("reverse water-filling", Cover and Thomas, ch. 10). S counts a token by
the attention that it draws (`moments.py`): what nothing looks at may be coarse.

Channels come in groups of 16 of like variance, which a Hadamard rotation mixes: within a group all channels are then
nearly Gaussian and of one variance, which is what the levels of a code are made for. Bits are given out one by one, to
the group whose error falls most by it, among all heads of a layer, weighted by the part of the attention that goes to
tokens that would be low-bit. Layers get equal bits: how much one layer's error costs against another's is not known
here, and guesses were far worse (decision 0008).
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from tierkv.geometry import Geometry
from tierkv.quant.contract import Floats
from tierkv.quant.klt_layout import GROUP, MAX_BITS, block_bytes
from tierkv.quant.klt_levels import DISTORTIONS
from tierkv.quant.moments import Moments
from tierkv.quant.rotation import block_sizes, signs

Doubles = NDArray[np.float64]

FLOOR = 1e-6
"""Of the largest eigenvalue: below it a direction counts as this large, so that matrices have inverses."""


def hadamard(size: int) -> Doubles:
    """Sylvester's orthonormal matrix; `size` is a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    scaled: Doubles = matrix / np.sqrt(size)
    return scaled


def neutral(geometry: Geometry, key_mean: Floats, mean_bits: float) -> Floats:
    """The state without moments: signs and Hadamard as in the rotated family, and the same bits for every channel.

    Args:
        key_mean: `[layers, kv_heads, head_dim]`.
    """
    dim = geometry.head_dim
    rotation = np.zeros((dim, dim))
    start = 0
    for size in block_sizes(dim):
        rotation[start : start + size, start : start + size] = hadamard(size)
        start += size
    rotation = rotation * signs(dim)
    shape = (geometry.num_layers, 2, geometry.num_kv_heads)
    like = np.ones((geometry.num_kv_heads, dim // GROUP))
    bits = np.broadcast_to(allocate(like, layer_bits(geometry, mean_bits)), (*shape, dim // GROUP))
    means = np.zeros((*shape, dim))
    means[:, 0] = key_mean
    matrices = np.broadcast_to(rotation, (*shape, dim, dim))
    return _state(geometry, bits, np.ones_like(bits, np.float64), means, matrices, matrices.swapaxes(-1, -2))


def fit(geometry: Geometry, moments: Moments, mean_bits: float) -> Floats:
    """The state from moments of a model."""
    dim = geometry.head_dim
    shape = (geometry.num_layers, 2, geometry.num_kv_heads)
    spread = np.empty((*shape, dim // GROUP))
    analysis, synthesis = np.empty((*shape, dim, dim)), np.empty((*shape, dim, dim))
    sides = ((moments.key_covariance, moments.query_second), (moments.value_second, moments.value_metric))
    for side, (second, metric) in enumerate(sides):
        spread[:, side], analysis[:, side], synthesis[:, side] = transform(second, metric)
    shares = np.maximum(moments.share.astype(np.float64), FLOOR)[:, None, :, None]
    costs = spread * shares
    total = layer_bits(geometry, mean_bits)
    bits = np.array([[allocate(costs[layer, side], total) for side in range(2)] for layer in range(shape[0])])
    means = np.zeros((*shape, dim))
    means[:, 0] = moments.key_mean
    return _state(geometry, bits, spread, means, analysis, synthesis)


def transform(second: Floats, metric: Floats) -> tuple[Doubles, Doubles, Doubles]:
    """Variances of groups, largest first, and the matrices into and out of the space of codes (of unit variance).

    Args:
        second: `[..., dim, dim]` second moment of what is coded.
        metric: `[..., dim, dim]` what an error of it costs.
    """
    root, inverse = _root(metric)
    variance, axes = np.linalg.eigh(root @ second.astype(np.float64) @ root)
    variance, axes = variance[..., ::-1], axes[..., ::-1]
    groups = variance.reshape(*variance.shape[:-1], -1, GROUP).mean(-1)
    groups = np.maximum(groups, np.maximum(groups[..., :1] * FLOOR**2, np.finfo(np.float32).tiny))
    mix = np.kron(np.eye(variance.shape[-1] // GROUP), hadamard(GROUP))
    deviation = np.sqrt(np.repeat(groups, GROUP, -1))
    analysis = mix @ axes.swapaxes(-1, -2) @ root / deviation[..., :, None]
    synthesis = inverse @ axes @ mix.T * deviation[..., None, :]
    return groups, analysis, synthesis


def layer_bits(geometry: Geometry, mean_bits: float) -> int:
    """Bits of all groups of a layer's keys, or of its values."""
    return int(geometry.num_kv_heads * (geometry.head_dim // GROUP) * mean_bits)


def allocate(costs: Doubles, total: int) -> NDArray[np.int64]:
    """Bits of each group, `total` of them, one after the other to where the error falls most.

    Args:
        costs: `[heads, groups]`: what the groups' errors are worth without any bit.
    """
    flat = costs.ravel()
    bits = np.zeros(len(flat), np.int64)

    def gain(group: int) -> float:
        return float(flat[group] * (DISTORTIONS[bits[group]] - DISTORTIONS[bits[group] + 1]))

    best = [(-gain(group), group) for group in range(len(flat))]
    heapq.heapify(best)
    for _ in range(total):
        _, group = heapq.heappop(best)
        bits[group] += 1
        if bits[group] < MAX_BITS:
            heapq.heappush(best, (-gain(group), group))
    return bits.reshape(costs.shape)


def _root(metric: Floats) -> tuple[Doubles, Doubles]:
    """The square root of a positive matrix, and its inverse."""
    values, axes = np.linalg.eigh(metric.astype(np.float64))
    values = np.maximum(values, np.maximum(values[..., -1:] * FLOOR, np.finfo(np.float32).tiny))
    turned, root = axes.swapaxes(-1, -2), np.sqrt(values)[..., None, :]
    return (axes * root) @ turned, (axes / root) @ turned


def _state(
    geometry: Geometry, bits: NDArray[np.int64], spread: Doubles, means: Doubles, analysis: Doubles, synthesis: Doubles
) -> Floats:  # fmt: skip
    """All of it as float32, record by record (`klt_layout.py`). Blocks lie by layer, keys first."""
    shape = (geometry.num_layers, 2, geometry.num_kv_heads)
    starts, at = np.empty((*shape, 1)), 4 * int(np.prod(shape))
    for place in np.ndindex(*shape):
        starts[place] = at
        at += block_bytes(place[1], int(bits[place].sum()), geometry.page_tokens)
    parts = [starts, bits, spread / spread.max(-1, keepdims=True), means]
    parts += [matrix.reshape(*shape, -1) for matrix in (analysis, synthesis)]
    return (
        np.concatenate([np.broadcast_to(part, (*shape, part.shape[-1])) for part in parts], -1)
        .astype(np.float32)
        .ravel()
    )
