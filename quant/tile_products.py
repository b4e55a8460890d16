"""Products with packed tiles that never leave the registers: unpacked, multiplied for several query heads, summed.

`quant.tiles` unpacks a tile into memory, where each query head reads it again; here up to four heads share it. Tiles
are of 16 tokens (keys) or of 16 bytes a token (values). Where the machine can, all of it is done in whole numbers of 16
bits (`whole_products`); queries and factors are made ready for either way by `ready_query` and `ready_factors`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tierkv.numba_setup import kernel
from tierkv.quant import whole_products
from tierkv.quant.tiles import (
    LANES,
    TERMS,
    Bytes,
    Floats,
    broadcast,
    is_vector_of,
    level_4,
    levels_8,
    load_bytes,
    load_floats,
    multiply_add,
    pointer,
    store_floats,
    zeros,
)
from tierkv.quant.whole_products import LIMIT, PARTS, WHOLE, pack_factors, pack_query


def _key_sums(key_bits: int, heads: int) -> Any:
    """`sums[to + h * LANES + lane]` = sum over channels of `query[asked + h * dim + channel]` times the level of the
    tile's key `lane`; `low` and `signs` are where the first octet's bytes begin, `step` bytes a row of the page.
    """

    def typer(
        typingctx: Any, page: Any, low: Any, signs: Any, step: Any, dim: Any, query: Any, asked: Any, sums: Any, to: Any
    ) -> Any:  # fmt: skip
        if not (
            is_vector_of(page, types.uint8)
            and is_vector_of(query, types.float32)
            and is_vector_of(sums, types.float32)
        ):
            return None

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, low, signs, step, dim, _, asked, _, to = args
            intp = low.type
            factors = [
                pointer(context, builder, query, args[5], builder.add(asked, builder.mul(dim, intp(h))))
                for h in range(heads)
            ]
            codes, marks = (pointer(context, builder, page, args[0], place) for place in (low, signs))
            totals = zeros(builder, 2 * heads)
            with cgutils.for_range(builder, builder.udiv(dim, intp(TERMS))) as loop:
                first = builder.gep(codes, [builder.mul(loop.index, builder.mul(step, intp(2)))])
                pair = [load_bytes(builder, place) for place in (first, builder.gep(first, [step]))]
                if key_bits == 3:
                    mark = builder.gep(marks, [builder.mul(loop.index, step)])
                    rows = levels_8(builder, pair, load_bytes(builder, mark))
                else:
                    rows = (level_4(builder, pair[row // PARTS], 2 * (row % PARTS)) for row in range(TERMS))
                channel = builder.mul(loop.index, intp(TERMS))
                for row, levels in enumerate(rows):
                    for h, place in enumerate(factors):
                        factor = builder.load(builder.gep(place, [builder.add(channel, intp(row))]))
                        total = totals[2 * h + row % 2]  # two chains, so that one need not wait for the other
                        added = multiply_add(builder, levels, broadcast(builder, factor), builder.load(total))
                        builder.store(added, total)
            for h in range(heads):
                both = builder.fadd(*(builder.load(total) for total in totals[2 * h : 2 * h + 2]))
                at = builder.add(to, intp(h * LANES))
                store_floats(builder, pointer(context, builder, sums, args[7], at), both)
            return context.get_dummy_value()

        index = types.intp
        return types.void(page, index, index, index, index, query, index, sums, index), emit

    typer.__name__ = typer.__qualname__ = f"key_sums_{key_bits}x{heads}"
    return intrinsic(typer)


def _value_sums(heads: int) -> Any:
    """`acc[to + h * dim + part * quarter + lane]` += the sum over `count` tokens of `factors[h * LIMIT + t]` times the
    level that byte `start + t * quarter + lane` of the page holds at `part`.
    """

    def typer(
        typingctx: Any, page: Any, start: Any, quarter: Any, count: Any, factors: Any, first: Any, acc: Any, to: Any
    ) -> Any:  # fmt: skip
        if not (
            is_vector_of(page, types.uint8)
            and is_vector_of(factors, types.float32)
            and is_vector_of(acc, types.float32)
        ):
            return None

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, start, quarter, count, _, first, _, to = args
            intp = start.type
            weights = [
                pointer(context, builder, factors, args[4], builder.add(first, intp(h * LIMIT)))
                for h in range(heads)
            ]
            places = [
                pointer(
                    context, builder, acc, args[6], builder.add(to, builder.mul(quarter, intp(h * PARTS + part)))
                )
                for h in range(heads)
                for part in range(PARTS)
            ]  # fmt: skip
            totals = [cgutils.alloca_once_value(builder, load_floats(builder, place)) for place in places]
            codes = pointer(context, builder, page, args[0], start)
            with cgutils.for_range(builder, count) as loop:
                words = load_bytes(builder, builder.gep(codes, [builder.mul(loop.index, quarter)]))
                levels = [level_4(builder, words, 2 * part) for part in range(PARTS)]
                for h, weight in enumerate(weights):
                    factor = broadcast(builder, builder.load(builder.gep(weight, [loop.index])))
                    for part, level in enumerate(levels):
                        total = totals[h * PARTS + part]
                        builder.store(multiply_add(builder, level, factor, builder.load(total)), total)
            for place, total in zip(places, totals, strict=True):
                store_floats(builder, place, builder.load(total))
            return context.get_dummy_value()

        index = types.intp
        return types.void(page, index, index, index, factors, index, acc, index), emit

    typer.__name__ = typer.__qualname__ = f"value_sums_{heads}"
    return intrinsic(typer)


_keys, _values = (whole_products.key_sums, whole_products.value_sums) if WHOLE else (_key_sums, _value_sums)
_key_sums_3x1, _key_sums_3x2, _key_sums_3x3, _key_sums_3x4 = (_keys(3, heads) for heads in (1, 2, 3, 4))
_key_sums_2x1, _key_sums_2x2, _key_sums_2x3, _key_sums_2x4 = (_keys(2, heads) for heads in (1, 2, 3, 4))
_value_sums_1, _value_sums_2, _value_sums_3, _value_sums_4 = (_values(heads) for heads in (1, 2, 3, 4))


@kernel()
def ready_query(row: Floats) -> None:
    """A rotated query `[head_dim]` as `key_tile` wants it, in place."""
    if WHOLE:
        pack_query(row)


@kernel()
def ready_factors(factors: Floats, groups: int, tokens: int) -> None:
    """Factors `[groups, LIMIT]` (flat) of the first `tokens` tokens as `value_tile` wants them, in place."""
    if WHOLE:
        steps = (tokens + 15) // 16
        for g in range(groups):
            factors[g * LIMIT + tokens : g * LIMIT + 16 * steps] = np.float32(0)
            pack_factors(factors, g * LIMIT, steps)


@kernel()
def key_tile(
    key_bits: int, page: Bytes, low: int, signs: int, step: int, query: Floats, sums: Floats
) -> None:
    """`sums[g * LANES + lane]` = products of the ready queries `[groups, head_dim]` with 16 keys, without gains."""
    groups, dim = query.shape
    for g in range(0, groups, 4):
        q, to = g * dim, g * 16
        if key_bits == 3:
            if groups - g >= 4:
                _key_sums_3x4(page, low, signs, step, dim, query, q, sums, to)
            elif groups - g == 3:
                _key_sums_3x3(page, low, signs, step, dim, query, q, sums, to)
            elif groups - g == 2:
                _key_sums_3x2(page, low, signs, step, dim, query, q, sums, to)
            else:
                _key_sums_3x1(page, low, signs, step, dim, query, q, sums, to)
        elif groups - g >= 4:
            _key_sums_2x4(page, low, signs, step, dim, query, q, sums, to)
        elif groups - g == 3:
            _key_sums_2x3(page, low, signs, step, dim, query, q, sums, to)
        elif groups - g == 2:
            _key_sums_2x2(page, low, signs, step, dim, query, q, sums, to)
        else:
            _key_sums_2x1(page, low, signs, step, dim, query, q, sums, to)


@kernel()
def value_tile(page: Bytes, start: int, byte: int, count: int, factors: Floats, acc: Floats) -> None:
    """`acc` `[groups, head_dim]` gets 64 channels of `count` tokens added, whose bytes begin at `start` + `byte`.

    `factors[g * LIMIT + t]`, made ready, is a token's weight times its gain.
    """
    groups, dim = acc.shape
    quarter = dim // 4
    for g in range(0, groups, 4):
        first, to = g * 64, g * dim + byte
        if groups - g >= 4:
            _value_sums_4(page, start + byte, quarter, count, factors, first, acc, to)
        elif groups - g == 3:
            _value_sums_3(page, start + byte, quarter, count, factors, first, acc, to)
        elif groups - g == 2:
            _value_sums_2(page, start + byte, quarter, count, factors, first, acc, to)
        else:
            _value_sums_1(page, start + byte, quarter, count, factors, first, acc, to)


__all__ = ["LIMIT", "key_tile", "ready_factors", "ready_query", "value_tile"]
