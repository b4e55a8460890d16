"""The steps of packing and unpacking pages with 16 tokens at a time as the lanes of a vector.

*Columns* are `[channels, 16]` float32, flat: row `c` holds channel `c` of 16 tokens. *Rows* are a token's channels, as
pages hold them. With tokens as lanes, sums run over channels in order, without a horizontal sum and without fast math:
that is what makes packed bytes equal the references' bit for bit.

LLVM IR on `<16 x ...>` vectors as in `tiles.py`, for the same reason. Arrays are flat and C-contiguous; nothing is
bounds checked. Everything comes in eights of channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from tierkv.quant.lloyd import BOUNDARIES_4, BOUNDARIES_8, LEVELS_4, LEVELS_8
from tierkv.quant.tiles import (
    LANES,
    TERMS,
    all_lanes,
    broadcast,
    is_vector_of,
    load_floats,
    pointer,
    store_floats,
)

_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_BYTES, WORDS, FLOATS = (ir.VectorType(scalar, LANES) for scalar in (_I8, _I32, _F32))
_HALF = ir.VectorType(_F32, TERMS)


def every_lane(value: float) -> ir.Constant:
    return ir.Constant(FLOATS, [float(np.float32(value))] * LANES)


def _shuffle(builder: Any, a: Any, b: Any, indices: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(indices)), indices))


def _transpose(builder: Any, vectors: list[Any]) -> list[Any]:
    """Both 8 x 8 halves of eight vectors, each transposed: entry `[i][h, j]` goes to `[j][h, i]`."""
    for step in (1, 2, 4):
        upper = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
        lower = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
        turned = list(vectors)
        for i in range(TERMS):
            if not i & step:
                pair = vectors[i], vectors[i + step]
                turned[i] = _shuffle(builder, *pair, upper)
                turned[i + step] = _shuffle(builder, *pair, lower)
        vectors = turned
    return vectors


class Emitter:
    """What the intrinsics below need of a function that is being built: arguments, and vectors in flat arrays."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.context, self.builder, self.args, self.types = context, builder, args, signature.args
        self.intp = context.get_value_type(types.intp)

    def place(self, array: int, index: Any) -> Any:
        return pointer(self.context, self.builder, self.types[array], self.args[array], index)

    def row(self, array: int, first: Any, offset: int = 0) -> Any:
        """Where row `first + offset` of the columns in argument `array` begins."""
        index = self.builder.add(first, ir.Constant(self.intp, offset))
        return self.place(array, self.builder.mul(index, ir.Constant(self.intp, LANES)))

    def load(self, array: int, first: Any, offset: int = 0) -> Any:
        return load_floats(self.builder, self.row(array, first, offset))

    def store(self, array: int, first: Any, offset: int, value: Any) -> None:
        store_floats(self.builder, self.row(array, first, offset), value)

    def lanes(self, array: int) -> Any:
        """The 16 floats of an argument `[16]`."""
        return load_floats(self.builder, self.place(array, ir.Constant(self.intp, 0)))

    def single(self, array: int, first: Any, offset: int = 0) -> Any:
        """One float of an array, in every lane."""
        index = self.builder.add(first, ir.Constant(self.intp, offset))
        return broadcast(self.builder, self.builder.load(self.place(array, index)))

    def halves(self, array: int, stride: Any, channel: Any, token: int) -> list[Any]:
        """Where the eight channels from `channel` of tokens `token` and `token + 8` begin."""
        places = []
        for one in (token, token + TERMS):
            start = self.builder.mul(stride, ir.Constant(self.intp, one))
            place = self.place(array, self.builder.add(start, channel))
            places.append(self.builder.bitcast(place, _HALF.as_pointer()))
        return places

    def store_bytes(self, array: int, index: Any, words: Any) -> None:
        place = self.builder.bitcast(self.place(array, index), _BYTES.as_pointer())
        self.builder.store(self.builder.trunc(words, _BYTES), place, align=1)


def step_of(kinds: str, emit: Callable[[Emitter], None], *given: Any) -> Any:
    """What an intrinsic without result returns. `kinds` has a letter an argument: floats, bytes, index, scalar."""
    arrays, scalars = {"f": types.float32, "b": types.uint8}, {"i": types.intp, "s": types.float32}
    if not all(
        is_vector_of(one, arrays[kind]) for kind, one in zip(kinds, given, strict=True) if kind in arrays
    ):
        return None

    def emit_all(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit(Emitter(context, builder, signature, args))
        return context.get_dummy_value()

    return types.void(*(scalars.get(kind, one) for kind, one in zip(kinds, given, strict=True))), emit_all


@intrinsic  # type: ignore[untyped-decorator]
def rows_to_columns(
    typingctx: Any, rows: Any, stride: Any, channel: Any, factors: Any, columns: Any
) -> Any:  # fmt: skip
    """Channels `channel .. channel + 7` of 16 tokens, `stride` floats apart, times their `factors`, into columns."""

    def emit(at: Emitter) -> None:
        builder, channel = at.builder, at.args[2]
        vectors = []
        for token in range(TERMS):
            low, high = (builder.load(place, align=4) for place in at.halves(0, at.args[1], channel, token))
            vectors.append(_shuffle(builder, low, high, list(range(LANES))))
        for offset, vector in enumerate(_transpose(builder, vectors)):
            at.store(4, channel, offset, builder.fmul(vector, at.single(3, channel, offset)))

    return step_of("fiiff", emit, rows, stride, channel, factors, columns)


@intrinsic  # type: ignore[untyped-decorator]
def columns_to_rows(
    typingctx: Any, columns: Any, channel: Any, signs: Any, gains: Any, centers: Any, rows: Any, stride: Any
) -> Any:  # fmt: skip
    """Eight columns, times the sign of the channel and the gain of the token, plus the channel's center, into rows."""

    def emit(at: Emitter) -> None:
        builder, channel, gains = at.builder, at.args[1], at.lanes(3)
        vectors = []
        for offset in range(TERMS):
            factor = builder.fmul(at.single(2, channel, offset), gains)
            scaled = builder.fmul(at.load(0, channel, offset), factor)
            vectors.append(builder.fadd(scaled, at.single(4, channel, offset)))
        for token, vector in enumerate(_transpose(builder, vectors)):
            for half, place in enumerate(at.halves(5, at.args[6], channel, token)):
                lanes = list(range(half * TERMS, (half + 1) * TERMS))
                builder.store(_shuffle(builder, vector, vector, lanes), place, align=4)

    return step_of("fiffffi", emit, columns, channel, signs, gains, centers, rows, stride)


def _butterfly(radix: int) -> Any:
    """An intrinsic for the Hadamard butterflies of `radix` columns."""

    def typer(typingctx: Any, columns: Any, first: Any, stride: Any, factor: Any) -> Any:
        def emit(at: Emitter) -> None:
            builder = at.builder
            rows = [
                builder.add(at.args[1], builder.mul(at.args[2], ir.Constant(at.intp, i)))
                for i in range(radix)
            ]
            vectors = [at.load(0, row) for row in rows]
            step = 1
            while step < radix:
                for i in range(radix):
                    if not i & step:
                        a, b = vectors[i], vectors[i + step]
                        vectors[i], vectors[i + step] = builder.fadd(a, b), builder.fsub(a, b)
                step *= 2
            scale = broadcast(builder, at.args[3])
            for row, vector in zip(rows, vectors, strict=True):
                at.store(0, row, 0, builder.fmul(vector, scale))

        return step_of("fiis", emit, columns, first, stride, factor)

    typer.__name__ = typer.__qualname__ = f"butterfly_{radix}"
    typer.__doc__ = (
        f"Columns `first + k * stride`, k < {radix}: {radix.bit_length() - 1} steps, times `factor`."
    )
    return intrinsic(typer)


butterfly_2, butterfly_4, butterfly_8 = _butterfly(2), _butterfly(4), _butterfly(8)


@intrinsic  # type: ignore[untyped-decorator]
def add_squares(typingctx: Any, columns: Any, first: Any, sums: Any) -> Any:
    """`sums[lane] += columns[row, lane] ** 2` for the eight rows from `first`, in order."""

    def emit(at: Emitter) -> None:
        total = at.lanes(2)
        for offset in range(TERMS):
            x = at.load(0, at.args[1], offset)
            total = at.builder.fadd(total, at.builder.fmul(x, x))
        store_floats(at.builder, at.place(2, ir.Constant(at.intp, 0)), total)

    return step_of("fif", emit, columns, first, sums)


def magnitude(builder: Any, x: Any) -> Any:
    bits = builder.and_(builder.bitcast(x, WORDS), all_lanes(WORDS, 0x7FFFFFFF))
    return builder.bitcast(bits, FLOATS)


def _bounds(builder: Any, boundaries: NDArray[np.float32], gains: Any) -> list[Any]:
    return [builder.fmul(every_lane(bound), gains) for bound in boundaries]


def _fitter(name: str, levels: NDArray[np.float32], boundaries: NDArray[np.float32]) -> Any:
    """An intrinsic that adds up what the least-squares gain of a code is made of."""

    def typer(typingctx: Any, columns: Any, first: Any, gains: Any, along: Any, energy: Any) -> Any:
        def emit(at: Emitter) -> None:
            builder = at.builder
            sums = [at.lanes(3), at.lanes(4)]
            bounds = _bounds(builder, boundaries, at.lanes(2))
            for offset in range(TERMS):
                size = magnitude(builder, at.load(0, at.args[1], offset))
                level = every_lane(levels[0])
                for bound, higher in zip(bounds, levels[1:], strict=True):
                    level = builder.select(builder.fcmp_ordered(">", size, bound), every_lane(higher), level)
                sums[0] = builder.fadd(sums[0], builder.fmul(size, level))
                sums[1] = builder.fadd(sums[1], builder.fmul(level, level))
            for array, total in zip((3, 4), sums, strict=True):
                store_floats(builder, at.place(array, ir.Constant(at.intp, 0)), total)

        return step_of("fifff", emit, columns, first, gains, along, energy)

    typer.__name__ = typer.__qualname__ = name
    typer.__doc__ = (
        "For eight rows from `first`, with the level that `gains` `[16]` give each entry: `along += |x| * level`, "
        "`energy += level ** 2`, `[16]` each, row after row."
    )
    return intrinsic(typer)


add_fit_4 = _fitter("add_fit_4", LEVELS_4, BOUNDARIES_4)
add_fit_8 = _fitter("add_fit_8", LEVELS_8, BOUNDARIES_8)


def _codes(at: Emitter, bounds: list[Any], live: Any, x: Any) -> tuple[Any, Any]:
    """Magnitude index and sign of each entry, both 0 in lanes that are not `live`."""
    builder, nothing = at.builder, all_lanes(WORDS, 0)
    size, index = magnitude(builder, x), nothing
    for bound in bounds:
        index = builder.add(index, builder.zext(builder.fcmp_ordered(">", size, bound), WORDS))
    negative = builder.zext(builder.fcmp_ordered("<", x, every_lane(0.0)), WORDS)
    return builder.select(live, index, nothing), builder.select(live, negative, nothing)


def _gathered(at: Emitter, parts: list[Any], bits: int) -> Any:
    """Small integers side by side, the first lowest."""
    total = parts[0]
    for index, part in enumerate(parts[1:], 1):
        total = at.builder.or_(total, at.builder.shl(part, all_lanes(WORDS, bits * index)))
    return total


@intrinsic  # type: ignore[untyped-decorator]
def pack_levels_8(
    typingctx: Any, columns: Any, first: Any, gains: Any, data: Any, low: Any, high: Any, signs: Any
) -> Any:  # fmt: skip
    """Eight rows as k3v2's key bytes: what `unpack_levels_8` reads. A lane whose gain is 0 gives zeros."""

    def emit(at: Emitter) -> None:
        gains = at.lanes(2)
        live = at.builder.fcmp_ordered(">", gains, every_lane(0.0))
        bounds = _bounds(at.builder, BOUNDARIES_8, gains)
        codes = [_codes(at, bounds, live, at.load(0, at.args[1], offset)) for offset in range(TERMS)]
        at.store_bytes(3, at.args[4], _gathered(at, [index for index, _ in codes[:4]], 2))
        at.store_bytes(3, at.args[5], _gathered(at, [index for index, _ in codes[4:]], 2))
        at.store_bytes(3, at.args[6], _gathered(at, [negative for _, negative in codes], 1))

    return step_of("fifbiii", emit, columns, first, gains, data, low, high, signs)


@intrinsic  # type: ignore[untyped-decorator]
def pack_levels_4(
    typingctx: Any, columns: Any, first: Any, step: Any, gains: Any, data: Any, offset: Any
) -> Any:  # fmt: skip
    """Rows `first + k * step`, k < 4, as the 16 bytes that `unpack_levels_4` reads. A lane whose gain is 0 gives 0."""

    def emit(at: Emitter) -> None:
        builder, gains = at.builder, at.lanes(3)
        live = builder.fcmp_ordered(">", gains, every_lane(0.0))
        bounds = _bounds(builder, BOUNDARIES_4, gains)
        parts = []
        for part in range(4):
            row = builder.add(at.args[1], builder.mul(at.args[2], ir.Constant(at.intp, part)))
            index, negative = _codes(at, bounds, live, at.load(0, row))
            parts.append(builder.or_(index, builder.shl(negative, all_lanes(WORDS, 1))))
        at.store_bytes(4, at.args[5], _gathered(at, parts, 2))

    return step_of("fiifbi", emit, columns, first, step, gains, data, offset)
