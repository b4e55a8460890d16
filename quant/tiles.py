"""The inner steps that both codecs' fused kernels share, written in vector instructions.

A tile row is 16 float32: 16 tokens (keys) or 16 channels (values), unpacked from the 16 bytes that hold them. Rows are
unpacked once and then multiplied for every query head. Everything is LLVM IR on `<16 x ...>` vectors, which LLVM fits
to the machine (AVX-512, AVX2, SSE, NEON): left to itself the loop vectorizer misses these short loops, and the kernels
are seven times slower (measured).

All arrays must be C-contiguous; nothing is bounds checked. Tiles live on the stack (`stack_floats`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from tierkv.quant.lloyd import LEVELS_4, LEVELS_8

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

LANES = 16
"""Values a tile row."""

TERMS = 8
"""Rows that `add_rows` adds up."""

_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_BYTES, _WORDS, _FLOATS = (ir.VectorType(scalar, LANES) for scalar in (_I8, _I32, _F32))
_MAY_FUSE = ("contract",)


def all_lanes(vector: Any, value: int) -> ir.Constant:
    return ir.Constant(vector, [value] * LANES)


def _level(value: float) -> ir.Constant:
    """Every lane the bits of a float32."""
    return all_lanes(_WORDS, int(np.float32(value).view(np.uint32)))


def pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def load_bytes(builder: Any, place: Any) -> Any:
    """16 bytes as 32-bit words."""
    return builder.zext(builder.load(builder.bitcast(place, _BYTES.as_pointer()), align=1), _WORDS)


def load_floats(builder: Any, place: Any) -> Any:
    return builder.load(builder.bitcast(place, _FLOATS.as_pointer()), align=4)


def store_floats(builder: Any, place: Any, value: Any) -> None:
    builder.store(value, builder.bitcast(place, _FLOATS.as_pointer()), align=4)


def broadcast(builder: Any, value: Any) -> Any:
    single = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(
        single, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_WORDS, [0] * LANES)
    )


def _bit(builder: Any, words: Any, position: int) -> Any:
    masked = builder.and_(words, all_lanes(_WORDS, 1 << position))
    return builder.icmp_unsigned("!=", masked, all_lanes(_WORDS, 0))


def _with_sign(builder: Any, level: Any, words: Any, position: int) -> Any:
    """The level (as bits), negative where bit `position` of `words` is set."""
    moved = builder.shl(words, all_lanes(_WORDS, 31 - position))
    sign = builder.and_(moved, all_lanes(_WORDS, 0x80000000))
    return builder.bitcast(builder.or_(level, sign), _FLOATS)


def is_vector_of(array: Any, dtype: Any) -> bool:
    return isinstance(array, types.Array) and array.dtype == dtype


def _permutes() -> bool:
    """Whether the machine that kernels are compiled for looks 16 values up in one instruction."""
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        return False
    return bool(get_host_cpu_features().get("avx512f"))


PERMUTES = _permutes()


def lookup(builder: Any, table: Iterable[float], words: Any, position: int) -> Any:
    """The entry of `table` (of four) that the two bits of each word from bit `position` on name, as float32.

    With AVX-512 one shift and one permutation of a table that repeats, so that nothing has to be masked: two
    instructions beside five, and the ports that they take are what these kernels wait for.
    """
    if PERMUTES:
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _WORDS])
        permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
        places = builder.lshr(words, all_lanes(_WORDS, position))
        return builder.call(permute, [ir.Constant(_FLOATS, list(table) * (LANES // 4)), places])
    low_bit, high_bit = _bit(builder, words, position), _bit(builder, words, position + 1)
    levels = [_level(level) for level in table]
    outer = builder.select(low_bit, levels[3], levels[2])
    inner = builder.select(low_bit, levels[1], levels[0])
    return builder.bitcast(builder.select(high_bit, outer, inner), _FLOATS)


def levels_8(builder: Any, pairs: Sequence[Any], negative: Any) -> Iterator[Any]:
    """Rows 0..7 of k3v2 keys: magnitudes of rows 0..3 in the first words, of rows 4..7 in the second, and signs."""
    for row in range(TERMS):
        magnitude = lookup(builder, LEVELS_8, pairs[row // 4], 2 * (row % 4))
        yield _with_sign(builder, builder.bitcast(magnitude, _WORDS), negative, row)


def multiply_add(builder: Any, a: Any, b: Any, total: Any) -> Any:
    """`a * b + total`, rounded once where the machine can."""
    return builder.fadd(builder.fmul(a, b, flags=_MAY_FUSE), total, flags=_MAY_FUSE)


def zeros(builder: Any, count: int) -> list[Any]:
    """Vectors of zeros on the stack, which LLVM turns into registers."""
    return [cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, [0.0] * LANES)) for _ in range(count)]


@intrinsic  # type: ignore[untyped-decorator]
def unpack_levels_8(typingctx: Any, data: Any, low: Any, high: Any, signs: Any, tile: Any) -> Any:
    """Tile rows 0..7 from k3v2 key bytes at `low` (magnitudes of rows 0..3), `high` (rows 4..7) and `signs`."""
    if not (is_vector_of(data, types.uint8) and is_vector_of(tile, types.float32)):
        return None

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs = [load_bytes(builder, pointer(context, builder, data, args[0], args[i])) for i in (1, 2)]
        negative = load_bytes(builder, pointer(context, builder, data, args[0], args[3]))
        for row, value in enumerate(levels_8(builder, pairs, negative)):
            place = pointer(context, builder, tile, args[4], ir.Constant(args[1].type, row * LANES))
            store_floats(builder, place, value)
        return context.get_dummy_value()

    return types.void(data, types.intp, types.intp, types.intp, tile), emit


def _unpacker(name: str, doc: str, emit_value: Any) -> Any:
    """An intrinsic that spreads 16 bytes of four 2-bit codes over rows `row + k * step`, k = 0..3."""

    def typer(typingctx: Any, data: Any, offset: Any, tile: Any, row: Any, step: Any) -> Any:
        if not (is_vector_of(data, types.uint8) and is_vector_of(tile, types.float32)):
            return None

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            words = load_bytes(builder, pointer(context, builder, data, args[0], args[1]))
            lanes = ir.Constant(args[1].type, LANES)
            index = builder.mul(args[3], lanes)
            for part in range(4):
                value = emit_value(builder, words, 2 * part)
                store_floats(builder, pointer(context, builder, tile, args[2], index), value)
                index = builder.add(index, builder.mul(args[4], lanes))
            return context.get_dummy_value()

        return types.void(data, types.intp, tile, types.intp, types.intp), emit

    typer.__name__ = typer.__qualname__ = name
    typer.__doc__ = doc
    return intrinsic(typer)


def level_4(builder: Any, words: Any, position: int) -> Any:
    """Of the 2-bit code at bit `position` of each word: magnitude in the lower bit, sign in the upper."""
    near, far = LEVELS_4
    return lookup(builder, (near, far, -near, -far), words, position)


def _integer(builder: Any, words: Any, position: int) -> Any:
    moved = builder.lshr(words, all_lanes(_WORDS, position))
    return builder.uitofp(builder.and_(moved, all_lanes(_WORDS, 3)), _FLOATS)


unpack_levels_4 = _unpacker("unpack_levels_4", "k3v2 value codes as levels.", level_4)
unpack_integers = _unpacker("unpack_integers", "2-bit codes as 0.0 .. 3.0.", _integer)


@intrinsic  # type: ignore[untyped-decorator]
def add_rows(typingctx: Any, tile: Any, row: Any, factors: Any, first: Any, sums: Any, start: Any) -> Any:
    """`sums[start + lane] += sum over k < 8 of factors[first + k] * tile[row + k, lane]`, indices into flat arrays."""
    if not all(is_vector_of(array, types.float32) for array in (tile, factors, sums)):
        return None

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        intp = args[1].type
        place = pointer(context, builder, sums, args[4], args[5])
        rows = pointer(context, builder, tile, args[0], builder.mul(args[1], ir.Constant(intp, LANES)))
        coefficients = pointer(context, builder, factors, args[2], args[3])
        totals = [load_floats(builder, place), None]
        for term in range(TERMS):
            factor = builder.load(builder.gep(coefficients, [ir.Constant(intp, term)]))
            lanes = load_floats(builder, builder.gep(rows, [ir.Constant(intp, term * LANES)]))
            product = builder.fmul(broadcast(builder, factor), lanes, flags=_MAY_FUSE)
            chain = totals[term % 2]
            totals[term % 2] = product if chain is None else builder.fadd(product, chain, flags=_MAY_FUSE)
        store_floats(builder, place, builder.fadd(totals[0], totals[1]))
        return context.get_dummy_value()

    return types.void(tile, types.intp, factors, types.intp, sums, types.intp), emit


@intrinsic  # type: ignore[untyped-decorator]
def largest(typingctx: Any, values: Any, steps: Any) -> Any:
    """The largest of the first `steps * LANES` values of a flat array; -inf of none, and NaN is passed over."""
    if not is_vector_of(values, types.float32):
        return None

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        intp = args[1].type
        lowest = ir.Constant(_FLOATS, [float("-inf")] * LANES)
        top = cgutils.alloca_once_value(builder, lowest)

        def keep_larger(lanes: Any) -> Any:
            held = builder.load(top)
            held = builder.select(builder.fcmp_ordered(">", lanes, held), lanes, held)
            builder.store(held, top)
            return held

        with cgutils.for_range(builder, args[1]) as loop:
            place = pointer(context, builder, values, args[0], builder.mul(loop.index, intp(LANES)))
            keep_larger(load_floats(builder, place))
        for half in (8, 4, 2, 1):
            across = ir.Constant(_WORDS, [(lane + half) % LANES for lane in range(LANES)])
            held = builder.load(top)
            keep_larger(builder.shuffle_vector(held, held, across))
        return builder.extract_element(builder.load(top), ir.Constant(_I32, 0))

    return types.float32(values, types.intp), emit


@intrinsic  # type: ignore[untyped-decorator]
def borrowed(typingctx: Any, array: Any) -> Any:
    """The same array without a count of its references: slicing it costs nothing.

    Threads that slice one array pass the line of its count to and fro, which takes longer than a page's arithmetic. The
    caller of the kernel holds the array; it must not be returned or stored.
    """
    if not isinstance(array, types.Array):
        return None

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(array)(context, builder, args[0])
        view.meminfo = cgutils.get_null_value(view.meminfo.type)
        view.parent = cgutils.get_null_value(view.parent.type)
        return view._getvalue()

    return array(array), emit


def _stack(dtype: Any, scalar: Any, item_bytes: int, name: str) -> Any:
    """An intrinsic that makes a flat array of a literal size on the stack."""

    def typer(typingctx: Any, size: Any) -> Any:
        if not isinstance(size, types.IntegerLiteral):
            return None
        items = size.literal_value
        array_type = types.Array(dtype, 1, "C")

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            with builder.goto_entry_block():
                block = builder.alloca(ir.ArrayType(scalar, items))
                block.align = 64
            array = context.make_array(array_type)(context, builder)
            intp = context.get_value_type(types.intp)
            context.populate_array(
                array,
                data=builder.bitcast(block, scalar.as_pointer()),
                shape=(intp(items),),
                strides=(intp(item_bytes),),
                itemsize=intp(item_bytes),
                meminfo=None,
            )
            return array._getvalue()

        return array_type(size), emit

    typer.__name__ = typer.__qualname__ = name
    typer.__doc__ = "Uninitialized scratch on the stack: no heap call. It must not outlive the function."
    return intrinsic(typer)


stack_floats = _stack(types.float32, _F32, 4, "stack_floats")
stack_bytes = _stack(types.uint8, _I8, 1, "stack_bytes")
