"""klt2's state: from moments of a model (the Karhunen-Loeve transform and who gets how many bits), or without any.

What is coded has the covariance S, and an error e of it costs `e^T M e`. In the metric of M the covariance has the
eigenvectors U, `M^1/2 S M^1/2 = U L U^T`, and along them the least error a bit is reached when each channel's share of
it is the same: the largest get the most bits ("reverse water-filling", Cover and Thomas, ch. 10). S counts a token by
the attention that it draws (`calibration.py`): what nothing looks at may be coarse.

What an error costs the model's answer is half of `e^T F e`, with the Fisher information F (`Moments.key_fisher`). F is
measured from few draws and is poor in small directions; what an error does where it is made is known well: a key's
moves a logit by `q . e`, and so costs by the second moment of queries, a value's by `W_o^T W_o`. M is both in equal
parts, in each head: half of its trace each.

Channels come in groups of 16 of like variance, which a Hadamard rotation mixes: within a group all channels are then
nearly Gaussian and of one variance, which is what the levels of a code are made for. Bits are given out one by one, to
the group whose error, by F alone, costs most less with one more: among all layers and heads, keys and values alike,
since F says what each costs in the same nats (decision 0008). A group's errors are `DISTORTIONS` of its variance.
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
    spread, costs = np.empty((*shape, dim // GROUP)), np.empty((*shape, dim // GROUP))
    analysis, synthesis = np.empty((*shape, dim, dim)), np.empty((*shape, dim, dim))
    sides = (
        (moments.key_covariance, moments.query_second, moments.key_fisher),
        (moments.value_second, moments.value_metric, moments.value_fisher),
    )
    for side, (second, local, fisher) in enumerate(sides):
        metric = (per_channel(local) + per_channel(fisher)) / 2
        spread[:, side], analysis[:, side], synthesis[:, side] = transform(second, metric)
        costs[:, side] = group_costs(synthesis[:, side], fisher)
    means = np.zeros((*shape, dim))
    means[:, 0] = moments.key_mean
    return _state(geometry, share_out(geometry, costs, mean_bits), spread, means, analysis, synthesis)


def per_channel(metric: Floats) -> Doubles:
    """`[..., dim, dim]` scaled to a mean diagonal of 1. Where nothing costs anything, all channels cost the same."""
    dim = metric.shape[-1]
    mean = np.trace(metric.astype(np.float64), axis1=-2, axis2=-1)[..., None, None] / dim
    scaled: Doubles = np.where(mean > 0, metric, np.eye(dim)) / np.where(mean > 0, mean, 1)
    return scaled


def group_costs(synthesis: Doubles, fisher: Floats) -> Doubles:
    """`[..., groups]`: what a unit of variance of a group's codes costs, the mean of its channels."""
    each = ((fisher.astype(np.float64) @ synthesis) * synthesis).sum(-2)
    costs: Doubles = np.maximum(each.reshape(*each.shape[:-1], -1, GROUP).mean(-1), 0.0)
    return costs


def transform(second: Floats, metric: Floats | Doubles) -> tuple[Doubles, Doubles, Doubles]:
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
    """Bits of all groups of a layer's keys, or of its values, on average over layers and sides."""
    return int(geometry.num_kv_heads * (geometry.head_dim // GROUP) * mean_bits)


def share_out(geometry: Geometry, costs: Doubles, mean_bits: float) -> NDArray[np.int64]:
    """Bits of each group, as many as fill a page.

    Args:
        costs: `[layers, 2, heads, groups]`.
    """
    side = geometry.num_layers * layer_bits(geometry, mean_bits)
    keys, values = (block_bytes(side, 1, geometry.page_tokens) for side in range(2))
    if keys == values:
        return allocate(costs, 2 * side)
    # A page has no whole bytes of key bits: a bit of keys cannot become one of values.
    return np.stack([allocate(costs[:, 0], side), allocate(costs[:, 1], side)], 1)


def allocate(costs: Doubles, total: int) -> NDArray[np.int64]:
    """Bits of each group, `total` of them, one after the other to where errors come to cost least: the one that has
    fewest, if several do.

    Args:
        costs: what the groups' errors cost without any bit, in any shape.
    """
    flat = costs.ravel()
    bits = np.zeros(len(flat), np.int64)

    def gain(group: int) -> float:
        return float(flat[group] * (DISTORTIONS[bits[group]] - DISTORTIONS[bits[group] + 1]))

    best = [(-gain(group), 0, group) for group in range(len(flat))]
    heapq.heapify(best)
    for _ in range(total):
        *_, group = heapq.heappop(best)
        bits[group] += 1
        if bits[group] < MAX_BITS:
            heapq.heappush(best, (-gain(group), int(bits[group]), group))
    return bits.reshape(costs.shape)


def _root(metric: Floats | Doubles) -> tuple[Doubles, Doubles]:
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
