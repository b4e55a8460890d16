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
from tierkv.quant.klt_levels import BOUNDARIES, LEVELS, STEPS
from tierkv.quant.tiles import LANES, all_lanes, broadcast, store_floats

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_I16, _MASK = ir.IntType(16), ir.VectorType(ir.IntType(1), LANES)
ROWS = 8
"""Rows of a matrix that `multiply` takes at once."""


def _indices(at: Emitter, bits: int, size: Any, gains: Any) -> Any:
    """Magnitude indices of `size` in units of `gains`."""
    builder, index = at.builder, all_lanes(WORDS, 0)
    if bits not in STEPS:
        for bound in BOUNDARIES[bits]:
            over = builder.fcmp_ordered(">", size, builder.fmul(every_lane(float(bound)), gains))
            index = builder.add(index, builder.zext(over, WORDS))
        return index
    top = every_lane(len(LEVELS[bits]) - 1)
    steps = builder.fdiv(every_lane(1.0), builder.fmul(every_lane(float(STEPS[bits])), gains))
    place = builder.fmul(size, steps)
    place = builder.select(builder.fcmp_ordered("<", place, top), place, top)  # and where it is NaN
    return builder.fptoui(place, WORDS)


def _levels(at: Emitter, bits: int, index: Any) -> Any:
    """The magnitudes of the indices."""
    builder = at.builder
    if bits in STEPS:
        return builder.fmul(
            builder.fadd(builder.uitofp(index, FLOATS), every_lane(0.5)), every_lane(float(STEPS[bits]))
        )
    level = every_lane(float(LEVELS[bits][0]))
    for number, higher in enumerate(LEVELS[bits][1:]):
        level = builder.select(
            builder.icmp_unsigned(">", index, all_lanes(WORDS, number)), every_lane(float(higher)), level
        )
    return level


def _plane(at: Emitter, data: int, offset: Any, stride: Any, number: int) -> Any:
    """Where plane `number` lies, the first one being at byte `offset`."""
    step = at.builder.mul(stride, ir.Constant(at.intp, number))
    return at.builder.bitcast(at.place(data, at.builder.add(offset, step)), _I16.as_pointer())


def _fitter(bits: int) -> Any:
    def typer(
        typingctx: Any, columns: Any, row: Any, gains: Any, weight: Any, along: Any, energy: Any
    ) -> Any:
        def emit(at: Emitter) -> None:
            builder = at.builder
            size = magnitude(builder, at.load(0, at.args[1]))
            level = _levels(at, bits, _indices(at, bits, size, at.lanes(2)))
            weight = broadcast(builder, at.args[3])
            for array, part in ((4, builder.fmul(size, level)), (5, builder.fmul(level, level))):
                total = builder.fadd(at.lanes(array), builder.fmul(part, weight))
                store_floats(builder, at.place(array, ir.Constant(at.intp, 0)), total)

        return step_of("fifsff", emit, columns, row, gains, weight, along, energy)

    typer.__name__ = typer.__qualname__ = f"fit_{bits}"
    return intrinsic(typer)


def _packer(bits: int) -> Any:
    def typer(typingctx: Any, columns: Any, row: Any, gains: Any, data: Any, offset: Any, stride: Any) -> Any:
        def emit(at: Emitter) -> None:
            builder, gains, x = at.builder, at.lanes(2), at.load(0, at.args[1])
            live = builder.fcmp_ordered(">", gains, every_lane(0.0))
            gains = builder.select(live, gains, every_lane(1.0))
            index = _indices(at, bits, magnitude(builder, x), gains)
            planes = [builder.fcmp_ordered("<", x, every_lane(0.0))]
            for bit in range(bits - 1):
                masked = builder.and_(index, all_lanes(WORDS, 1 << bit))
                planes.append(builder.icmp_unsigned("!=", masked, all_lanes(WORDS, 0)))
            for number, plane in enumerate(planes):
                word = builder.bitcast(builder.and_(plane, live), _I16)
                builder.store(word, _plane(at, 3, at.args[4], at.args[5], number), align=1)

        return step_of("fifbii", emit, columns, row, gains, data, offset, stride)

    typer.__name__ = typer.__qualname__ = f"pack_{bits}"
    return intrinsic(typer)


def _unpacker(bits: int) -> Any:
    def typer(typingctx: Any, data: Any, offset: Any, stride: Any, columns: Any, row: Any) -> Any:
        def emit(at: Emitter) -> None:
            builder, nothing = at.builder, all_lanes(WORDS, 0)
            planes = [
                builder.bitcast(builder.load(_plane(at, 0, at.args[1], at.args[2], number), align=1), _MASK)
                for number in range(bits)
            ]
            index = nothing
            for bit, plane in enumerate(planes[1:]):
                index = builder.or_(index, builder.select(plane, all_lanes(WORDS, 1 << bit), nothing))
            level = builder.bitcast(_levels(at, bits, index), WORDS)
            sign = builder.select(planes[0], all_lanes(WORDS, 0x80000000), nothing)
            at.store(3, at.args[4], 0, builder.bitcast(builder.or_(level, sign), FLOATS))

        return step_of("biifi", emit, data, offset, stride, columns, row)

    typer.__name__ = typer.__qualname__ = f"unpack_{bits}"
    return intrinsic(typer)


_fit_1, _fit_2, _fit_3, _fit_4, _fit_5 = (_fitter(bits) for bits in range(1, 6))
_pack_1, _pack_2, _pack_3, _pack_4, _pack_5 = (_packer(bits) for bits in range(1, 6))
_unpack_1, _unpack_2, _unpack_3, _unpack_4, _unpack_5 = (_unpacker(bits) for bits in range(1, 6))


@kernel()
def fit_rows(
    bits: int, columns: Floats, first: int, count: int, gains: Floats, weight: np.float32, along: Floats, energy: Floats
) -> None:  # fmt: skip
    """What the least-squares gain is made of, for `count` rows from `first` with the levels that `gains` `[16]` give:
    `along += |x| * level * weight`, `energy += level ** 2 * weight`, row after row.
    """
    for row in range(first, first + count):
        if bits == 1:
            _fit_1(columns, row, gains, weight, along, energy)
        elif bits == 2:
            _fit_2(columns, row, gains, weight, along, energy)
        elif bits == 3:
            _fit_3(columns, row, gains, weight, along, energy)
        elif bits == 4:
            _fit_4(columns, row, gains, weight, along, energy)
        elif bits == 5:
            _fit_5(columns, row, gains, weight, along, energy)


@kernel()
def pack_row(
    bits: int, columns: Floats, row: int, gains: Floats, data: Bytes, offset: int, stride: int
) -> None:
    """A row's codes as planes from byte `offset`, `stride` bytes apart; a lane whose gain is 0 gives zeros."""
    if bits == 1:
        _pack_1(columns, row, gains, data, offset, stride)
    elif bits == 2:
        _pack_2(columns, row, gains, data, offset, stride)
    elif bits == 3:
        _pack_3(columns, row, gains, data, offset, stride)
    elif bits == 4:
        _pack_4(columns, row, gains, data, offset, stride)
    elif bits == 5:
        _pack_5(columns, row, gains, data, offset, stride)


@kernel()
def unpack_rows(
    bits: int, data: Bytes, offset: int, stride: int, step: int, columns: Floats, first: int, count: int
) -> None:
    """Levels of `count` rows from `first`, whose planes begin `step` bytes apart. No bits are no levels: zeros."""
    if bits == 0:
        columns[first * LANES : (first + count) * LANES] = np.float32(0)
    elif bits == 1:
        for row in range(count):
            _unpack_1(data, offset + row * step, stride, columns, first + row)
    elif bits == 2:
        for row in range(count):
            _unpack_2(data, offset + row * step, stride, columns, first + row)
    elif bits == 3:
        for row in range(count):
            _unpack_3(data, offset + row * step, stride, columns, first + row)
    elif bits == 4:
        for row in range(count):
            _unpack_4(data, offset + row * step, stride, columns, first + row)
    elif bits == 5:
        for row in range(count):
            _unpack_5(data, offset + row * step, stride, columns, first + row)


def _multiplier(name: str, doc: str, flags: tuple[str, ...]) -> Any:
    def typer(typingctx: Any, matrix: Any, start: Any, size: Any, columns: Any, out: Any, row: Any) -> Any:
        def emit(at: Emitter) -> None:
            builder, size = at.builder, at.args[2]
            sums = [cgutils.alloca_once(builder, FLOATS) for _ in range(ROWS)]
            for total in sums:
                builder.store(every_lane(0.0), total)
            firsts = [
                builder.add(at.args[1], builder.mul(builder.add(at.args[5], ir.Constant(at.intp, i)), size))
                for i in range(ROWS)
            ]
            with cgutils.for_range(builder, size) as loop:
                x = at.load(3, loop.index)
                for first, total in zip(firsts, sums, strict=True):
                    product = builder.fmul(at.single(0, builder.add(first, loop.index)), x, flags=flags)
                    builder.store(builder.fadd(builder.load(total), product, flags=flags), total)
            for offset, total in enumerate(sums):
                at.store(4, at.args[5], offset, builder.load(total))

        return step_of("fiiffi", emit, matrix, start, size, columns, out, row)

    typer.__name__ = typer.__qualname__ = name
    typer.__doc__ = (
        "Rows `row .. row + 7` of a `[size, size]` matrix (from float `start`) times `columns` `[size, 16]`, into "
        f"`out`. {doc}"
    )
    return intrinsic(typer)


multiply = _multiplier(
    "multiply", "Products are added in order, one by one: the result is the same on every machine.", ()
)
multiply_fused = _multiplier("multiply_fused", "With fused steps where the machine has them.", ("contract",))


__all__ = ["ROWS", "fit_rows", "multiply", "multiply_fused", "pack_row", "unpack_rows"]
