"""The products of `tile_products` in whole numbers of 16 bits, for machines that add up two of them at once.

One instruction (AVX-512 VNNI) multiplies 16 pairs and adds both products of a pair to a 32-bit sum, where a float
takes two; a permutation looks 32 levels up, where floats take two. What is looked up are levels as whole numbers of a
unit, rounded by less than 2e-5 of themselves; queries and weights are rounded to some 14 bits of their largest value.
Both are little beside what two or three bits a value lose. No sum can overflow: the limits see to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tierkv.numba_setup import kernel
from tierkv.quant.lloyd import LEVELS_4, LEVELS_8
from tierkv.quant.tiles import (
    LANES,
    TERMS,
    Floats,
    all_lanes,
    broadcast,
    is_vector_of,
    load_bytes,
    load_floats,
    multiply_add,
    pointer,
    store_floats,
)

PARTS = 4
"""Values of a token whose codes share a byte: a quarter of the channels apart."""

LIMIT = 64
"""Tokens whose factors are laid out at once."""

MOST = 2**31 - 1
"""What a sum may reach."""

NOTHING = 1e-30
"""Queries and factors no larger are taken as zero: steps so small are not to be divided by."""

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
_SHORTS, _WORDS, _FLOATS = ir.VectorType(_I16, 2 * LANES), *(ir.VectorType(t, LANES) for t in (_I32, _F32))
_HALF = ir.VectorType(_I16, LANES)


def _has_vnni() -> bool:
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        return False
    features = get_host_cpu_features()
    return all(features.get(name) for name in ("avx512f", "avx512bw", "avx512vnni"))


WHOLE = _has_vnni()
"""Whether the machine that kernels are compiled for multiplies this way."""


class Whole(NamedTuple):
    """Levels as `steps * unit`."""

    steps: tuple[int, ...]
    unit: float


def whole_levels(levels: Sequence[float], most: int) -> Whole:
    """The unit by which no level is more than `most` steps and the worst relative rounding is least."""
    exact = np.asarray(levels, np.float64)
    scales = np.linspace(most / 2, most, 20001) / exact.max()
    steps = np.rint(exact * scales[:, None])
    best = int(np.abs(steps / (exact * scales[:, None]) - 1).max(1).argmin())
    return Whole(tuple(int(step) for step in steps[best]), float(1 / scales[best]))


WHOLE_8, WHOLE_4 = whole_levels(LEVELS_8.tolist(), 4095), whole_levels(LEVELS_4.tolist(), 2047)

TOP_KEY = max(*WHOLE_8.steps, *WHOLE_4.steps)
FACTOR_STEPS = MOST // (LIMIT * WHOLE_4.steps[-1])
"""The largest factor of a token, in steps."""


@kernel()
def pack_query(row: Floats) -> None:
    """A query `[head_dim]` in place as int16 steps, then (at the middle float) what a step is worth.

    NaN and infinite queries are worth NaN.
    """
    dim = row.shape[0]
    largest = total = np.float32(0)
    for channel in range(dim):
        size = abs(row[channel])
        largest = max(largest, size)
        total += size
    steps = np.float32(min(32767, MOST // (dim // 2 * TOP_KEY)))
    inverse = steps / largest if largest > NOTHING else np.float32(0)
    packed = row.view(np.int16)
    for channel in range(dim):
        packed[channel] = np.int16(np.rint(row[channel] * inverse))
    row[dim // 2] = largest / steps if np.isfinite(total) else np.float32(np.nan)


@intrinsic  # type: ignore[untyped-decorator]
def pack_factors(typingctx: Any, factors: Any, at: Any, steps: Any) -> Any:
    """`steps * LANES` factors from `at` on, none negative, in place as int16 steps; at `at + LIMIT / 2` their worth."""
    if not is_vector_of(factors, types.float32):
        return None

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        intp = args[1].type
        place = pointer(context, builder, factors, args[0], args[1])
        top = cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, [0.0] * LANES))
        with cgutils.for_range(builder, args[2]) as loop:
            held, lanes = (
                builder.load(top),
                load_floats(builder, builder.gep(place, [_times_lanes(builder, loop)])),
            )
            builder.store(builder.select(builder.fcmp_ordered(">", lanes, held), lanes, held), top)
        held = builder.load(top)
        for half in (8, 4, 2, 1):
            across = ir.Constant(_WORDS, [(lane + half) % LANES for lane in range(LANES)])
            turned = builder.shuffle_vector(held, held, across)
            held = builder.select(builder.fcmp_ordered(">", turned, held), turned, held)
        largest = builder.extract_element(held, _I32(0))
        inverse = builder.select(
            builder.fcmp_ordered(">", largest, ir.Constant(_F32, NOTHING)),
            builder.fdiv(ir.Constant(_F32, float(FACTOR_STEPS)), largest),
            ir.Constant(_F32, 0.0),
        )
        spread, shorts = broadcast(builder, inverse), builder.bitcast(place, _HALF.as_pointer())
        with cgutils.for_range(builder, args[2]) as loop:
            lanes = load_floats(builder, builder.gep(place, [_times_lanes(builder, loop)]))
            near = multiply_add(builder, lanes, spread, ir.Constant(_FLOATS, [0.5] * LANES))
            words = builder.fptosi(near, _WORDS)
            builder.store(builder.trunc(words, _HALF), builder.gep(shorts, [loop.index]), align=4)
        worth = builder.fmul(largest, ir.Constant(_F32, 1.0 / FACTOR_STEPS))
        builder.store(worth, builder.gep(place, [intp(LIMIT // 2)]))
        return context.get_dummy_value()

    return types.void(factors, types.intp, types.intp), emit


def key_sums(key_bits: int, heads: int) -> Any:
    """`tile_products.key_sums` of queries that `pack_query` packed."""

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
            rows = [
                pointer(context, builder, query, args[5], builder.add(asked, builder.mul(dim, intp(h))))
                for h in range(heads)
            ]
            factors = [builder.bitcast(row, _I32.as_pointer()) for row in rows]
            codes, marks = (pointer(context, builder, page, args[0], place) for place in (low, signs))
            totals = _whole_zeros(builder, 2 * heads)
            with cgutils.for_range(builder, builder.udiv(dim, intp(TERMS))) as loop:
                first = builder.gep(codes, [builder.mul(loop.index, builder.mul(step, intp(2)))])
                halves = [load_bytes(builder, place) for place in (first, builder.gep(first, [step]))]
                mark = None
                if key_bits == 3:
                    mark = load_bytes(builder, builder.gep(marks, [builder.mul(loop.index, step)]))
                pair = builder.mul(loop.index, intp(TERMS // 2))
                for p, levels in enumerate(_key_levels(builder, halves, mark)):
                    for h, place in enumerate(factors):
                        factor = builder.load(builder.gep(place, [builder.add(pair, intp(p))]), align=4)
                        total = totals[2 * h + p % 2]  # two chains, so that one need not wait for the other
                        builder.store(_add_pairs(builder, builder.load(total), levels, factor), total)
            unit = (WHOLE_8 if key_bits == 3 else WHOLE_4).unit
            for h, row in enumerate(rows):
                worth = builder.load(builder.gep(row, [builder.udiv(dim, intp(2))]))
                both = [builder.sitofp(builder.load(total), _FLOATS) for total in totals[2 * h : 2 * h + 2]]
                scale = broadcast(builder, builder.fmul(worth, ir.Constant(_F32, unit)))
                at = builder.add(to, intp(h * LANES))
                place = pointer(context, builder, sums, args[7], at)
                store_floats(builder, place, builder.fmul(builder.fadd(*both), scale))
            return context.get_dummy_value()

        index = types.intp
        return types.void(page, index, index, index, index, query, index, sums, index), emit

    typer.__name__ = typer.__qualname__ = f"whole_key_sums_{key_bits}x{heads}"
    return intrinsic(typer)


def value_sums(heads: int) -> Any:
    """`tile_products.value_sums` of factors that `pack_factors` packed, two tokens at a time."""

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
            rows = [
                pointer(context, builder, factors, args[4], builder.add(first, intp(h * LIMIT)))
                for h in range(heads)
            ]
            weights = [builder.bitcast(row, _I32.as_pointer()) for row in rows]
            totals = _whole_zeros(builder, heads * PARTS)
            codes, last = pointer(context, builder, page, args[0], start), builder.sub(count, intp(1))
            with cgutils.for_range(builder, builder.udiv(builder.add(count, intp(1)), intp(2))) as loop:
                one = builder.mul(loop.index, intp(2))
                two = builder.add(one, intp(1))
                two = builder.select(builder.icmp_unsigned("<", two, last), two, last)
                words = [
                    load_bytes(builder, builder.gep(codes, [builder.mul(token, quarter)]))
                    for token in (one, two)
                ]
                both = builder.or_(words[0], builder.shl(words[1], all_lanes(_WORDS, 16)))
                levels = [_two_bits(builder, both, 2 * part) for part in range(PARTS)]
                for h, weight in enumerate(weights):
                    factor = builder.load(builder.gep(weight, [loop.index]), align=4)
                    for part, level in enumerate(levels):
                        total = totals[h * PARTS + part]
                        builder.store(_add_pairs(builder, builder.load(total), level, factor), total)
            for h, row in enumerate(rows):
                worth = builder.load(builder.gep(row, [intp(LIMIT // 2)]))
                scale = broadcast(builder, builder.fmul(worth, ir.Constant(_F32, WHOLE_4.unit)))
                for part in range(PARTS):
                    at = builder.add(to, builder.mul(quarter, intp(h * PARTS + part)))
                    place = pointer(context, builder, acc, args[6], at)
                    added = builder.sitofp(builder.load(totals[h * PARTS + part]), _FLOATS)
                    store_floats(
                        builder, place, multiply_add(builder, added, scale, load_floats(builder, place))
                    )
            return context.get_dummy_value()

        index = types.intp
        return types.void(page, index, index, index, factors, index, acc, index), emit

    typer.__name__ = typer.__qualname__ = f"whole_value_sums_{heads}"
    return intrinsic(typer)


# Pieces of IR ---------------------------------------------------------------------------------------------------


def _times_lanes(builder: Any, loop: Any) -> Any:
    return builder.mul(loop.index, loop.index.type(LANES))


def _whole_zeros(builder: Any, count: int) -> list[Any]:
    return [cgutils.alloca_once_value(builder, all_lanes(_WORDS, 0)) for _ in range(count)]


def _add_pairs(builder: Any, total: Any, shorts: Any, factor: Any) -> Any:
    """`total` plus both products of each lane's pair in `shorts` with the pair that the 32 bits of `factor` are."""
    kind = ir.FunctionType(_WORDS, [_WORDS, _WORDS, _WORDS])
    add = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpwssd.512")
    single = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), factor, _I32(0))
    spread = builder.shuffle_vector(single, ir.Constant(_WORDS, ir.Undefined), all_lanes(_WORDS, 0))
    return builder.call(add, [total, builder.bitcast(shorts, _WORDS), spread])


def _levels_at(builder: Any, table: Sequence[int], words: Any) -> Any:
    """The entries of `table` (of 32) that the lower five bits of each half of `words` name."""
    kind = ir.FunctionType(_SHORTS, [_SHORTS, _SHORTS])
    permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.hi.512")
    return builder.call(permute, [ir.Constant(_SHORTS, list(table)), builder.bitcast(words, _SHORTS)])


def _moved(builder: Any, words: Any, places: int) -> Any:
    """Bits shifted down by `places`; up, if that is negative."""
    if places == 0:
        return words
    move = builder.lshr if places > 0 else builder.shl
    return move(words, all_lanes(_WORDS, abs(places)))


def _two_bits(builder: Any, words: Any, position: int) -> Any:
    """Levels of the codes at bit `position` of both halves: magnitude in the lower bit, sign in the upper."""
    near, far = WHOLE_4.steps
    return _levels_at(builder, (near, far, -near, -far) * 8, _moved(builder, words, position))


def _signed_table(sign: int) -> list[int]:
    """Magnitude in the lower two bits of the index, sign in bit `sign` (2..4), the others of no account."""
    return [WHOLE_8.steps[i & 3] * (-1 if i >> sign & 1 else 1) for i in range(32)]


def _key_levels(builder: Any, halves: Sequence[Any], marks: Any) -> list[Any]:
    """Pairs of rows 0..7 from the bytes of rows 0..3, of rows 4..7, and (k3v2) of their signs.

    A byte's codes are of four rows; or-ed with itself 14 bits up, each half of a word starts with a row of its own.
    The same with signs, 15 bits up.
    """
    spread = [builder.or_(words, _moved(builder, words, -14)) for words in halves]
    if marks is None:
        return [_two_bits(builder, spread[p // 2], 4 * (p % 2)) for p in range(TERMS // 2)]
    signs = builder.or_(marks, _moved(builder, marks, -15))
    levels = []
    for p in range(
        TERMS // 2
    ):  # the signs of pair p are bits 2 p of the halves: to bit 2 or 4, whichever is nearer
        place = 2 if p < 2 else 4
        magnitude, sign = _moved(builder, spread[p // 2], 4 * (p % 2)), _moved(builder, signs, 2 * p - place)
        kept = builder.and_(magnitude, all_lanes(_WORDS, 0x00030003))
        others = builder.and_(sign, all_lanes(_WORDS, 0xFFFCFFFC))
        levels.append(_levels_at(builder, _signed_table(place), builder.or_(kept, others)))
    return levels
