"""klt2's bit planes as vectors: 16 codes of 1 to 5 bits, one bit of all of them in 16 bits of a page.

Plane 0 holds the signs (1: negative), plane `1 + k` bit `k` of the magnitude index. Lanes are 16 tokens of a channel
(keys) or 16 channels of a token (values). LLVM IR on `<16 x ...>` vectors, for the reasons of `tiles.py`; a mask
register of AVX-512 is such a plane as it is. Arrays are flat and C-contiguous; nothing is bounds checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from tierkv.numba_setup import kernel
from tierkv.quant.columns import FLOATS, WORDS, Emitter, every_lane, magnitude, step_of
from tierkv.quant.klt_layout import GROUP
from tierkv.quant.klt_levels import BOUNDARIES, LEVELS, STEPS
from tierkv.quant.tiles import LANES, all_lanes, broadcast, store_floats

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_I16, _MASK = ir.IntType(16), ir.VectorType(ir.IntType(1), LANES)
ROWS = 8
"""Rows of a matrix that `multiply` takes at once."""

NEXT_INTO = 3
"""The cache that a matrix is fetched into ahead of its turn, as LLVM counts: the nearest."""


def _number(at: Emitter, value: int) -> ir.Constant:
    return ir.Constant(at.intp, value)


def _bounds(at: Emitter, bits: int, gains: Any) -> list[Any]:
    """What sizes are compared with: the bounds between levels, or one over the step, in units of `gains`."""
    builder = at.builder
    if bits in STEPS:
        return [builder.fdiv(every_lane(1.0), builder.fmul(every_lane(float(STEPS[bits])), gains))]
    return [builder.fmul(every_lane(float(bound)), gains) for bound in BOUNDARIES[bits]]


def _indices(at: Emitter, bits: int, size: Any, bounds: list[Any]) -> Any:
    """Magnitude indices of `size`."""
    builder, index = at.builder, all_lanes(WORDS, 0)
    if bits in STEPS:
        top = every_lane(len(LEVELS[bits]) - 1)
        place = builder.fmul(size, bounds[0])
        place = builder.select(builder.fcmp_ordered("<", place, top), place, top)  # and where it is NaN
        return builder.fptosi(place, WORDS)
    for bound in bounds:
        index = builder.add(index, builder.zext(builder.fcmp_ordered(">", size, bound), WORDS))
    return index


def _levels(at: Emitter, bits: int, index: Any) -> Any:
    """The magnitudes of the indices."""
    builder = at.builder
    if bits in STEPS:
        return builder.fmul(
            builder.fadd(builder.sitofp(index, FLOATS), every_lane(0.5)), every_lane(float(STEPS[bits]))
        )
    level = every_lane(float(LEVELS[bits][0]))
    for number, higher in enumerate(LEVELS[bits][1:]):
        level = builder.select(
            builder.icmp_unsigned(">", index, all_lanes(WORDS, number)), every_lane(float(higher)), level
        )
    return level


def _plane(at: Emitter, data: int, offset: Any, stride: Any, number: int) -> Any:
    """Where plane `number` lies, the first one being at byte `offset`."""
    step = at.builder.mul(stride, _number(at, number))
    return at.builder.bitcast(at.place(data, at.builder.add(offset, step)), _I16.as_pointer())


def _times(at: Emitter, first: Any, index: Any, step: Any) -> Any:
    return at.builder.add(first, at.builder.mul(index, step))


def _fitter(bits: int) -> Any:
    def typer(
        typingctx: Any, columns: Any, first: Any, gains: Any, weight: Any, along: Any, energy: Any
    ) -> Any:
        def emit(at: Emitter) -> None:
            builder = at.builder
            bounds, weight = _bounds(at, bits, at.lanes(2)), broadcast(builder, at.args[3])
            sums = [(array, cgutils.alloca_once_value(builder, at.lanes(array))) for array in (4, 5)]
            with cgutils.for_range(builder, _number(at, GROUP)) as loop:
                size = magnitude(builder, at.load(0, builder.add(at.args[1], loop.index)))
                level = _levels(at, bits, _indices(at, bits, size, bounds))
                for factor, (_, total) in zip((size, level), sums, strict=True):
                    part = builder.fmul(builder.fmul(factor, level), weight)
                    builder.store(builder.fadd(builder.load(total), part), total)
            for array, total in sums:
                store_floats(builder, at.place(array, _number(at, 0)), builder.load(total))

        return step_of("fifsff", emit, columns, first, gains, weight, along, energy)

    typer.__name__ = typer.__qualname__ = f"fit_{bits}"
    return intrinsic(typer)


def _packer(bits: int, by_row: bool) -> Any:
    """`by_row`: a gain belongs to a row, not to a lane."""

    def typer(
        typingctx: Any, columns: Any, first: Any, every: Any, count: Any, gains: Any,
        data: Any, offset: Any, stride: Any, step: Any,
    ) -> Any:  # fmt: skip
        def emit(at: Emitter) -> None:
            builder, gains = at.builder, at.lanes(4)
            gains = builder.select(builder.fcmp_ordered(">", gains, every_lane(0.0)), gains, every_lane(1.0))
            bounds = _bounds(at, bits, gains)
            by_lane = []
            if by_row:
                floats = ir.FloatType().as_pointer()
                by_lane = [
                    builder.bitcast(cgutils.alloca_once_value(builder, bound), floats) for bound in bounds
                ]
            live = builder.fcmp_ordered(">", at.lanes(4), every_lane(0.0))

            def of_row(row: Any) -> tuple[Any, list[Any]]:
                if not by_row:
                    return live, bounds
                single = at.single(4, row)
                taken = [broadcast(builder, builder.load(builder.gep(one, [row]))) for one in by_lane]
                return builder.fcmp_ordered(">", single, every_lane(0.0)), taken

            with cgutils.for_range(builder, at.args[3]) as loop:
                alive, limits = of_row(loop.index)
                x = at.load(0, _times(at, at.args[1], loop.index, at.args[2]))
                index = _indices(at, bits, magnitude(builder, x), limits)
                planes = [builder.fcmp_ordered("<", x, every_lane(0.0))]
                for bit in range(bits - 1):
                    masked = builder.and_(index, all_lanes(WORDS, 1 << bit))
                    planes.append(builder.icmp_unsigned("!=", masked, all_lanes(WORDS, 0)))
                start = _times(at, at.args[6], loop.index, at.args[8])
                for number, plane in enumerate(planes):
                    word = builder.bitcast(builder.and_(plane, alive), _I16)
                    builder.store(word, _plane(at, 5, start, at.args[7], number), align=1)

        return step_of("fiiifbiii", emit, columns, first, every, count, gains, data, offset, stride, step)

    typer.__name__ = typer.__qualname__ = f"pack_{bits}_{'rows' if by_row else 'lanes'}"
    return intrinsic(typer)


def _unpacker(bits: int) -> Any:
    def typer(
        typingctx: Any, data: Any, offset: Any, stride: Any, step: Any,
        columns: Any, first: Any, every: Any, count: Any,
    ) -> Any:  # fmt: skip
        def emit(at: Emitter) -> None:
            builder, nothing = at.builder, all_lanes(WORDS, 0)
            with cgutils.for_range(builder, at.args[7]) as loop:
                start = _times(at, at.args[1], loop.index, at.args[3])
                planes = [
                    builder.bitcast(builder.load(_plane(at, 0, start, at.args[2], number), align=1), _MASK)
                    for number in range(bits)
                ]
                index = nothing
                for bit, plane in enumerate(planes[1:]):
                    index = builder.or_(index, builder.select(plane, all_lanes(WORDS, 1 << bit), nothing))
                level = builder.bitcast(_levels(at, bits, index), WORDS)
                sign = builder.select(planes[0], all_lanes(WORDS, 0x80000000), nothing)
                row = _times(at, at.args[5], loop.index, at.args[6])
                at.store(4, row, 0, builder.bitcast(builder.or_(level, sign), FLOATS))

        return step_of("biiifiii", emit, data, offset, stride, step, columns, first, every, count)

    typer.__name__ = typer.__qualname__ = f"unpack_{bits}"
    return intrinsic(typer)


_fit_1, _fit_2, _fit_3, _fit_4, _fit_5 = (_fitter(bits) for bits in range(1, 6))
_lanes_1, _lanes_2, _lanes_3, _lanes_4, _lanes_5 = (_packer(bits, False) for bits in range(1, 6))
_rows_1, _rows_2, _rows_3, _rows_4, _rows_5 = (_packer(bits, True) for bits in range(1, 6))
_unpack_1, _unpack_2, _unpack_3, _unpack_4, _unpack_5 = (_unpacker(bits) for bits in range(1, 6))


@kernel()
def fit_group(
    bits: int, columns: Floats, first: int, gains: Floats, weight: np.float32, along: Floats, energy: Floats
) -> None:
    """What the least-squares gain is made of, for the 16 rows from `first` with the levels that `gains` `[16]` give:
    `along += |x| * level * weight`, `energy += level ** 2 * weight`, row after row.
    """
    if bits == 1:
        _fit_1(columns, first, gains, weight, along, energy)
    elif bits == 2:
        _fit_2(columns, first, gains, weight, along, energy)
    elif bits == 3:
        _fit_3(columns, first, gains, weight, along, energy)
    elif bits == 4:
        _fit_4(columns, first, gains, weight, along, energy)
    elif bits == 5:
        _fit_5(columns, first, gains, weight, along, energy)


@kernel()
def pack_columns(
    bits: int, columns: Floats, first: int, gains: Floats, data: Bytes, offset: int, stride: int
) -> None:
    """The codes of the 16 rows from `first` as planes from byte `offset`, `stride` bytes apart; a lane whose gain is 0
    gives zeros.
    """
    if bits == 1:
        _lanes_1(columns, first, 1, GROUP, gains, data, offset, stride, stride)
    elif bits == 2:
        _lanes_2(columns, first, 1, GROUP, gains, data, offset, stride, 2 * stride)
    elif bits == 3:
        _lanes_3(columns, first, 1, GROUP, gains, data, offset, stride, 3 * stride)
    elif bits == 4:
        _lanes_4(columns, first, 1, GROUP, gains, data, offset, stride, 4 * stride)
    elif bits == 5:
        _lanes_5(columns, first, 1, GROUP, gains, data, offset, stride, 5 * stride)


@kernel()
def pack_rows(
    bits: int, rows: Floats, first: int, every: int, count: int, gains: Floats, data: Bytes, offset: int, step: int
) -> None:  # fmt: skip
    """The codes of `count` rows, `every` one from `first`, that have a gain each, as planes of 2 bytes, those of a row
    `step` bytes after those of the one before. A row whose gain is 0 gives zeros.
    """
    if bits == 1:
        _rows_1(rows, first, every, count, gains, data, offset, 2, step)
    elif bits == 2:
        _rows_2(rows, first, every, count, gains, data, offset, 2, step)
    elif bits == 3:
        _rows_3(rows, first, every, count, gains, data, offset, 2, step)
    elif bits == 4:
        _rows_4(rows, first, every, count, gains, data, offset, 2, step)
    elif bits == 5:
        _rows_5(rows, first, every, count, gains, data, offset, 2, step)


@kernel()
def unpack_rows(
    bits: int, data: Bytes, offset: int, stride: int, step: int, columns: Floats, first: int, every: int, count: int
) -> None:  # fmt: skip
    """Levels of `count` rows, `every` one from `first`, whose planes begin `step` bytes apart. No bits are no levels:
    zeros.
    """
    if bits == 0:
        for row in range(first, first + count * every, every):
            columns[row * LANES : (row + 1) * LANES] = np.float32(0)
    elif bits == 1:
        _unpack_1(data, offset, stride, step, columns, first, every, count)
    elif bits == 2:
        _unpack_2(data, offset, stride, step, columns, first, every, count)
    elif bits == 3:
        _unpack_3(data, offset, stride, step, columns, first, every, count)
    elif bits == 4:
        _unpack_4(data, offset, stride, step, columns, first, every, count)
    elif bits == 5:
        _unpack_5(data, offset, stride, step, columns, first, every, count)


def _fetch(at: Emitter, array: int, index: Any) -> None:
    """Ask for the cache line of a float that will be read soon; any address may be asked for."""
    place, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    fetch = at.builder.module.declare_intrinsic(
        "llvm.prefetch", [place], ir.FunctionType(ir.VoidType(), [place, word, word, word])
    )
    to_read, data = word(0), word(1)
    at.builder.call(
        fetch, [at.builder.bitcast(at.place(array, index), place), to_read, word(NEXT_INTO), data]
    )


def _multiplier(name: str, doc: str, flags: tuple[str, ...]) -> Any:
    def typer(
        typingctx: Any, matrix: Any, start: Any, size: Any, terms: Any, ahead: Any, columns: Any, out: Any, row: Any
    ) -> Any:  # fmt: skip
        def emit(at: Emitter) -> None:
            builder, size = at.builder, at.args[2]
            sums = [cgutils.alloca_once_value(builder, every_lane(0.0)) for _ in range(ROWS)]
            first = _times(at, at.args[1], at.args[7], size)
            firsts = [_times(at, first, _number(at, i), size) for i in range(ROWS)]
            following = builder.add(first, at.args[4])
            with cgutils.for_range(builder, builder.udiv(at.args[3], _number(at, LANES))) as line:
                term = builder.mul(line.index, _number(at, LANES))
                with cgutils.for_range(builder, _number(at, ROWS)) as loop:
                    # Two terms a step, so that a line of each row is used up when one of each has been asked for. With
                    # more in a step LLVM adds up row after row, and waits for every sum.
                    for odd in range(LANES // ROWS):
                        within = _times(at, _number(at, odd), loop.index, _number(at, LANES // ROWS))
                        at_term = builder.add(term, within)
                        x = at.load(5, at_term)
                        for start, total in zip(firsts, sums, strict=True):
                            product = builder.fmul(at.single(0, builder.add(start, at_term)), x, flags=flags)
                            builder.store(builder.fadd(builder.load(total), product, flags=flags), total)
                    _fetch(at, 0, builder.add(_times(at, following, loop.index, size), term))
            for offset, total in enumerate(sums):
                at.store(6, at.args[7], offset, builder.load(total))

        return step_of("fiiiiffi", emit, matrix, start, size, terms, ahead, columns, out, row)

    typer.__name__ = typer.__qualname__ = name
    typer.__doc__ = (
        "Rows `row .. row + 7` of a `[size, size]` matrix (from float `start`) times `columns` `[size, 16]`, into "
        "`out`; of the columns of the matrix the first `terms`, a multiple of 16. The same rows of a matrix that lies "
        f"`ahead` floats further are fetched meanwhile. {doc}"
    )
    return intrinsic(typer)


multiply = _multiplier(
    "multiply", "Products are added in order, one by one: the result is the same on every machine.", ()
)
multiply_fused = _multiplier("multiply_fused", "With fused steps where the machine has them.", ("contract",))


__all__ = [
    "ROWS",
    "fit_group",
    "multiply",
    "multiply_fused",
    "pack_columns",
    "pack_rows",
    "unpack_rows",
]
