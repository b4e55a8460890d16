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

ROW = 256
"""Channels that are unpacked at once."""

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
def _load_row(
    code: int, page: Bytes, plane: int, planes: int, page_tokens: int, head_dim: int,
    token: int, channel: int, row: Floats,
) -> None:  # fmt: skip
    """Channels from `channel` on of a token; `plane` counts keys and values of layers and heads as pages do."""
    first = token * head_dim + channel
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
    buffer = stack_floats(256)
    for token in range(count):
        for g in range(query.shape[0]):
            out[g, token] = bias[g]
        for channel in range(0, head_dim, ROW):
            row = buffer[: min(ROW, head_dim - channel)]
            _load_row(code, page, plane, planes, page_tokens, head_dim, token, channel, row)
            for g in range(query.shape[0]):
                q, total = query[g, channel : channel + row.shape[0]], _ZERO
                for index in range(row.shape[0]):
                    total += q[index] * row[index]
                out[g, token] += total


@kernel(fastmath=True)
def page_values(
    code: int, page: Bytes, layer: int, head: int,
    num_layers: int, num_heads: int, page_tokens: int, head_dim: int,
    count: int, weights: Floats, acc: Floats,
) -> None:  # fmt: skip
    """`acc += weights[:, :count] @ values`."""
    planes, plane = 2 * num_layers * num_heads, (2 * layer + 1) * num_heads + head
    buffer = stack_floats(256)
    for token in range(count):
        for channel in range(0, head_dim, ROW):
            row = buffer[: min(ROW, head_dim - channel)]
            _load_row(code, page, plane, planes, page_tokens, head_dim, token, channel, row)
            for g in range(acc.shape[0]):
                weight, sums = weights[g, token], acc[g, channel : channel + row.shape[0]]
                for index in range(row.shape[0]):
                    sums[index] += weight * row[index]
