"""Half-precision numbers and raw bits inside kernels: numba has neither float16 nor bfloat16.

Exact pages are viewed as unsigned integers of their item size and converted here, with integer arithmetic only, so that
the results do not depend on the CPU's half instructions: `widen` is exact, `narrow_*` round to nearest even. Built as
LLVM IR on 32-bit integers because numba itself widens small integers to 64 bits, which would halve the vector width.

`KIND` numbers the page dtypes for kernels; a kernel gets the page as `page_words(...)`: uint16 for the half types and
uint32 for float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from tierkv.geometry import Geometry
from tierkv.numba_setup import kernel

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
KIND: dict[str, int] = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}

_I32, _F32 = ir.IntType(32), ir.FloatType()
_ABS = 0x7FFFFFFF
_INFINITY = 0x7F800000


def page_words(geometry: Geometry, exact: NDArray[np.uint8]) -> NDArray[np.uint16] | NDArray[np.uint32]:
    """An exact page's bytes as `geometry.shape` unsigned integers of its item size (a view)."""
    if geometry.item_bytes == 4:
        return exact[: geometry.page_bytes].view(np.uint32).reshape(geometry.shape)
    return exact[: geometry.page_bytes].view(np.uint16).reshape(geometry.shape)


def _i32(value: int) -> ir.Constant:
    return ir.Constant(_I32, value)


def _emit_bfloat16_bits(builder: Any, word: Any) -> Any:
    return builder.shl(word, _i32(16))


def _emit_float16_bits(builder: Any, word: Any) -> Any:
    """float32 bits of a float16 in the low half of `word`."""
    sign = builder.shl(builder.and_(word, _i32(0x8000)), _i32(16))
    body = builder.shl(builder.and_(word, _i32(0x7FFF)), _i32(13))
    exponent = builder.and_(body, _i32(0x7C00 << 13))
    normal = builder.add(body, _i32((127 - 15) << 23))
    special = builder.add(body, _i32((255 - 31) << 23))  # infinity and NaN
    # A subnormal is mantissa * 2**-24: read it as 2**-14 + that, and take the 2**-14 off again.
    lifted = builder.bitcast(builder.add(body, _i32((127 - 14) << 23)), _F32)
    subnormal = builder.bitcast(builder.fsub(lifted, ir.Constant(_F32, 2.0**-14)), _I32)
    bits = builder.select(builder.icmp_unsigned("==", exponent, _i32(0)), subnormal, normal)
    bits = builder.select(builder.icmp_unsigned("==", exponent, _i32(0x7C00 << 13)), special, bits)
    return builder.or_(bits, sign)


def _emit_narrow_bfloat16(builder: Any, bits: Any) -> Any:
    odd = builder.and_(builder.lshr(bits, _i32(16)), _i32(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _i32(0x7FFF))), _i32(16))
    quiet = builder.or_(builder.lshr(bits, _i32(16)), _i32(0x40))
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, _i32(_ABS)), _i32(_INFINITY))
    return builder.select(is_nan, quiet, rounded)


def _emit_narrow_float16(builder: Any, bits: Any) -> Any:
    sign = builder.and_(builder.lshr(bits, _i32(16)), _i32(0x8000))
    body = builder.and_(bits, _i32(_ABS))
    odd = builder.and_(builder.lshr(body, _i32(13)), _i32(1))
    rebased = builder.sub(body, _i32((127 - 15) << 23))
    normal = builder.lshr(builder.add(rebased, builder.add(odd, _i32(0xFFF))), _i32(13))
    # Below 2**-14: adding 0.5 leaves the rounded count of 2**-24 steps in the low mantissa bits.
    shifted = builder.fadd(builder.bitcast(body, _F32), ir.Constant(_F32, 0.5))
    subnormal = builder.sub(builder.bitcast(shifted, _I32), _i32(0x3F000000))
    half = builder.select(builder.icmp_unsigned("<", body, _i32((127 - 14) << 23)), subnormal, normal)
    half = builder.select(builder.icmp_unsigned(">=", body, _i32(0x477FF000)), _i32(0x7C00), half)  # 65520 up
    is_nan = builder.icmp_unsigned(">", body, _i32(_INFINITY))
    return builder.or_(sign, builder.select(is_nan, _i32(0x7E00), half))


@intrinsic  # type: ignore[untyped-decorator]
def widen(typingctx: Any, word: Any, is_bfloat16: Any) -> Any:
    """float32 of one page word: uint32 holds float32 bits; uint16 holds bfloat16 if `is_bfloat16`, else float16."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0] == types.uint32:
            return builder.bitcast(args[0], _F32)
        wide = builder.zext(args[0], _I32)
        flag = builder.trunc(args[1], ir.IntType(1)) if args[1].type.width > 1 else args[1]
        bits = builder.select(flag, _emit_bfloat16_bits(builder, wide), _emit_float16_bits(builder, wide))
        return builder.bitcast(bits, _F32)

    if word in (types.uint16, types.uint32) and is_bfloat16 == types.boolean:
        return types.float32(word, types.boolean), emit
    return None


def _bits_intrinsic(emit_bits: Any, result: Any, name: str, doc: str) -> Any:
    """An intrinsic float32 -> unsigned integer from a function on 32-bit bits."""

    def typer(typingctx: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            bits = emit_bits(builder, builder.bitcast(args[0], _I32))
            return bits if result.bitwidth == 32 else builder.trunc(bits, ir.IntType(result.bitwidth))

        return (result(types.float32), emit) if value == types.float32 else None

    typer.__name__ = typer.__qualname__ = name
    typer.__doc__ = doc
    return intrinsic(typer)


bits_of = _bits_intrinsic(lambda builder, bits: bits, types.uint32, "bits_of", "uint32 bits of a float32.")
magnitude_bits = _bits_intrinsic(
    lambda builder, bits: builder.and_(bits, _i32(_ABS)), types.uint32, "magnitude_bits",
    "uint32 bits of |x|: they order like magnitudes, with infinity and NaN on top.",
)  # fmt: skip
narrow_bfloat16 = _bits_intrinsic(
    _emit_narrow_bfloat16,
    types.uint16,
    "narrow_bfloat16",
    "bfloat16 bits of a float32, rounded to nearest even.",
)
narrow_float16 = _bits_intrinsic(
    _emit_narrow_float16,
    types.uint16,
    "narrow_float16",
    "float16 bits of a float32, rounded to nearest even.",
)


@intrinsic  # type: ignore[untyped-decorator]
def float_of(typingctx: Any, bits: Any) -> Any:
    """The float32 with these uint32 bits."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F32)

    return (types.float32(types.uint32), emit) if bits == types.uint32 else None


@intrinsic  # type: ignore[untyped-decorator]
def load_float(typingctx: Any, data: Any, offset: Any) -> Any:
    """The little-endian float32 at byte `offset` of a contiguous uint8 array; any alignment, no bounds check."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        place = builder.gep(array.data, [args[1]])
        return builder.load(builder.bitcast(place, _F32.as_pointer()), align=1)

    if isinstance(data, types.Array) and data.dtype == types.uint8 and isinstance(offset, types.Integer):
        return types.float32(data, types.intp), emit
    return None


@intrinsic  # type: ignore[untyped-decorator]
def load_half(typingctx: Any, data: Any, offset: Any) -> Any:
    """The uint16 at byte `offset` of a contiguous uint8 array; any alignment, no bounds check."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        place = builder.bitcast(builder.gep(array.data, [args[1]]), ir.IntType(16).as_pointer())
        return builder.load(place, align=1)

    if isinstance(data, types.Array) and data.dtype == types.uint8 and isinstance(offset, types.Integer):
        return types.uint16(data, types.intp), emit
    return None


@intrinsic  # type: ignore[untyped-decorator]
def store_float(typingctx: Any, data: Any, offset: Any, value: Any) -> Any:
    """Write a float32 at byte `offset` of a contiguous uint8 array; any alignment, no bounds check."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        place = builder.gep(array.data, [args[1]])
        builder.store(args[2], builder.bitcast(place, _F32.as_pointer()), align=1)
        return context.get_dummy_value()

    if isinstance(data, types.Array) and data.dtype == types.uint8 and isinstance(offset, types.Integer):
        return types.void(data, types.intp, types.float32), emit
    return None


_TOP_FLOAT32 = np.float32(np.finfo(np.float32).max)
_TOP_FLOAT16 = np.float32(np.finfo(np.float16).max)
_TOP_BFLOAT16 = np.float32(3.3895314e38)


@kernel()
def _clamp(value: np.float32, limit: np.float32) -> np.float32:
    return min(max(value, -limit), limit)


@kernel()
def store_clamped(
    words: NDArray[np.uint16] | NDArray[np.uint32], kind: int, row: NDArray[np.float32]
) -> None:
    """Round a row of values to the page dtype, saturating instead of overflowing."""
    if kind == FLOAT16:
        for channel in range(row.shape[0]):
            words[channel] = narrow_float16(_clamp(row[channel], _TOP_FLOAT16))
    elif kind == BFLOAT16:
        for channel in range(row.shape[0]):
            words[channel] = narrow_bfloat16(_clamp(row[channel], _TOP_BFLOAT16))
    else:
        for channel in range(row.shape[0]):
            words[channel] = bits_of(_clamp(row[channel], _TOP_FLOAT32))
