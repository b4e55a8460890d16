"""Attention over packed pages, in place: what attention kernels call for one page, layer and KV head.

The order of calls for one KV head and its G query heads (G from 1 to 16; all arrays float32 and C-contiguous):

    prepare_query(code, query, layer, head, num_layers, num_heads, page_tokens, head_dim, state, out_q, out_bias)
    for each packed page, `page` being a uint8 view that starts at the page's first byte:
        page_logits(code, page, layer, head, num_layers, num_heads, page_tokens, head_dim,
                    count, state, out_q, out_bias, logits)
        page_values(code, page, layer, head, num_layers, num_heads, page_tokens, head_dim,
                    count, state, weights, acc)
    finish_values(code, acc, layer, head, num_layers, num_heads, page_tokens, head_dim, state, out)

    query, out_q  [G, head_dim]    query is not scaled by 1/sqrt(head_dim), and neither are the logits
    out_bias      [G]
    logits        [G, page_tokens] only `[:, :count]` is written
    weights       [G, page_tokens] only `[:, :count]` is read
    acc           [G, head_dim]    sums in the codec's own space, zeroed by the caller before the first page, used up by
                                   finish_values, which adds to `out` `[G, head_dim]`
    state         the codec's per-model state, flat; may be empty while no page is packed

`code` is `Codec.kernel_code`. Where a codec works in a space of its own, `prepare_query` and `finish_values` are the
way in and out. Nothing is allocated on the heap and nothing raises; arguments are not checked.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.numba_setup import kernel
from tierkv.quant import kivi2_fused, klt_fused, rotated_fused, rows_fused
from tierkv.quant.codes import K3V2, KIVI2, KLT2, ROTATED2

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_rotated_query, _rotated_finish = rotated_fused.prepare_query, rotated_fused.finish_values
_rotated_logits, _rotated_values = rotated_fused.page_logits, rotated_fused.page_values
_klt_query, _klt_finish = klt_fused.prepare_query, klt_fused.finish_values
_klt_logits, _klt_values = klt_fused.page_logits, klt_fused.page_values
_kivi2_logits, _kivi2_values = kivi2_fused.page_logits, kivi2_fused.page_values
_rows_logits, _rows_values = rows_fused.page_logits, rows_fused.page_values

_ZERO = np.float32(0)


@kernel()
def _key_bits(code: int) -> int:
    """Bits of a key in the rotated family, 0 for any other codec."""
    if code == K3V2:
        return 3
    return 2 if code == ROTATED2 else 0


@kernel()
def prepare_query(
    code: int, query: Floats, layer: int, head: int,
    num_layers: int, num_heads: int, page_tokens: int, head_dim: int,
    state: Floats, out_q: Floats, out_bias: Floats,
) -> None:  # fmt: skip
    """Once per query and KV head: `out_q` and `out_bias` are what `page_logits` wants."""
    if _key_bits(code):
        _rotated_query(query, layer, head, num_heads, state, out_q, out_bias)
    elif code == KLT2:
        _klt_query(query, layer, head, num_heads, state, out_q, out_bias)
    else:  # the others work in the model's own space
        out_q[:] = query
        out_bias[:] = _ZERO


@kernel()
def page_logits(
    code: int, page: Bytes, layer: int, head: int,
    num_layers: int, num_heads: int, page_tokens: int, head_dim: int,
    count: int, state: Floats, query: Floats, bias: Floats, logits: Floats,
) -> None:  # fmt: skip
    """`logits[:, :count]` = products of the (prepared) queries with the page's first `count` keys."""
    if _key_bits(code):
        _rotated_logits(
            page, layer, head, num_layers, num_heads, page_tokens, head_dim, _key_bits(code), count, query, bias, logits
        )  # fmt: skip
    elif code == KLT2:
        _klt_logits(page, layer, head, num_heads, page_tokens, head_dim, count, state, query, bias, logits)
    elif code == KIVI2:
        _kivi2_logits(
            page, layer, head, num_layers, num_heads, page_tokens, head_dim, count, query, bias, logits
        )
    else:
        _rows_logits(
            code, page, layer, head, num_layers, num_heads, page_tokens, head_dim, count, query, bias, logits
        )


@kernel()
def page_values(
    code: int, page: Bytes, layer: int, head: int,
    num_layers: int, num_heads: int, page_tokens: int, head_dim: int,
    count: int, state: Floats, weights: Floats, acc: Floats,
) -> None:  # fmt: skip
    """`acc += weights[:, :count] @ values` in the codec's space."""
    if _key_bits(code):
        _rotated_values(
            page, layer, head, num_layers, num_heads, page_tokens, head_dim, _key_bits(code), count, weights, acc
        )  # fmt: skip
    elif code == KLT2:
        _klt_values(page, layer, head, num_heads, page_tokens, head_dim, count, state, weights, acc)
    elif code == KIVI2:
        _kivi2_values(page, layer, head, num_layers, num_heads, page_tokens, head_dim, count, weights, acc)
    else:
        _rows_values(
            code, page, layer, head, num_layers, num_heads, page_tokens, head_dim, count, weights, acc
        )


@kernel()
def finish_values(
    code: int, acc: Floats, layer: int, head: int,
    num_layers: int, num_heads: int, page_tokens: int, head_dim: int,
    state: Floats, out: Floats,
) -> None:  # fmt: skip
    """`out` gets the sums added, in the space of the model; `acc` is used up."""
    if _key_bits(code):
        _rotated_finish(acc, out)
    elif code == KLT2:
        _klt_finish(acc, layer, head, num_heads, state, out)
    else:
        for g in range(acc.shape[0]):
            for channel in range(acc.shape[1]):
                out[g, channel] += acc[g, channel]
