"""Attention over packed pages, in place: what attention kernels call for one page, layer and KV head.

The order of calls for one KV head and its G query heads (G from 1 to 16; all arrays float32 and C-contiguous):

    prepare_query(code, query, layer, head, num_layers, num_heads, page_tokens, head_dim, state, out_q, out_bias)
    for each packed page, `page` being a uint8 view that starts at the page's first byte:
        page_logits(code, page, layer, head, num_layers, num_heads, page_tokens, head_dim,
                    count, out_q, out_bias, logits)
        page_values(code, page, layer, head, num_layers, num_heads, page_tokens, head_dim, count, weights, acc)
    finish_values(code, acc, layer, head, num_layers, num_heads, page_tokens, head_dim, out)

    query, out_q  [G, head_dim]    query is not scaled by 1/sqrt(head_dim), and neither are the logits
    out_bias      [G]
    logits        [G, page_tokens] only `[:, :count]` is written
    weights       [G, page_tokens] only `[:, :count]` is read
    acc           [G, head_dim]    sums in the codec's own space, zeroed by the caller before the first page, used up by
                                   finish_values, which adds to `out` `[G, head_dim]`
    state         the codec's per-model state, flat; may be empty while no page is packed

`code` is `Codec.code`. Nothing is allocated on the heap and nothing raises; arguments are not checked.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.numba_setup import kernel
from tierkv.quant import k3v2_fused, kivi2_fused

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

K3V2 = 1
KIVI2 = 2
"""Codes of the codecs (`Codec.code`), as constants that kernels can dispatch on."""

_k3v2_query, _kivi2_query = k3v2_fused.prepare_query, kivi2_fused.prepare_query
_k3v2_logits, _kivi2_logits = k3v2_fused.page_logits, kivi2_fused.page_logits
_k3v2_values, _kivi2_values = k3v2_fused.page_values, kivi2_fused.page_values
_k3v2_finish, _kivi2_finish = k3v2_fused.finish_values, kivi2_fused.finish_values


@kernel()
def prepare_query(
    code: int, query: Floats, layer: int, head: int,
    num_layers: int, num_heads: int, page_tokens: int, head_dim: int,
    state: Floats, out_q: Floats, out_bias: Floats,
) -> None:  # fmt: skip
    """Once per query and KV head: `out_q` and `out_bias` are what `page_logits` wants."""
    if code == K3V2:
        _k3v2_query(query, layer, head, num_heads, state, out_q, out_bias)
    elif code == KIVI2:
        _kivi2_query(query, out_q, out_bias)


@kernel()
def page_logits(
    code: int, page: Bytes, layer: int, head: int,
    num_layers: int, num_heads: int, page_tokens: int, head_dim: int,
    count: int, query: Floats, bias: Floats, logits: Floats,
) -> None:  # fmt: skip
    """`logits[:, :count]` = products of the (prepared) queries with the page's first `count` keys."""
    if code == K3V2:
        _k3v2_logits(
            page, layer, head, num_layers, num_heads, page_tokens, head_dim, count, query, bias, logits
        )
    elif code == KIVI2:
        _kivi2_logits(
            page, layer, head, num_layers, num_heads, page_tokens, head_dim, count, query, bias, logits
        )


@kernel()
def page_values(
    code: int, page: Bytes, layer: int, head: int,
    num_layers: int, num_heads: int, page_tokens: int, head_dim: int,
    count: int, weights: Floats, acc: Floats,
) -> None:  # fmt: skip
    """`acc += weights[:, :count] @ values` in the codec's space."""
    if code == K3V2:
        _k3v2_values(page, layer, head, num_layers, num_heads, page_tokens, head_dim, count, weights, acc)
    elif code == KIVI2:
        _kivi2_values(page, layer, head, num_layers, num_heads, page_tokens, head_dim, count, weights, acc)


@kernel()
def finish_values(
    code: int, acc: Floats, layer: int, head: int,
    num_layers: int, num_heads: int, page_tokens: int, head_dim: int,
    out: Floats,
) -> None:  # fmt: skip
    """`out` gets the sums added, in the space of the model; `acc` is used up."""
    if code == K3V2:
        _k3v2_finish(acc, out)
    elif code == KIVI2:
        _kivi2_finish(acc, out)
