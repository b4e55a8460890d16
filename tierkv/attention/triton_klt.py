"""Decode attention over klt2's pages on a device, in place: what `triton_kernels.attend_packed` is for rotated ones.

Channels go in four parts to four products, each over the levels of all tokens of a tile, and four sums.
"""

from __future__ import annotations

from tierkv.attention.triton_kernels import logits_of, read_item, softmax_step, store_logits, tile_tokens
from tierkv.quant.klt_triton_kernels import key_levels, value_levels
from tierkv.quant.rotated_triton_kernels import gain_of
from tierkv.triton_setup import kernel, tl

_NO_GAIN = tl.constexpr(255)


@kernel
def _logits(
    sums: tl.tensor, prepared: tl.tensor, heads: tl.tensor, wanted: tl.tensor, packed: tl.tensor, offsets: tl.tensor,
    first: tl.tensor, last: tl.tensor, start: tl.tensor, channels: tl.tensor, quantizers: tl.tensor,
    PART: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, QUARTER: tl.constexpr, PAGES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`sums` and the products of a part of the channels, `[tokens, query heads]`, without gains."""
    channel = PART * QUARTER + tl.arange(0, QUARTER)
    inside = wanted[None, :] & (channel < DIM)[:, None]
    query = tl.load(prepared + heads[None, :] * DIM + channel[:, None], mask=inside, other=0.0)
    level = key_levels(packed, offsets, first, last, start, channels, channel, quantizers, TOKENS, DIM, PAGES)
    return tl.dot(level, query, sums, input_precision="tf32")


@kernel
def _add_values(
    acc: tl.tensor, weights: tl.tensor, packed: tl.tensor, rows: tl.tensor, live: tl.tensor, channels: tl.tensor,
    quantizers: tl.tensor, PART: tl.constexpr, DIM: tl.constexpr, QUARTER: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`acc` `[channels of a part, query heads]` and the weighted sum of the rows' levels."""
    octet = PART * (QUARTER // 8) + tl.arange(0, QUARTER // 8)
    level = value_levels(packed, rows, live, channels, octet, quantizers, DIM)
    return tl.dot(level, weights, acc, input_precision="tf32")


@kernel
def _store_part(
    sums: tl.tensor, acc: tl.tensor, total: tl.tensor, place: tl.tensor, wanted: tl.tensor, PART: tl.constexpr,
    DIM: tl.constexpr, QUARTER: tl.constexpr,
) -> None:  # fmt: skip
    channel = PART * QUARTER + tl.arange(0, QUARTER)
    inside = wanted[None, :] & (channel < DIM)[:, None]
    tl.store(sums + place[None, :] * DIM + channel[:, None], acc / total[None, :], mask=inside)


@kernel
def attend_klt(
    prepared: tl.tensor, biases: tl.tensor, packed: tl.tensor, packed_floats: tl.tensor, blocks: tl.tensor,
    channels: tl.tensor, quantizers: tl.tensor, offsets: tl.tensor, counts: tl.tensor, items: tl.tensor,
    sums: tl.tensor, logs: tl.tensor, kept: tl.tensor, layer: tl.tensor, scale: tl.tensor, HEADS: tl.constexpr,
    SHARE: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, QUARTER: tl.constexpr, ROWS: tl.constexpr,
    PAGES: tl.constexpr, MASS: tl.constexpr, CAP: tl.constexpr, BY_HEAD: tl.constexpr,
) -> None:  # fmt: skip
    """One item of packed pages and KV head. Arguments as of `attend_packed`; blocks and so on as of `encode_side`.

    QUARTER: DIM / 4 filled up to a power of two, at least 16.
    """
    QUERY_HEADS: tl.constexpr = HEADS * SHARE
    head = tl.program_id(0) % HEADS
    number, row, first, last = read_item(items, tl.program_id(0), HEADS, BY_HEAD)
    heads, wanted = head * SHARE + tl.arange(0, ROWS), tl.arange(0, ROWS) < SHARE
    prepared += row * (QUERY_HEADS * DIM)
    bias = tl.load(biases + row * QUERY_HEADS + heads, mask=wanted, other=0.0)
    key_record = layer * 2 * HEADS + head
    value_record = key_record + HEADS
    key_start, value_start = tl.load(blocks + key_record * 2), tl.load(blocks + value_record * 2)
    token_bytes = tl.load(blocks + value_record * 2 + 1)
    keys, values = channels + key_record * DIM, channels + value_record * DIM
    largest, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    acc0 = tl.zeros((QUARTER, ROWS), tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    for page in tl.range(first, last, PAGES, num_stages=1):  # bytes are too small for asynchronous copies
        offset, slot, live = tile_tokens(offsets, counts, page, last, PAGES, TOKENS)
        tops = packed_floats + offset // 4
        codes = packed + offset + slot
        gain = tl.load(tops + key_record, mask=live, other=0.0)
        gain *= gain_of(tl.load(codes + key_start, mask=live, other=_NO_GAIN))
        value_gain = tl.load(tops + value_record, mask=live, other=0.0)
        value_gain *= gain_of(tl.load(codes + value_start, mask=live, other=_NO_GAIN))

        logits = tl.zeros((PAGES * TOKENS, ROWS), tl.float32)
        for part in tl.static_range(4):
            logits = _logits(
                logits, prepared, heads, wanted, packed, offsets, page, last, key_start, keys, quantizers,
                part, TOKENS, DIM, QUARTER, PAGES,
            )  # fmt: skip
        logits = logits_of(bias[None, :] + logits * gain[:, None], live[:, None], scale, CAP)
        if MASS:
            store_logits(
                tl.trans(logits), kept, heads, wanted, page, last, ROWS, QUERY_HEADS, PAGES, TOKENS, MASS
            )
        weights, factor, largest, total = softmax_step(logits, largest, total, 0)
        weights *= value_gain[:, None]
        factor = factor[None, :]
        rows = offset + (value_start + TOKENS + slot * token_bytes)
        acc0 = _add_values(acc0 * factor, weights, packed, rows, live, values, quantizers, 0, DIM, QUARTER)
        acc1 = _add_values(acc1 * factor, weights, packed, rows, live, values, quantizers, 1, DIM, QUARTER)
        acc2 = _add_values(acc2 * factor, weights, packed, rows, live, values, quantizers, 2, DIM, QUARTER)
        acc3 = _add_values(acc3 * factor, weights, packed, rows, live, values, quantizers, 3, DIM, QUARTER)
    place = number * QUERY_HEADS + heads
    total = tl.maximum(total, 1.0)
    tl.store(logs + place, largest + tl.log2(total), mask=wanted)
    _store_part(sums, acc0, total, place, wanted, 0, DIM, QUARTER)
    _store_part(sums, acc1, total, place, wanted, 1, DIM, QUARTER)
    _store_part(sums, acc2, total, place, wanted, 2, DIM, QUARTER)
    _store_part(sums, acc3, total, place, wanted, 3, DIM, QUARTER)
