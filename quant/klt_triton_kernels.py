"""klt2 pages on a device: encode and decode of many pages a launch. Host side: `klt_triton.py`; format: `klt.py`.

One program takes the keys or the values (`SIDE`) of a layer and head in `PAGES` pages, as a tile of `PAGES * TOKENS`
rows, because each head has matrices of its own. Products are in three passes of tf32, about as exact as float32:
packed bytes equal the reference's except where a value lies that close to a boundary.

How many bits a channel has is known when a kernel runs, not when it is compiled. So every channel is treated alike:

- Eight codes (of eight tokens of a key channel, or eight channels of a value) are one byte in each plane. The sign
  plane's byte, and the bytes of the up to four other planes one above the other in a word, hold eight codes. A plane
  that a channel lacks is not read and counts as zeros.
- A magnitude is a cubic in its index, which goes through all levels of the channel's number of bits.

`channels` says of each channel of a record where its first plane lies behind the gain codes, and its bits:
`place * 8 + bits`. `quantizers` has eight floats for each number of bits: the cubic's coefficients, lowest first, three
boundaries, out of reach where there are fewer, and the inverse of an equal step, or 0.
"""

from __future__ import annotations

from tierkv.quant.rotated_triton_kernels import (
    ALIGNMENT,
    INFINITY_BITS,
    LARGEST_F32,
    MAGNITUDE_BITS,
    SIGN_BIT,
    block_exponent,
    by_row,
    centered,
    gain_code,
    gain_of,
    power_of_two,
)
from tierkv.triton_setup import kernel, tl

_NO_GAIN = tl.constexpr(255)
_LEAST_GAIN = tl.constexpr(2.0**-100)  # far below those of a block's tokens that have a code
_LOW_BITS = tl.constexpr(0x01010101)  # of a word's bytes
_GATHER = tl.constexpr(
    1 << 24 | 1 << 17 | 1 << 10 | 1 << 3
)  # times low bits of bytes: the four as bits 24 to 27
_SCATTER = tl.constexpr(
    1 | 1 << 7 | 1 << 14 | 1 << 21
)  # times a number below 16: its bits as low bits of bytes


@kernel
def magnitude(index: tl.tensor, bits: tl.tensor, quantizers: tl.tensor) -> tl.tensor:
    """Levels of magnitude indices, by each channel's bits."""
    curve = quantizers + bits * 8
    x = index.to(tl.float32)
    level = tl.load(curve + 2) + x * tl.load(curve + 3)
    level = tl.load(curve + 1) + x * level
    return tl.load(curve) + x * level


@kernel
def _indices(size: tl.tensor, gain: tl.tensor, bits: tl.tensor, quantizers: tl.tensor) -> tl.tensor:
    """Magnitude indices of absolute values `[rows, channels]` under each row's gain."""
    cuts = quantizers + bits * 8 + 4
    index = (size > gain[:, None] * tl.load(cuts)[None, :]).to(tl.int32)
    index += (size > gain[:, None] * tl.load(cuts + 1)[None, :]).to(tl.int32)
    index += (size > gain[:, None] * tl.load(cuts + 2)[None, :]).to(tl.int32)
    steps = size * ((1.0 / tl.maximum(gain, _LEAST_GAIN))[:, None] * tl.load(cuts + 3)[None, :])
    last = ((1 << tl.maximum(bits - 1, 0)) - 1).to(tl.float32)
    return index + tl.minimum(steps, last[None, :]).to(tl.int32)


@kernel
def _levels(
    place: tl.tensor, inside: tl.tensor, bits: tl.tensor, quantizers: tl.tensor, STRIDE: tl.constexpr,
    LANES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Levels `[octets * LANES, others]` from sign bytes at `place` `[octets, others]` and planes STRIDE bytes apart."""
    sign = tl.load(place, mask=inside & (bits > 0), other=0).to(tl.int32)
    word = tl.load(place + STRIDE, mask=inside & (bits > 1), other=0).to(tl.int32)
    word |= tl.load(place + 2 * STRIDE, mask=inside & (bits > 2), other=0).to(tl.int32) << 8
    word |= tl.load(place + 3 * STRIDE, mask=inside & (bits > 3), other=0).to(tl.int32) << 16
    word |= tl.load(place + 4 * STRIDE, mask=inside & (bits > 4), other=0).to(tl.int32) << 24
    lane = tl.arange(0, LANES)[None, :, None]
    index = (((word[:, None, :] >> lane) & _LOW_BITS) * _GATHER) >> 24
    level = magnitude(index, bits[:, None, :], quantizers)
    negative = (sign[:, None, :] << (31 - lane)) & SIGN_BIT
    level = (level.to(tl.int32, bitcast=True) | negative).to(tl.float32, bitcast=True)
    return tl.reshape(level, (place.shape[0] * LANES, place.shape[1]))


@kernel
def key_levels(
    packed: tl.tensor, offsets: tl.tensor, first: tl.tensor, last: tl.tensor, start: tl.tensor, channels: tl.tensor,
    channel: tl.tensor, quantizers: tl.tensor, TOKENS: tl.constexpr, DIM: tl.constexpr, PAGES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Levels `[PAGES * TOKENS, channels]` of the keys of pages from `first`, 0 beyond DIM.

    offsets: `[pages]` int64 byte offsets of pages, `start` of the block in each. channels: those of the record.
    """
    place, inside, bits = _key_planes(
        packed, offsets, first, last, start, channels, channel, TOKENS, DIM, PAGES
    )
    LANES: tl.constexpr = 8 if TOKENS > 8 else TOKENS
    return _levels(place, inside, bits, quantizers, TOKENS // LANES, LANES)


@kernel
def _key_planes(
    packed: tl.tensor, offsets: tl.tensor, first: tl.tensor, last: tl.tensor, start: tl.tensor, channels: tl.tensor,
    channel: tl.tensor, TOKENS: tl.constexpr, DIM: tl.constexpr, PAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Where the sign bytes of `[octets of tokens, channels]` lie, which are there, and the channels' bits."""
    OCTETS: tl.constexpr = TOKENS // 8 if TOKENS > 8 else 1
    octet = tl.arange(0, PAGES * OCTETS)
    page = first + octet // OCTETS
    inside = page < last
    offset = tl.load(offsets + page, mask=inside, other=0) + (start + TOKENS + octet % OCTETS)
    form = tl.load(channels + channel, mask=channel < DIM, other=0)
    return packed + offset[:, None] + (form >> 3)[None, :], inside[:, None], (form & 7)[None, :]


@kernel
def value_levels(
    packed: tl.tensor, rows: tl.tensor, live: tl.tensor, channels: tl.tensor, octet: tl.tensor, quantizers: tl.tensor,
    DIM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Levels `[8 * octets, rows]` of values whose planes start at byte `rows`, for octets of channels."""
    place, inside, bits = _value_planes(packed, rows, live, channels, octet, DIM)
    return _levels(place, inside, bits, quantizers, 2, 8)


@kernel
def _value_planes(
    packed: tl.tensor,
    rows: tl.tensor,
    live: tl.tensor,
    channels: tl.tensor,
    octet: tl.tensor,
    DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Where the sign bytes of `[octets of channels, rows]` lie, which are there, and the octets' bits."""
    form = tl.load(channels + 8 * octet, mask=8 * octet < DIM, other=0)
    return packed + rows[None, :] + (form >> 3)[:, None], live[None, :], (form & 7)[:, None]


@kernel
def _store_planes(
    code: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    bits: tl.tensor,
    STRIDE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """What `_levels` reads: codes `[octets * LANES, others]`, each `2 * index` and 1 where negative."""
    code = tl.reshape(code, (place.shape[0], LANES, place.shape[1]))
    lane = tl.arange(0, LANES)[None, :, None]
    sign = tl.sum((code & 1) << lane, 1)
    word = tl.sum((((code >> 1) * _SCATTER) & _LOW_BITS) << lane, 1)
    tl.store(place, sign.to(tl.uint8), mask=inside & (bits > 0))
    for plane in tl.static_range(4):
        byte = ((word >> (8 * plane)) & 255).to(tl.uint8)
        tl.store(place + (plane + 1) * STRIDE, byte, mask=inside & (bits > plane + 1))


@kernel
def encode_side(
    exact: tl.tensor, sources: tl.tensor, counts: tl.tensor, packed: tl.tensor, packed_floats: tl.tensor,
    targets: tl.tensor, flags: tl.tensor, pages: tl.tensor, means: tl.tensor, analysis: tl.tensor, blocks: tl.tensor,
    channels: tl.tensor, costs: tl.tensor, quantizers: tl.tensor, SIDE: tl.constexpr, HEADS: tl.constexpr,
    TOKENS: tl.constexpr, DIM: tl.constexpr, ITEM: tl.constexpr, PAGES: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Pack the keys (`SIDE` 0) or values (1) of `[pages]`; `flags[page]` becomes 1 where a value is not finite.

    exact: the pool in the page dtype; packed, packed_floats: a pool in bytes and in float32.
    sources, targets: byte offsets into them. WIDTH: DIM filled up to a power of two, at least 16.
    blocks: `[layers, 2, HEADS, 2]`, byte offset of a block and bytes of a value token's planes.
    """
    ROWS: tl.constexpr = PAGES * TOKENS
    tiles = (pages + PAGES - 1) // PAGES
    program = tl.program_id(0)
    first, layer, head = program % tiles * PAGES, program // tiles // HEADS, program // tiles % HEADS
    record = (layer * 2 + SIDE) * HEADS + head
    row = tl.arange(0, ROWS)
    page, token = first + row // TOKENS, row % TOKENS
    here = page < pages
    live = here & (token < tl.load(counts + page, mask=here, other=0))
    source = tl.multiple_of(tl.load(sources + page, mask=here, other=0) // ITEM, ALIGNMENT // ITEM)
    rows = source + (record * (TOKENS * DIM) + token * DIM)
    mean_rows = (layer * HEADS + head) * DIM + 0 * row

    largest = tl.zeros((ROWS,), tl.int32)
    for start in range(0, DIM, CHUNK):
        channel = start + tl.arange(0, CHUNK)
        x = centered(exact, rows, live, means, mean_rows, channel, SIDE, DIM)
        largest = tl.maximum(largest, tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE_BITS, 1))
    page_largest = tl.max(tl.reshape(largest, (PAGES, TOKENS)), 1)
    own_page = first + tl.arange(0, PAGES)
    tl.store(flags + own_page, 1, mask=(own_page < pages) & (page_largest >= INFINITY_BITS))

    exponent = block_exponent(page_largest)
    row_power = by_row(power_of_two(-exponent), PAGES, TOKENS)
    column = tl.arange(0, WIDTH)
    valid = column < DIM
    u = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, DIM, CHUNK):
        channel = start + tl.arange(0, CHUNK)
        x = centered(exact, rows, live, means, mean_rows, channel, SIDE, DIM) * row_power[:, None]
        matrix = analysis + (record * DIM + column)[None, :] * DIM + channel[:, None]
        inside = (channel < DIM)[:, None] & valid[None, :]
        u = tl.dot(x, tl.load(matrix, mask=inside, other=0.0), u, input_precision="tf32x3")

    bits = tl.load(channels + record * DIM + column, mask=valid, other=0) & 7
    cost = tl.load(costs + record * DIM + column, mask=valid, other=0.0)
    size = tl.abs(u)
    energy = tl.sum(tl.where((bits > 0)[None, :], u * u, 0.0), 1)
    gain = tl.sqrt(energy / tl.maximum(tl.sum((bits > 0).to(tl.float32), 0), 1.0))
    level = magnitude(_indices(size, gain, bits, quantizers), bits[None, :], quantizers)
    energy = tl.sum(level * level * cost[None, :], 1)
    gain = tl.sum(size * level * cost[None, :], 1) / tl.where(energy > 0, energy, 1.0)
    top = tl.max(tl.reshape(gain, (PAGES, TOKENS)), 1)
    row_top = by_row(top, PAGES, TOKENS)
    gains = gain_code(gain, row_top)
    gain = row_top * gain_of(gains)
    code = 2 * _indices(size, gain, bits, quantizers) + (u < 0).to(tl.int32)
    code = tl.where((gain > 0)[:, None], code, 0)

    start, token_bytes = tl.load(blocks + record * 2), tl.load(blocks + record * 2 + 1)
    offset = tl.load(targets + page, mask=here, other=0) + start
    tl.store(packed + offset + token, tl.where(live, gains, 0).to(tl.uint8), mask=here)
    channels += record * DIM
    if SIDE == 0:
        LANES: tl.constexpr = 8 if TOKENS > 8 else TOKENS
        place, inside, bits = _key_planes(
            packed, targets, first, pages, start, channels, column, TOKENS, DIM, PAGES
        )
        _store_planes(code, place, inside, bits, TOKENS // LANES, LANES)
    else:
        rows = offset + TOKENS + token * token_bytes
        octet = tl.arange(0, WIDTH // 8)
        place, inside, bits = _value_planes(packed, rows, here, channels, octet, DIM)
        _store_planes(tl.trans(code), place, inside, bits, 2, 8)
    target = tl.load(targets + own_page, mask=own_page < pages, other=0)
    largest_gain = tl.minimum(top * power_of_two(exponent), LARGEST_F32)
    tl.store(packed_floats + target // 4 + record, largest_gain, mask=own_page < pages)


@kernel
def decode_side(
    packed: tl.tensor, packed_floats: tl.tensor, sources: tl.tensor, counts: tl.tensor, exact: tl.tensor,
    targets: tl.tensor, pages: tl.tensor, means: tl.tensor, synthesis: tl.tensor, blocks: tl.tensor,
    channels: tl.tensor, quantizers: tl.tensor, limit: tl.tensor, layer: tl.tensor, SIDE: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, ITEM: tl.constexpr, PAGES: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Unpack one side of `[pages]`, in the layers from `layer` on, into exact layout; unwritten tokens become 0.

    limit: the largest value of the page dtype. The other arguments are as of `encode_side`.
    """
    ROWS: tl.constexpr = PAGES * TOKENS
    tiles = (pages + PAGES - 1) // PAGES
    program = tl.program_id(0)
    first, head = program % tiles * PAGES, program // tiles % HEADS
    layer += program // tiles // HEADS
    record = (layer * 2 + SIDE) * HEADS + head
    row = tl.arange(0, ROWS)
    page, token = first + row // TOKENS, row % TOKENS
    here = page < pages
    live = here & (token < tl.load(counts + page, mask=here, other=0))
    source = tl.multiple_of(tl.load(sources + page, mask=here, other=0), ALIGNMENT)
    target = tl.multiple_of(tl.load(targets + page, mask=here, other=0) // ITEM, ALIGNMENT // ITEM)
    block, token_bytes = tl.load(blocks + record * 2), tl.load(blocks + record * 2 + 1)
    gain = tl.load(packed_floats + source // 4 + record, mask=here, other=0.0)
    gain *= gain_of(tl.load(packed + source + (block + token), mask=live, other=_NO_GAIN))

    column = tl.arange(0, WIDTH)
    valid = column < DIM
    x = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, DIM, CHUNK):
        channel = start + tl.arange(0, CHUNK)
        if SIDE == 0:
            level = key_levels(
                packed, sources, first, pages, block, channels + record * DIM, channel, quantizers,
                TOKENS, DIM, PAGES,
            )  # fmt: skip
        else:
            rows = source + (block + TOKENS + token * token_bytes)
            octet = start // 8 + tl.arange(0, CHUNK // 8)
            level = tl.trans(
                value_levels(packed, rows, live, channels + record * DIM, octet, quantizers, DIM)
            )
        matrix = synthesis + (record * DIM + column)[None, :] * DIM + channel[:, None]
        inside = (channel < DIM)[:, None] & valid[None, :]
        x = tl.dot(level, tl.load(matrix, mask=inside, other=0.0), x, input_precision="tf32x3")
    x *= gain[:, None]
    if SIDE == 0:
        x += tl.load(means + (layer * HEADS + head) * DIM + column, mask=valid, other=0.0)[None, :]
    x = tl.minimum(tl.maximum(x, -limit), limit)
    x = tl.where(live[:, None], x, 0.0).to(exact.dtype.element_ty)
    place = target + (record * (TOKENS * DIM) + token * DIM)
    tl.store(exact + place[:, None] + column[None, :], x, mask=here[:, None] & valid[None, :])
