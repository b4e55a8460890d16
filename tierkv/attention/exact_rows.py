"""Products with exact keys and values in place, written in vector instructions: what a decode step spends its time on.

A page's keys (and values) of one KV head are rows of `head_dim` words. Some tokens are multiplied with some query heads
at a time, 16 channels a step, so that a row is widened once for all of them and sums stay in registers. Left to the
loop vectorizer this takes four times as long (measured): rows of 64 words are too short for it.

Everything is LLVM IR on `<16 x ...>` vectors (`quant.tiles`). Nothing is bounds checked; arrays are C-contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tierkv.attention.online_softmax import ZERO, Floats, Words
from tierkv.numba_setup import kernel
from tierkv.quant.floats import widen
from tierkv.quant.tiles import (
    LANES,
    broadcast,
    is_vector_of,
    load_floats,
    multiply_add,
    pointer,
    store_floats,
    zeros,
)

TOKENS = 4
"""Keys multiplied at once: their sums are added across lanes together."""

CHUNKS = 2
"""Times `LANES` channels of values summed at once: a cache line of half-precision words."""

LINE_BYTES = 64

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_SHORTS, _WORDS, _FLOATS = (ir.VectorType(scalar, LANES) for scalar in (_I16, _I32, _F32))
_QUAD = ir.VectorType(_F32, TOKENS)


# Pieces of IR ---------------------------------------------------------------------------------------------------


def _load_words(builder: Any, place: Any, bits: int, is_bfloat16: bool) -> Any:
    """`LANES` page words as float32."""
    if bits == 32:
        return builder.load(builder.bitcast(place, _FLOATS.as_pointer()), align=4)
    if is_bfloat16:
        words = builder.load(builder.bitcast(place, _SHORTS.as_pointer()), align=2)
        return builder.bitcast(
            builder.shl(builder.zext(words, _WORDS), ir.Constant(_WORDS, [16] * LANES)), _FLOATS
        )
    return builder.fpext(builder.load(builder.bitcast(place, _HALVES.as_pointer()), align=2), _FLOATS)


def _shuffle(builder: Any, a: Any, b: Any, mask: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(mask)), mask))


def _fold(builder: Any, a: Any, b: Any, width: int) -> Any:
    """Halve the lanes that make up one sum from `width` to half of it, sums of `b` beside those of `a`."""
    half = width // 2
    low = [lane for start in range(0, LANES, width) for lane in range(start, start + half)]
    both = [*low, *(LANES + lane for lane in low)]
    return builder.fadd(
        _shuffle(builder, a, b, both), _shuffle(builder, a, b, [lane + half for lane in both])
    )


def _sums_across(builder: Any, rows: list[Any]) -> Any:
    """The sum of each of `TOKENS` vectors, as one short vector."""
    first, second = (_fold(builder, rows[i], rows[i + 1], LANES) for i in (0, 2))
    quads = _fold(builder, first, second, LANES // 2)
    once = _fold(builder, quads, quads, 4)
    return _shuffle(builder, _fold(builder, once, once, 2), once, list(range(TOKENS)))


def _for_either_half(builder: Any, words: Any, is_bfloat16: Any, emit: Callable[[bool], None]) -> None:
    """`emit(is_bfloat16)` once for each meaning that a page word can have."""
    if words.dtype == types.uint32:
        emit(False)
        return
    with builder.if_else(is_bfloat16) as (then, otherwise):
        with then:
            emit(True)
        with otherwise:
            emit(False)


def _are_words(array: Any) -> bool:
    return isinstance(array, types.Array) and array.dtype in (types.uint16, types.uint32)


# Intrinsics -----------------------------------------------------------------------------------------------------


def _dots(tokens: int, heads: int) -> Any:
    """`out[out_at + h * out_step + k]` = product of query head `h` with the key that starts at word `at + k * dim`.

    Only of the first `dim - dim % LANES` channels; `query` and `out` are indexed flat.
    """

    def typer(
        typingctx: Any, words: Any, at: Any, dim: Any, is_bfloat16: Any, query: Any, query_at: Any,
        out: Any, out_at: Any, out_step: Any,
    ) -> Any:  # fmt: skip
        if not (
            _are_words(words) and is_vector_of(query, types.float32) and is_vector_of(out, types.float32)
        ):
            return None

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, at, dim, flag, _, query_at, _, out_at, out_step = args
            flag = cgutils.as_bool_bit(builder, flag)
            keys = [
                pointer(context, builder, words, args[0], builder.add(at, builder.mul(dim, at.type(k))))
                for k in range(tokens)
            ]
            asked = [
                pointer(
                    context,
                    builder,
                    query,
                    args[4],
                    builder.add(query_at, builder.mul(dim, query_at.type(h))),
                )
                for h in range(heads)
            ]
            totals = zeros(builder, tokens * heads)
            steps = builder.udiv(dim, dim.type(LANES))

            def along(as_bfloat16: bool) -> None:
                with cgutils.for_range(builder, steps) as loop:
                    channel = builder.mul(loop.index, dim.type(LANES))
                    rows = [
                        _load_words(builder, builder.gep(key, [channel]), words.dtype.bitwidth, as_bfloat16)
                        for key in keys
                    ]
                    for h, place in enumerate(asked):
                        factor = load_floats(builder, builder.gep(place, [channel]))
                        for k, row in enumerate(rows):
                            total = totals[h * tokens + k]
                            builder.store(multiply_add(builder, row, factor, builder.load(total)), total)

            _for_either_half(builder, words, flag, along)
            for h in range(heads):
                place = pointer(
                    context,
                    builder,
                    out,
                    args[6],
                    builder.add(out_at, builder.mul(out_step, out_step.type(h))),
                )
                mine = [builder.load(total) for total in totals[h * tokens : (h + 1) * tokens]]
                if tokens == TOKENS:
                    sums = _sums_across(builder, mine)
                    builder.store(sums, builder.bitcast(place, _QUAD.as_pointer()), align=4)
                else:
                    sums = _sums_across(builder, mine * TOKENS)
                    builder.store(builder.extract_element(sums, _I32(0)), place, align=4)
            return context.get_dummy_value()

        return types.void(
            words, types.intp, types.intp, types.boolean, query, types.intp, out, types.intp, types.intp
        ), emit

    typer.__name__ = typer.__qualname__ = f"dots_{tokens}x{heads}"
    return intrinsic(typer)


def _weighted(chunks: int, heads: int) -> Any:
    """`total[h * dim + channel]` += the sum over `count` tokens of `weights[weights_at + h * weights_step + t]` times
    the value word `at + t * dim`, for `chunks * LANES` channels; `total_at` is where the first head's first one lies.
    """

    def typer(
        typingctx: Any, words: Any, at: Any, dim: Any, is_bfloat16: Any, count: Any, weights: Any, weights_at: Any,
        weights_step: Any, total: Any, total_at: Any,
    ) -> Any:  # fmt: skip
        if not (
            _are_words(words) and is_vector_of(weights, types.float32) and is_vector_of(total, types.float32)
        ):
            return None

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, at, dim, flag, count, _, weights_at, weights_step, _, total_at = args
            flag = cgutils.as_bool_bit(builder, flag)
            intp = at.type
            factors = [
                pointer(
                    context,
                    builder,
                    weights,
                    args[5],
                    builder.add(weights_at, builder.mul(weights_step, intp(h))),
                )
                for h in range(heads)
            ]
            places = [
                builder.gep(
                    pointer(
                        context, builder, total, args[8], builder.add(total_at, builder.mul(dim, intp(h)))
                    ),
                    [intp(c * LANES)],
                )
                for h in range(heads)
                for c in range(chunks)
            ]
            totals = [cgutils.alloca_once(builder, _FLOATS) for _ in places]
            for place, kept in zip(places, totals, strict=True):
                builder.store(load_floats(builder, place), kept)
            start = pointer(context, builder, words, args[0], at)

            def along(as_bfloat16: bool) -> None:
                with cgutils.for_range(builder, count) as loop:
                    row = builder.gep(start, [builder.mul(loop.index, dim)])
                    values = [
                        _load_words(
                            builder,
                            builder.gep(row, [intp(c * LANES)]),
                            words.dtype.bitwidth,
                            as_bfloat16,
                        )
                        for c in range(chunks)
                    ]
                    for h, place in enumerate(factors):
                        factor = broadcast(builder, builder.load(builder.gep(place, [loop.index])))
                        for c, value in enumerate(values):
                            kept = totals[h * chunks + c]
                            builder.store(multiply_add(builder, value, factor, builder.load(kept)), kept)

            _for_either_half(builder, words, flag, along)
            for place, kept in zip(places, totals, strict=True):
                store_floats(builder, place, builder.load(kept))
            return context.get_dummy_value()

        return types.void(
            words, types.intp, types.intp, types.boolean, types.intp, weights, types.intp, types.intp,
            total, types.intp,
        ), emit  # fmt: skip

    typer.__name__ = typer.__qualname__ = f"weighted_{chunks}x{heads}"
    return intrinsic(typer)


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typingctx: Any, words: Any, at: Any, count: Any) -> Any:
    """Ask the memory for `count` words from `at` on, and go on."""
    if not _are_words(words):
        return None

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = LINE_BYTES * 8 // words.dtype.bitwidth
        data = context.make_array(words)(context, builder, args[0]).data
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        with cgutils.for_range_slice(builder, args[1].type(0), args[2], args[1].type(line)) as (index, _):
            place = builder.gep(data, [builder.add(args[1], index)])
            builder.call(ask, [builder.bitcast(place, byte), _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(words, types.intp, types.intp), emit


dots_1x1 = _dots(1, 1)
dots_4x1, dots_4x2, dots_4x3, dots_4x4 = (_dots(TOKENS, heads) for heads in (1, 2, 3, 4))
weighted_1x1 = _weighted(1, 1)
weighted_2x1, weighted_2x2, weighted_2x3, weighted_2x4 = (_weighted(CHUNKS, heads) for heads in (1, 2, 3, 4))


# Kernels --------------------------------------------------------------------------------------------------------


@kernel(fastmath=True)
def exact_logits(
    words: Words, at: int, is_bfloat16: bool, count: int, query: Floats, out: Floats, out_at: int, out_step: int
) -> None:  # fmt: skip
    """`out[out_at + g * out_step + t]` (flat) = product of query head `g` with the key of token `t < count`.

    `query` is `[group, head_dim]`; the keys start at word `at`.
    """
    group, dim = query.shape
    whole = count - count % 4
    for t in range(0, whole, 4):
        key, to = at + t * dim, out_at + t
        for g in range(0, group, 4):
            asked, place = g * dim, to + g * out_step
            if group - g >= 4:
                dots_4x4(words, key, dim, is_bfloat16, query, asked, out, place, out_step)
            elif group - g == 3:
                dots_4x3(words, key, dim, is_bfloat16, query, asked, out, place, out_step)
            elif group - g == 2:
                dots_4x2(words, key, dim, is_bfloat16, query, asked, out, place, out_step)
            else:
                dots_4x1(words, key, dim, is_bfloat16, query, asked, out, place, out_step)
    for t in range(whole, count):
        for g in range(group):
            dots_1x1(
                words,
                at + t * dim,
                dim,
                is_bfloat16,
                query,
                g * dim,
                out,
                out_at + g * out_step + t,
                out_step,
            )
    if dim % 16 > 0:
        flat = out.reshape(out.size)
        for t in range(count):
            for g in range(group):
                rest = ZERO
                for channel in range(dim - dim % 16, dim):
                    rest += query[g, channel] * widen(words[at + t * dim + channel], is_bfloat16)
                flat[out_at + g * out_step + t] += rest


@kernel(fastmath=True)
def exact_values(
    words: Words, at: int, is_bfloat16: bool, count: int, weights: Floats, weights_at: int, weights_step: int,
    total: Floats,
) -> None:  # fmt: skip
    """`total[g]` `[group, head_dim]` += sum over tokens `t < count` of `weights[weights_at + g * weights_step + t]`
    (flat) times the token's value; the values start at word `at`.
    """
    group, dim = total.shape
    paired = dim - dim % 32
    for channel in range(0, paired, 32):
        value = at + channel
        for g in range(0, group, 4):
            asked, place = weights_at + g * weights_step, g * dim + channel
            if group - g >= 4:
                weighted_2x4(
                    words, value, dim, is_bfloat16, count, weights, asked, weights_step, total, place
                )
            elif group - g == 3:
                weighted_2x3(
                    words, value, dim, is_bfloat16, count, weights, asked, weights_step, total, place
                )
            elif group - g == 2:
                weighted_2x2(
                    words, value, dim, is_bfloat16, count, weights, asked, weights_step, total, place
                )
            else:
                weighted_2x1(
                    words, value, dim, is_bfloat16, count, weights, asked, weights_step, total, place
                )
    if dim % 32 >= 16:
        for g in range(group):
            weighted_1x1(
                words, at + paired, dim, is_bfloat16, count, weights, weights_at + g * weights_step, weights_step,
                total, g * dim + paired,
            )  # fmt: skip
    if dim % 16 > 0:
        flat = weights.reshape(weights.size)
        for t in range(count):
            for g in range(group):
                factor = flat[weights_at + g * weights_step + t]
                for channel in range(dim - dim % 16, dim):
                    total[g, channel] += factor * widen(words[at + t * dim + channel], is_bfloat16)
