"""Rotated pages on a device: encode and decode of many pages a launch. Host side: `rotated_triton.py`.

The format is that of the CPU codec, whose docstring draws it.

One program takes the keys or the values (`SIDE`) of a page's layer and of `GROUP` heads, as a tile of `GROUP * TOKENS`
rows. The rotation is a product with the matrix `M = diag(signs) H` of entries 1, -1 and 0 (0 between Hadamard blocks),
`rotate(x) = (x M) * scales`, `unrotate(y) = (y * scales) M^T`, on tensor cores: each factor is split in two parts of
tf32's eleven bits, so that a sum is off by about 2**-22 of its terms. Packed bytes therefore equal the reference's
except where a value lies that close to a boundary. Kernels get `M^T` as `forth` and `M` as `back`: tensor cores want
their second factor's columns contiguous.
"""

from __future__ import annotations

from tierkv.quant.lloyd import BOUNDARIES_4, BOUNDARIES_8, GAIN_STEPS, LEVELS_4, LEVELS_8, NO_GAIN
from tierkv.triton_setup import kernel, tl

_K1, _K2, _K3, _K4 = (tl.constexpr(float(level)) for level in LEVELS_8)
_KB1, _KB2, _KB3 = (tl.constexpr(float(boundary)) for boundary in BOUNDARIES_8)
_V1, _V2 = (tl.constexpr(float(level)) for level in LEVELS_4)
_VB1 = tl.constexpr(float(BOUNDARIES_4[0]))
_STEPS = tl.constexpr(GAIN_STEPS)
_NO_GAIN = tl.constexpr(NO_GAIN)
INFINITY_BITS = tl.constexpr(0x7F800000)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
SIGN_BIT = tl.constexpr(-0x80000000)
_TF32_BITS = tl.constexpr(-0x2000)  # all but the low 13 bits of a float32
LARGEST_F32 = tl.constexpr(3.4028234663852886e38)
_LEAST_FRACTION = tl.constexpr(2.0**-32)  # far below the least gain
ALIGNMENT = tl.constexpr(64)


@kernel
def _with_sign(level: tl.tensor, code: tl.tensor, BIT: tl.constexpr) -> tl.tensor:
    """Levels, negated where bit BIT of `code` is set."""
    sign = (code << (31 - BIT)) & SIGN_BIT
    return (level.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@kernel
def level_8(code: tl.tensor, octet: tl.tensor, LOW: tl.constexpr, SIGN: tl.constexpr) -> tl.tensor:
    """Levels of 3-bit codes: bits LOW and LOW + 1 of `code` index the magnitude, bit SIGN of `octet` is the sign.

    Tests of single bits and choices take one instruction each; attention over packed pages is mostly this.
    """
    odd = (code & (1 << LOW)) != 0
    level = tl.where((code & (2 << LOW)) != 0, tl.where(odd, _K4, _K3), tl.where(odd, _K2, _K1))
    return _with_sign(level, octet, SIGN)


@kernel
def level_4(code: tl.tensor, LOW: tl.constexpr) -> tl.tensor:
    """Levels of 2-bit codes: bit LOW of `code` is the magnitude index, bit LOW + 1 the sign."""
    return _with_sign(tl.where((code & (1 << LOW)) != 0, _V2, _V1), code, LOW + 1)


@kernel
def gain_of(code: tl.tensor) -> tl.tensor:
    """A gain code's fraction of its block's largest gain."""
    return tl.where(code == _NO_GAIN, 0.0, tl.exp2(code.to(tl.float32) * (-1.0 / _STEPS)))


@kernel
def gain_code(gain: tl.tensor, top: tl.tensor) -> tl.tensor:
    """The number of floors 2**-((c + 1/2) / 16) above `gain / top`; 255 from 2**-15.9 down and in a block of zeros."""
    fraction = tl.where(top > 0, gain / tl.where(top > 0, top, 1.0), 0.0)
    code = tl.ceil(tl.log2(tl.maximum(fraction, _LEAST_FRACTION)) * -_STEPS - 0.5)
    return tl.minimum(tl.maximum(code, 0.0), 255.0).to(tl.int32)


@kernel
def block_exponent(largest: tl.tensor) -> tl.tensor:
    """Of the power of two by which a block's largest magnitude (bits of a float32) comes to lie in [1, 2).

    Scaled by it, no square overflows.
    """
    return tl.minimum(tl.maximum((largest >> 23) - 127, -126), 126)


@kernel
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@kernel
def product(x: tl.tensor, matrix: tl.tensor, sums: tl.tensor) -> tl.tensor:
    """`sums + x @ matrix`, for a matrix of few bits, nearly as exact as float32."""
    high = (x.to(tl.int32, bitcast=True) & _TF32_BITS).to(tl.float32, bitcast=True)
    sums = tl.dot(high, matrix, sums, input_precision="tf32")
    return tl.dot(x - high, matrix, sums, input_precision="tf32")


@kernel
def block_start(
    layer: tl.tensor, head: tl.tensor, SIDE: tl.constexpr, LAYERS: tl.constexpr, HEADS: tl.constexpr,
    TOKENS: tl.constexpr, DIM: tl.constexpr, KEY_BITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Byte offset of a block in its packed page."""
    KEY: tl.constexpr = TOKENS + TOKENS * DIM * KEY_BITS // 8
    VALUE: tl.constexpr = TOKENS + TOKENS * DIM // 4
    start = 8 * LAYERS * HEADS + layer * (HEADS * (KEY + VALUE))
    if SIDE == 0:
        return start + head * KEY
    return start + HEADS * KEY + head * VALUE


@kernel
def centered(
    exact: tl.tensor, rows: tl.tensor, live: tl.tensor, means: tl.tensor, mean_rows: tl.tensor, channel: tl.tensor,
    SIDE: tl.constexpr, DIM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Channels of the rows in float32, keys less their mean; 0 where nothing is written."""
    inside = live[:, None] & (channel < DIM)[None, :]
    x = tl.load(exact + rows[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    if SIDE == 0:
        x -= tl.load(means + mean_rows[:, None] + channel[None, :], mask=inside, other=0.0)
    return x


@kernel
def by_row(block: tl.tensor, GROUP: tl.constexpr, TOKENS: tl.constexpr) -> tl.tensor:
    """`[GROUP]` spread over the rows of its tokens."""
    return tl.reshape(tl.broadcast_to(block[:, None], (GROUP, TOKENS)), (GROUP * TOKENS,))


@kernel
def _magnitudes(size: tl.tensor, gain: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Magnitude indices of absolute values `[rows, channels]` under each row's gain."""
    if BITS == 3:
        index = (size > gain[:, None] * _KB1).to(tl.int32) + (size > gain[:, None] * _KB2).to(tl.int32)
        return index + (size > gain[:, None] * _KB3).to(tl.int32)
    return (size > gain[:, None] * _VB1).to(tl.int32)


@kernel
def _level(index: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    if BITS == 3:
        return level_8(index, 0 * index, 0, 0)
    return level_4(index, 0)


@kernel
def encode_side(
    exact: tl.tensor, sources: tl.tensor, counts: tl.tensor, packed: tl.tensor, packed_floats: tl.tensor,
    targets: tl.tensor, flags: tl.tensor, means: tl.tensor, forth: tl.tensor, scales: tl.tensor,
    SIDE: tl.constexpr, LAYERS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    ITEM: tl.constexpr, KEY_BITS: tl.constexpr, GROUP: tl.constexpr, QUARTER: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Pack the keys (`SIDE` 0) or values (1) of `[pages]`; `flags[page]` becomes 1 where a value is not finite.

    exact: the pool in the page dtype; packed, packed_floats: a pool in bytes and in float32.
    sources, targets: byte offsets into them. QUARTER: DIM / 4 filled up to a power of two, at least 16.
    """
    GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    ROWS: tl.constexpr = GROUP * TOKENS
    BITS: tl.constexpr = KEY_BITS if SIDE == 0 else 2
    program = tl.program_id(0)
    page, layer = program // (GROUPS * LAYERS), program // GROUPS % LAYERS
    row = tl.arange(0, ROWS)
    head, token = program % GROUPS * GROUP + row // TOKENS, row % TOKENS
    count = tl.load(counts + page)
    live = (head < HEADS) & (token < count)
    source = tl.multiple_of(tl.load(sources + page) // ITEM, ALIGNMENT // ITEM)
    target = tl.multiple_of(tl.load(targets + page), ALIGNMENT)
    rows = source + ((layer * 2 + SIDE) * HEADS + head) * (TOKENS * DIM) + token * DIM
    mean_rows = (layer * HEADS + head) * DIM

    largest = tl.zeros((ROWS,), tl.int32)
    for start in range(0, DIM, CHUNK):
        channel = start + tl.arange(0, CHUNK)
        x = centered(exact, rows, live, means, mean_rows, channel, SIDE, DIM)
        bits = x.to(tl.int32, bitcast=True) & MAGNITUDE_BITS
        largest = tl.maximum(largest, tl.max(bits, 1))
    block_largest = tl.max(tl.reshape(largest, (GROUP, TOKENS)), 1)
    tl.store(flags + page, 1, mask=tl.max(block_largest, 0) >= INFINITY_BITS)

    exponent = block_exponent(block_largest)
    row_power = by_row(power_of_two(-exponent), GROUP, TOKENS)
    column = tl.arange(0, 4 * QUARTER)
    if SIDE == 0:
        rotated, valid = column, column < DIM
    else:  # column j of part r is channel r * DIM / 4 + j: the four values of a byte are QUARTER columns apart
        rotated, valid = column // QUARTER * (DIM // 4) + column % QUARTER, column % QUARTER < DIM // 4
    y = tl.zeros((ROWS, 4 * QUARTER), tl.float32)
    for start in range(0, DIM, CHUNK):
        channel = start + tl.arange(0, CHUNK)
        x = centered(exact, rows, live, means, mean_rows, channel, SIDE, DIM) * row_power[:, None]
        inside = (channel < DIM)[:, None] & valid[None, :]
        y = product(x, tl.load(forth + rotated[None, :] * DIM + channel[:, None], mask=inside, other=0.0), y)
    y *= tl.load(scales + rotated, mask=valid, other=0.0)[None, :]

    size = tl.abs(y)
    gain = tl.sqrt(tl.sum(y * y, 1) / DIM)
    level = tl.where(valid[None, :], _level(_magnitudes(size, gain, BITS), BITS), 0.0)
    gain = tl.sum(size * level, 1) / tl.sum(level * level, 1)
    top = tl.max(tl.reshape(gain, (GROUP, TOKENS)), 1)
    row_top = by_row(top, GROUP, TOKENS)
    code = gain_code(gain, row_top)
    gain = row_top * gain_of(code)
    coded = gain[:, None] > 0
    index = tl.where(coded, _magnitudes(size, gain, BITS), 0)
    negative = tl.where(coded & (y < 0), 1, 0)

    here = head < HEADS
    block = packed + target + block_start(layer, head, SIDE, LAYERS, HEADS, TOKENS, DIM, KEY_BITS)
    tl.store(block + token, tl.where(live, code, 0).to(tl.uint8), mask=here)
    quad = tl.arange(0, QUARTER)
    if SIDE == 0:
        parts = index if KEY_BITS == 3 else index + 2 * negative
        parts = tl.reshape(parts, (ROWS, QUARTER, 4)) << (2 * tl.arange(0, 4))[None, None, :]
        inside = here[:, None] & (quad < DIM // 4)[None, :]
        plane = block + TOKENS + token
        tl.store(plane[:, None] + quad[None, :] * TOKENS, tl.sum(parts, 2).to(tl.uint8), mask=inside)
        if KEY_BITS == 3:
            signs = tl.reshape(negative, (ROWS, QUARTER // 2, 8)) << tl.arange(0, 8)[None, None, :]
            octet = tl.arange(0, QUARTER // 2)
            inside = here[:, None] & (octet < DIM // 8)[None, :]
            plane += TOKENS * (DIM // 4)
            tl.store(plane[:, None] + octet[None, :] * TOKENS, tl.sum(signs, 2).to(tl.uint8), mask=inside)
    else:
        parts = tl.reshape(index + 2 * negative, (ROWS, 4, QUARTER)) << (2 * tl.arange(0, 4))[None, :, None]
        inside = here[:, None] & (quad < DIM // 4)[None, :]
        bytes_of_token = block + TOKENS + token * (DIM // 4)
        tl.store(bytes_of_token[:, None] + quad[None, :], tl.sum(parts, 1).to(tl.uint8), mask=inside)
    heads = program % GROUPS * GROUP + tl.arange(0, GROUP)
    largest_gain = tl.minimum(top * power_of_two(exponent), LARGEST_F32)
    header = packed_floats + target // 4 + (layer * 2 + SIDE) * HEADS + heads
    tl.store(header, largest_gain, mask=heads < HEADS)


@kernel
def _unpacked(
    block: tl.tensor, token: tl.tensor, here: tl.tensor, channel: tl.tensor, SIDE: tl.constexpr,
    TOKENS: tl.constexpr, DIM: tl.constexpr, KEY_BITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Levels `[rows, channels]` of the packed rows, still rotated; 0 beyond DIM."""
    valid = channel < DIM
    inside = here[:, None] & valid[None, :]
    if SIDE == 0:
        shift = 2 * (channel % 4)
        place = (block + TOKENS + token)[:, None] + (channel // 4 * TOKENS)[None, :]
    else:
        shift = 2 * (channel // (DIM // 4))
        place = (block + TOKENS + token * (DIM // 4))[:, None] + (channel % (DIM // 4))[None, :]
    code = tl.load(place, mask=inside, other=0).to(tl.int32) >> shift[None, :]
    if SIDE == 0 and KEY_BITS == 3:
        place = (block + TOKENS + TOKENS * (DIM // 4) + token)[:, None] + (channel // 8 * TOKENS)[None, :]
        negative = tl.load(place, mask=inside, other=0).to(tl.int32) >> (channel % 8)[None, :] & 1
        level = level_8(code, negative, 0, 0)
    else:
        level = level_4(code, 0)
    return tl.where(valid[None, :], level, 0.0)


@kernel
def decode_side(
    packed: tl.tensor, packed_floats: tl.tensor, sources: tl.tensor, counts: tl.tensor, exact: tl.tensor,
    targets: tl.tensor, means: tl.tensor, back: tl.tensor, scales: tl.tensor, limit: tl.tensor, layer: tl.tensor,
    SIDE: tl.constexpr, SPAN: tl.constexpr, LAYERS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    DIM: tl.constexpr, ITEM: tl.constexpr, KEY_BITS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Unpack one side of SPAN layers of `[pages]`, from `layer` on, into exact layout; unwritten tokens become 0.

    limit: the largest value of the page dtype. WIDTH: DIM filled up to a power of two, at least 16.
    """
    GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    ROWS: tl.constexpr = GROUP * TOKENS
    program = tl.program_id(0)
    page = program // (GROUPS * SPAN)
    layer += program // GROUPS % SPAN
    row = tl.arange(0, ROWS)
    head, token = program % GROUPS * GROUP + row // TOKENS, row % TOKENS
    here = head < HEADS
    live = here & (token < tl.load(counts + page))
    source = tl.multiple_of(tl.load(sources + page), ALIGNMENT)
    target = tl.multiple_of(tl.load(targets + page) // ITEM, ALIGNMENT // ITEM)
    block = packed + source + block_start(layer, head, SIDE, LAYERS, HEADS, TOKENS, DIM, KEY_BITS)
    top = tl.load(packed_floats + source // 4 + (layer * 2 + SIDE) * HEADS + head, mask=here, other=0.0)
    gain = top * gain_of(tl.load(block + token, mask=live, other=_NO_GAIN))

    column = tl.arange(0, WIDTH)
    valid = column < DIM
    x = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, DIM, CHUNK):
        channel = start + tl.arange(0, CHUNK)
        inside = channel < DIM
        level = _unpacked(block, token, live, channel, SIDE, TOKENS, DIM, KEY_BITS)
        level *= tl.load(scales + channel, mask=inside, other=0.0)[None, :]
        place = back + column[None, :] * DIM + channel[:, None]
        x = product(level, tl.load(place, mask=inside[:, None] & valid[None, :], other=0.0), x)
    x *= gain[:, None]
    if SIDE == 0:
        mean = means + (layer * HEADS + head)[:, None] * DIM + column[None, :]
        x += tl.load(mean, mask=live[:, None] & valid[None, :], other=0.0)
    x = tl.minimum(tl.maximum(x, -limit), limit)
    x = tl.where(live[:, None], x, 0.0).to(exact.dtype.element_ty)
    place = target + ((layer * 2 + SIDE) * HEADS + head) * (TOKENS * DIM) + token * DIM
    tl.store(exact + place[:, None] + column[None, :], x, mask=here[:, None] & valid[None, :])
