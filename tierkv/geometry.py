"""The shape of a page and the key under which its bytes may be read.

A page's exact bytes are one contiguous block `[layers, 2, kv_heads, page_tokens, head_dim]` (keys at
index 0 of the second axis, values at 1), so that a demotion is one copy. Layer views are strided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import xxhash

from tierkv.errors import ConfigError

DTypeName = Literal["float32", "float16", "bfloat16"]
ITEM_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

PAGE_TOKENS = 16
"""Tokens a page holds at most (MemDecay's page size)."""

LAYOUT_VERSION = 1
"""Part of every fingerprint: bytes laid out by another version are never read as these."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of one page.

    Args:
        num_layers: attention layers whose K/V live in pages.
        num_kv_heads: key/value heads a layer.
        head_dim: values a head.
        dtype: element type of exact pages.
        page_tokens: tokens a page holds at most.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DTypeName
    page_tokens: int = PAGE_TOKENS

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"page dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_tokens"):
            value = getattr(self, name)
            if not 1 <= value <= 65_536:
                raise ConfigError(f"{name} is {value}; it must be between 1 and 65,536")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """`[layers, 2, kv_heads, page_tokens, head_dim]`."""
        return (self.num_layers, 2, self.num_kv_heads, self.page_tokens, self.head_dim)

    @property
    def values(self) -> int:
        """Scalars in a page."""
        return self.num_layers * 2 * self.num_kv_heads * self.page_tokens * self.head_dim

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one exact page."""
        return self.values * self.item_bytes

    @property
    def token_bytes(self) -> int:
        """Exact K/V bytes of one token, all layers."""
        return self.page_bytes // self.page_tokens


def fingerprint(geometry: Geometry, model_id: str, codec: str) -> str:
    """A hash that is stable across processes and interpreters: two sides that disagree on it share no bytes."""
    parts = (
        LAYOUT_VERSION, model_id, codec,
        geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, geometry.dtype, geometry.page_tokens,
    )  # fmt: skip
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(parts))
