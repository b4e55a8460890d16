"""Where things lie in a packed page of the rotated family (`rotated.py`)."""

from __future__ import annotations

from tierkv.numba_setup import kernel

MOST_CHANNELS = 1024
"""A tile of keys with more would not fit the buffer that pads it."""


@kernel()
def block_bytes(side: int, tokens: int, head_dim: int, key_bits: int) -> int:
    """Bytes of a block: gain codes, then level codes; `side` 0 is keys, 1 values."""
    return tokens + tokens * head_dim * (key_bits if side == 0 else 2) // 8


@kernel()
def block_offset(
    layer: int, side: int, head: int, layers: int, heads: int, tokens: int, head_dim: int, key_bits: int
) -> int:
    """Byte offset of a block in the packed page. Layer `layers` is the end of the page."""
    keys = block_bytes(0, tokens, head_dim, key_bits)
    values = block_bytes(1, tokens, head_dim, key_bits)
    start = 4 * layers * 2 * heads + layer * heads * (keys + values)
    return start + head * keys if side == 0 else start + heads * keys + head * values


@kernel()
def scale_offset(layer: int, side: int, head: int, heads: int) -> int:
    """Byte offset of a block's largest gain."""
    return 4 * ((layer * 2 + side) * heads + head)


@kernel()
def key_octets(block: int, tokens: int, head_dim: int, key_bits: int, token: int) -> tuple[int, int]:
    """Byte offsets of a token's codes of channels 0..3, and of its signs of channels 0..7 (k3v2).

    `block` is the key block's. Channels 4..7 lie `tokens` bytes behind; the next eight channels `2 * tokens` bytes,
    their signs `tokens`. Where there are no signs, as in rotated2, their offset is that of the codes.
    """
    low = block + tokens + token
    return low, low + tokens * head_dim // 4 if key_bits == 3 else low
