"""klt2 pages on a device: what the CPU codec does, for many pages at once. As in `rotated_triton.py`, nothing waits.

The state is taken apart once, into tensors by what kernels read together. Importing this module needs triton
(`ConfigError` without it); `tierkv.quant` does not import it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.quant.klt import KLT2
from tierkv.quant.klt_layout import GROUP, MAX_BITS, plane_bytes, record_floats
from tierkv.quant.klt_levels import BOUNDARIES, LEVELS, STEPS
from tierkv.quant.klt_triton_kernels import decode_side, encode_side
from tierkv.triton_setup import next_power_of_two, require_device

Floats = NDArray[np.float32]

TILE_ROWS = 64
"""Rows of a tile: a tensor core's height."""

CHUNK = 32
"""Channels that one step of a product takes."""

OUT_OF_REACH = 1e30
"""Of any value, in units of its token's gain: a boundary that a code lacks."""


def quantizers() -> Floats:
    """`[MAX_BITS + 1, 8]`: what kernels know of a number of bits (`klt_triton_kernels.py`)."""
    table = np.zeros((MAX_BITS + 1, 8), np.float32)
    table[:, 4:7] = OUT_OF_REACH
    for bits in range(1, MAX_BITS + 1):
        if bits in STEPS:
            step = STEPS[bits]
            table[bits, :2], table[bits, 7] = (step / 2, step), 1 / step
        else:
            points = np.arange(len(LEVELS[bits]))
            powers = points[:, None] ** points
            table[bits, : len(points)] = np.linalg.solve(powers.astype(np.float64), LEVELS[bits])
            table[bits, 4 : 4 + len(BOUNDARIES[bits])] = BOUNDARIES[bits]
    return table


class KltPages:
    """klt2 of one model's packed pages on one device, with its state there.

    Args:
        geometry: of the pages; page_tokens a power of two, head_dim a multiple of 16.
        state: klt2's state, flat.
        device: where the pools lie.

    Raises:
        ConfigError: a shape or device that kernels cannot serve, or a state of another geometry.
    """

    def __init__(self, geometry: Geometry, state: Floats, device: torch.device | str) -> None:
        self.geometry, self.device = geometry, torch.device(device)
        require_device(self.device)
        codec, tokens, dim = KLT2(), geometry.page_tokens, geometry.head_dim
        self.page_bytes = codec.page_bytes(geometry)
        """Bytes of a packed page."""
        if tokens & (tokens - 1):
            raise ConfigError(
                f"device kernels take page_tokens that is a power of two, not {tokens}; "
                "attend this model's pages on the CPU"
            )
        if state.size != codec.state_floats(geometry):
            raise ConfigError(
                f"the state has {state.size} floats and this geometry needs {codec.state_floats(geometry)}; "
                "fit it from this model's moments or pages (fit_moments, fit_state)"
            )
        groups = dim // GROUP
        records = state.reshape(geometry.num_layers, 2, geometry.num_kv_heads, record_floats(dim))
        starts, bits, costs, means, analysis, synthesis = np.split(
            records, np.cumsum([1, groups, groups, dim, dim * dim]), -1
        )
        group_bits = bits.astype(np.int32)
        token_bytes = 2 * group_bits.sum(-1, keepdims=True)
        square = (*records.shape[:3], dim, dim)

        def on_device(array: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

        self.blocks = on_device(np.concatenate([starts.astype(np.int32), token_bytes], -1))
        self.channels = on_device(_channels(group_bits, tokens))
        self.costs = on_device(np.repeat(costs, GROUP, -1))
        self.means = on_device(means[:, 0])
        self.analysis, self.synthesis = (
            on_device(analysis.reshape(square)),
            on_device(synthesis.reshape(square)),
        )
        self.quantizers = on_device(quantizers())
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)

    def encode(
        self, exact: torch.Tensor, sources: torch.Tensor, counts: torch.Tensor,
        packed: torch.Tensor, targets: torch.Tensor, flags: torch.Tensor,
    ) -> None:  # fmt: skip
        """Pack the first `counts[i]` tokens of the exact page at `sources[i]` into `targets[i]`.

        Args:
            exact, packed: uint8 pools (may be one), a multiple of 4 bytes long; pages must not overlap.
            sources, targets: `[pages]` int64 byte offsets, multiples of 64.
            counts: `[pages]` int32, 1..page_tokens.
            flags: `[pages]` int32; set to 1 where a written value is not finite (the packed page is undefined, and the
                page must stay exact), else left alone.
        """
        words, floats = exact.view(self.dtype), packed.view(torch.float32)
        for side in range(2):
            encode_side[self._grid(sources, self.geometry.num_layers)](
                words, sources, counts, packed, floats, targets, flags, sources.numel(), self.means, self.analysis,
                self.blocks, self.channels, self.costs, self.quantizers, SIDE=side, **self._shape(),
            )  # fmt: skip

    def decode(
        self, packed: torch.Tensor, sources: torch.Tensor, counts: torch.Tensor,
        exact: torch.Tensor, targets: torch.Tensor,
    ) -> None:  # fmt: skip
        """Unpack pages into exact layout and dtype; tokens from `counts[i]` on are zeroed. Arguments as of `encode`."""
        self._decode(packed, sources, counts, exact.view(self.dtype), targets, 0, self.geometry.num_layers)

    def decode_layer(
        self, layer: int, packed: torch.Tensor, sources: torch.Tensor, counts: torch.Tensor, out: torch.Tensor
    ) -> None:
        """One layer of pages into `out` `[pages, 2, kv_heads, page_tokens, head_dim]` of any float dtype, likewise."""
        targets = torch.arange(-layer, len(out) - layer, device=out.device) * (
            out[0].numel() * out.element_size()
        )
        self._decode(packed, sources, counts, out, targets, layer, 1)

    def _decode(
        self, packed: torch.Tensor, sources: torch.Tensor, counts: torch.Tensor, out: torch.Tensor,
        targets: torch.Tensor, layer: int, span: int,
    ) -> None:  # fmt: skip
        floats, shape = packed.view(torch.float32), self._shape() | {"ITEM": out.element_size()}
        for side in range(2):
            decode_side[self._grid(sources, span)](
                packed, floats, sources, counts, out, targets, sources.numel(), self.means, self.synthesis,
                self.blocks, self.channels, self.quantizers, torch.finfo(self.dtype).max, layer, SIDE=side, **shape,
            )  # fmt: skip

    def _tile_pages(self) -> int:
        return max(1, TILE_ROWS // self.geometry.page_tokens)

    def _grid(self, pages: torch.Tensor, layers: int) -> tuple[int]:
        tiles = -(-pages.numel() // self._tile_pages())
        return (tiles * layers * self.geometry.num_kv_heads,)

    def _shape(self) -> dict[str, int]:
        geometry = self.geometry
        return {
            "HEADS": geometry.num_kv_heads, "TOKENS": geometry.page_tokens, "DIM": geometry.head_dim,
            "ITEM": geometry.item_bytes, "PAGES": self._tile_pages(), "CHUNK": CHUNK,
            "WIDTH": max(GROUP, next_power_of_two(geometry.head_dim)),
            "num_warps": 8 if geometry.head_dim > 64 else 4,
        }  # fmt: skip


def _channels(group_bits: NDArray[np.int32], tokens: int) -> NDArray[np.int32]:
    """`[layers, 2, heads, head_dim]`: 8 times where a channel's first plane lies, plus its bits (`klt.py`)."""
    bits = np.repeat(group_bits, GROUP, -1)
    places = np.empty_like(bits)
    places[:, 0] = (np.cumsum(bits[:, 0], -1) - bits[:, 0]) * plane_bytes(tokens)
    before = 2 * (np.cumsum(group_bits[:, 1], -1) - group_bits[:, 1])
    places[:, 1] = np.repeat(before, GROUP, -1) + np.arange(bits.shape[-1]) % GROUP // 8
    return places * 8 + bits


__all__ = ["KltPages", "quantizers"]
