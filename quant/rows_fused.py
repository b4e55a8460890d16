"""int8, nf4 and exact pages attended in place: formats that keep a token's channels next to each other.

A token's values are unpacked into a row on the stack once and multiplied for every query head.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.numba_setup import kernel
from tierkv.quant.blockwise_kernels import load_values
from tierkv.quant.codes import EXACT, INT8, NF4
from tierkv.quant.floats import BFLOAT16, FLOAT32, load_float, load_half, widen
from tierkv.quant.tiles import stack_floats

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BUFFER = 2048
"""Values that are unpacked at once: as many whole tokens as fit, or a part of one."""

_ZERO = np.float32(0)


@kernel()
def _load_exact(kind: int, page: Bytes, first: int, row: Floats) -> None:
    """Values from number `first` on of an exact page; no alignment is needed."""
    if kind == FLOAT32:
        for index in range(row.shape[0]):
            row[index] = load_float(page, 4 * (first + index))
    else:
        for index in range(row.shape[0]):
            row[index] = widen(load_half(page, 2 * (first + index)), kind == BFLOAT16)


@kernel()
def _load(
    code: int, page: Bytes, plane: int, planes: int, page_tokens: int, head_dim: int, first: int, row: Floats
) -> None:  # fmt: skip
    """Values from number `first` on of a plane; planes are keys and values of layers and heads, as pages have them."""
    if code == INT8 or code == NF4:  # noqa: SIM109
        load_values(8 if code == INT8 else 4, page, plane, planes, page_tokens, head_dim, first, row)
    else:
        _load_exact(code - EXACT, page, plane * page_tokens * head_dim + first, row)


@kernel(fastmath=True)
def page_logits(
    code: int, page: Bytes, layer: int, head: int,
    num_layers: int, num_heads: int, page_tokens: int, head_dim: int,
    count: int, query: Floats, bias: Floats, out: Floats,
) -> None:  # fmt: skip
    """`out[:, :count]` = unscaled products of the queries with the page's keys, plus `bias`."""
    planes, plane = 2 * num_layers * num_heads, 2 * layer * num_heads + head
    buffer = stack_floats(2048)
    channels = min(head_dim, BUFFER)
    turn = BUFFER // channels
    for g in range(query.shape[0]):
        out[g, :count] = bias[g]
    for first in range(0, count, turn):
        last = min(count, first + turn)
        for channel in range(0, head_dim, channels):
            size = min(channels, head_dim - channel)
            rows = buffer[: (last - first) * size]
            _load(code, page, plane, planes, page_tokens, head_dim, first * head_dim + channel, rows)
            for g in range(query.shape[0]):
                q, logits = query[g, channel : channel + size], out[g, first:last]
                for token in range(last - first):
                    row, total = rows[token * size : (token + 1) * size], _ZERO
                    for index in range(size):
                        total += q[index] * row[index]
                    logits[token] += total


@kernel(fastmath=True)
def page_values(
    code: int, page: Bytes, layer: int, head: int,
    num_layers: int, num_heads: int, page_tokens: int, head_dim: int,
    count: int, weights: Floats, acc: Floats,
) -> None:  # fmt: skip
    """`acc += weights[:, :count] @ values`."""
    planes, plane = 2 * num_layers * num_heads, (2 * layer + 1) * num_heads + head
    buffer = stack_floats(2048)
    channels = min(head_dim, BUFFER)
    turn = BUFFER // channels
    for first in range(0, count, turn):
        last = min(count, first + turn)
        for channel in range(0, head_dim, channels):
            size = min(channels, head_dim - channel)
            rows = buffer[: (last - first) * size]
            _load(code, page, plane, planes, page_tokens, head_dim, first * head_dim + channel, rows)
            for g in range(acc.shape[0]):
                sums = acc[g, channel : channel + size]
                for token in range(last - first):
                    row, weight = rows[token * size : (token + 1) * size], weights[g, first + token]
                    for index in range(size):
                        sums[index] += weight * row[index]
