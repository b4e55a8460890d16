"""klt2 attended in place: products with packed keys and values of one KV head. Format: `klt.py`.

A query enters the space of the codes once, and the weighted sum of values leaves it once; both are a product with the
synthesis matrix. In between there are levels, unpacked 16 at a time and multiplied for every query head.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.numba_setup import kernel
from tierkv.quant.floats import load_float
from tierkv.quant.klt_layout import (
    GROUP,
    bits_of_group,
    block_start,
    mean_start,
    plane_bytes,
    record_start,
    synthesis_start,
)
from tierkv.quant.klt_planes import unpack_rows
from tierkv.quant.lloyd import GAINS
from tierkv.quant.rotated_layout import scale_offset
from tierkv.quant.tiles import LANES, TERMS, add_rows, stack_floats

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_ZERO = np.float32(0)


@kernel(fastmath=True)
def prepare_query(
    query: Floats, layer: int, head: int, num_heads: int, state: Floats, out_q: Floats, out_bias: Floats
) -> None:
    """`out_q` gets the transposed synthesis matrix times each row, `out_bias` each row's product with the mean key."""
    groups, head_dim = query.shape
    out_q[:] = _ZERO
    out_bias[:] = _ZERO
    if state.shape[0] == 0:
        return
    record = record_start(layer, 0, head, num_heads, head_dim)
    mean = state[mean_start(record, head_dim) :][:head_dim]
    synthesis = state[synthesis_start(record, head_dim) :][: head_dim * head_dim]
    for g in range(groups):
        target = out_q[g]
        for channel in range(head_dim):
            factor = query[g, channel]
            out_bias[g] += factor * mean[channel]
            row = synthesis[channel * head_dim : (channel + 1) * head_dim]
            for code in range(head_dim):
                target[code] += factor * row[code]


@kernel(fastmath=True)
def page_logits(
    page: Bytes, layer: int, head: int, num_heads: int, page_tokens: int, head_dim: int, count: int,
    state: Floats, query: Floats, bias: Floats, out: Floats,
) -> None:  # fmt: skip
    """`out[:, :count]` = unscaled products of the prepared queries with the page's keys."""
    record = record_start(layer, 0, head, num_heads, head_dim)
    block = block_start(state, record)
    top = load_float(page, scale_offset(layer, 0, head, num_heads))
    width = plane_bytes(page_tokens)
    tile, sums = stack_floats(128), stack_floats(256)
    groups = query.shape[0]
    for first in range(0, count, LANES):
        sums[: groups * LANES] = _ZERO
        at = block + page_tokens + first // 8
        for group in range(head_dim // GROUP):
            bits = bits_of_group(state, record, group)
            if bits == 0:
                continue
            for half in range(group * GROUP, (group + 1) * GROUP, TERMS):
                unpack_rows(bits, page, at, width, bits * width, tile, 0, 1, TERMS)
                at += TERMS * bits * width
                for g in range(groups):
                    add_rows(tile, 0, query, g * head_dim + half, sums, g * LANES)
        for token in range(first, min(first + LANES, count)):
            gain = top * GAINS[page[block + token]]
            for g in range(groups):
                out[g, token] = bias[g] + gain * sums[g * LANES + token - first]


@kernel(fastmath=True)
def page_values(
    page: Bytes, layer: int, head: int, num_heads: int, page_tokens: int, head_dim: int, count: int,
    state: Floats, weights: Floats, acc: Floats,
) -> None:  # fmt: skip
    """`acc += weights[:, :count] @ values`, in the space of the codes."""
    record = record_start(layer, 1, head, num_heads, head_dim)
    block = block_start(state, record)
    top = load_float(page, scale_offset(layer, 1, head, num_heads))
    tile, factors = stack_floats(128), stack_floats(128)
    groups, token_bytes = acc.shape[0], 0
    for group in range(head_dim // GROUP):
        token_bytes += 2 * bits_of_group(state, record, group)
    for token in range(0, count, TERMS):
        terms = min(TERMS, count - token)
        if terms < TERMS:
            factors[:] = _ZERO
            tile[:] = _ZERO
        for term in range(terms):
            gain = top * GAINS[page[block + token + term]]
            for g in range(groups):
                factors[g * TERMS + term] = weights[g, token + term] * gain
        at = block + page_tokens + token * token_bytes
        for group in range(head_dim // GROUP):
            bits = bits_of_group(state, record, group)
            if bits == 0:
                continue
            unpack_rows(bits, page, at, 2, token_bytes, tile, 0, 1, terms)
            at += 2 * bits
            for g in range(groups):
                add_rows(tile, 0, factors, g * TERMS, acc, g * head_dim + group * GROUP)


@kernel(fastmath=True)
def finish_values(acc: Floats, layer: int, head: int, num_heads: int, state: Floats, out: Floats) -> None:
    """`out` gets the synthesis matrix times `acc` added."""
    groups, head_dim = acc.shape
    if state.shape[0] == 0:
        return
    record = record_start(layer, 1, head, num_heads, head_dim)
    synthesis = state[synthesis_start(record, head_dim) :][: head_dim * head_dim]
    for g in range(groups):
        source = acc[g]
        for channel in range(head_dim):
            row = synthesis[channel * head_dim : (channel + 1) * head_dim]
            total = _ZERO
            for code in range(head_dim):
                total += row[code] * source[code]
            out[g, channel] += total
