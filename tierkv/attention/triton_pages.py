"""Kernels that write tokens into pages and read pages whose values are in the model's space, exact ones and int8's or
nf4's (`quant/blockwise.py` draws their format).
"""

from __future__ import annotations

from tierkv.quant.blocks import BLOCK
from tierkv.quant.rotated_triton_kernels import ALIGNMENT
from tierkv.triton_setup import kernel, tl

_BLOCK = tl.constexpr(BLOCK)


@kernel
def rounded(x: tl.tensor, OUT: tl.constexpr) -> tl.tensor:
    """`x` in dtype OUT, to nearest even. For bfloat16 in integers: the interpreter's own conversion truncates."""
    if OUT.is_bf16() and not x.dtype.is_bf16():
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + (0x7FFF + ((bits >> 16) & 1)), 0x7FC00000)
        x = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(OUT)


@kernel
def write_tokens(
    pool: tl.tensor, offsets: tl.tensor, slots: tl.tensor, keys: tl.tensor, values: tl.tensor, layer: tl.tensor,
    key_token: tl.tensor, key_head: tl.tensor, key_channel: tl.tensor,
    value_token: tl.tensor, value_head: tl.tensor, value_channel: tl.tensor,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ITEM: tl.constexpr,
) -> None:  # fmt: skip
    """Key and value of a token and KV head into slot `slots[token]` of the exact page at byte `offsets[token]`.

    pool: in the page dtype, to which values are rounded. keys, values: any float dtype, with their three strides.
    """
    token, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    channel = tl.arange(0, WIDTH)
    inside = channel < DIM
    k = tl.load(keys + token * key_token + head * key_head + channel * key_channel, mask=inside, other=0.0)
    v = tl.load(
        values + token * value_token + head * value_head + channel * value_channel, mask=inside, other=0.0
    )
    place = tl.load(offsets + token) // ITEM + tl.load(slots + token) * DIM + channel
    place += (layer * 2 * HEADS + head) * (TOKENS * DIM)
    tl.store(pool + place, rounded(k, pool.dtype.element_ty), mask=inside)
    tl.store(pool + place + HEADS * TOKENS * DIM, rounded(v, pool.dtype.element_ty), mask=inside)


@kernel
def blockwise_values(
    packed: tl.tensor, numbers: tl.tensor, levels: tl.tensor, offset: tl.tensor, slot: tl.tensor, channel: tl.tensor,
    inside: tl.tensor, plane: tl.tensor, PLANES: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Values of tokens in the pages at `offset`, 0 where not `inside`; `offset`, `slot` and `channel` broadcast.

    packed, numbers: the pool in bytes and in float32. levels: of codes. plane: a layer's keys or values of one head, of
    PLANES in a page.
    """
    BLOCKS: tl.constexpr = (TOKENS * DIM + _BLOCK - 1) // _BLOCK
    index = slot * DIM + channel
    byte = (plane * (TOKENS * DIM) + index) * BITS // 8
    code = tl.load(packed + offset + (4 * PLANES * BLOCKS + byte), mask=inside, other=0).to(tl.int32)
    if BITS == 4:
        code = (code >> (4 - 4 * (channel % 2))) & 15
    largest = tl.load(numbers + offset // 4 + (plane * BLOCKS + index // _BLOCK), mask=inside, other=0.0)
    return tl.load(levels + code) * largest


@kernel
def read_pages(
    pool: tl.tensor, numbers: tl.tensor, levels: tl.tensor, offsets: tl.tensor, counts: tl.tensor, out: tl.tensor,
    layer: tl.tensor, LAYERS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, ITEM: tl.constexpr, BITS: tl.constexpr,
) -> None:  # fmt: skip
    """A layer of pages into `out` `[pages, 2, HEADS, TOKENS, DIM]`, zeros from `counts[page]` on.

    BITS: 0 for exact pages (`pool` in the page dtype), else those of a blockwise code (`pool` in bytes).
    """
    page, part = (tl.program_id(0) // (2 * HEADS)).to(tl.int64), tl.program_id(0) % (2 * HEADS)
    slot, channel = tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    valid = (channel < DIM)[None, :]
    inside = (slot < tl.load(counts + page))[:, None] & valid
    offset, plane = tl.multiple_of(tl.load(offsets + page), ALIGNMENT), layer * 2 * HEADS + part
    if BITS == 0:
        rows = offset // ITEM + plane * (TOKENS * DIM) + slot * DIM
        x = tl.load(pool + rows[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        x = blockwise_values(
            pool, numbers, levels, offset, slot[:, None], channel[None, :], inside, plane,
            LAYERS * 2 * HEADS, BITS, TOKENS, DIM,
        )  # fmt: skip
    place = (page * (2 * HEADS) + part) * (TOKENS * DIM) + slot[:, None] * DIM + channel[None, :]
    tl.store(out + place, x.to(out.dtype.element_ty), mask=valid)
