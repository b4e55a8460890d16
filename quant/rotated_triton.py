"""Rotated pages (k3v2, and the same with 2-bit keys) on a device: what the CPU codec does, for many pages at once.

Everything is asynchronous: a call launches kernels on the current stream and returns. Kernels cannot raise, so `encode`
marks pages that hold NaN or infinity in `flags`, which the host reads once the stream has got there.

Importing this module needs triton (`ConfigError` without it); `tierkv.quant` does not import it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.quant.rotated_triton_kernels import ALIGNMENT, decode_side, encode_side
from tierkv.quant.rotation import block_sizes, signs
from tierkv.triton_setup import next_power_of_two, require_device

TILE_ROWS = 64
"""Rows of a tile: a tensor core's height, and few enough for the rotated tile to stay in registers."""

CHUNK = 32
"""Channels that one step of a rotation multiplies."""


def rotation_matrix(head_dim: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """`M` `[head_dim, head_dim]` of 1, -1 and 0, and `scales` `[head_dim]`: `rotate(x) = (x M) * scales`.

    A block of Sylvester's matrix is `H[i, j] = (-1)**popcount(i & j) / sqrt(size)`; `M` is `diag(signs) H` without the
    root.
    """
    matrix, scales = np.zeros((head_dim, head_dim), np.float32), np.empty(head_dim, np.float32)
    start = 0
    for size in block_sizes(head_dim):
        index = np.arange(size)
        block = (-1.0) ** np.bitwise_count(index[:, None] & index[None, :])
        matrix[start : start + size, start : start + size] = block
        scales[start : start + size] = 1 / np.sqrt(size)
        start += size
    return matrix * signs(head_dim)[:, None], scales


class RotatedPages:
    """The codec of one model's packed pages on one device, with its constants there.

    Args:
        geometry: of the pages; page_tokens a power of two, head_dim a multiple of 8.
        state: the codec's state (`k3v2`: mean keys), flat; empty means zero.
        device: where the pools lie.
        key_bits: 3 (k3v2) or 2.

    Raises:
        ConfigError: a shape or device that kernels cannot serve.
    """

    def __init__(
        self, geometry: Geometry, state: NDArray[np.float32], device: torch.device | str, key_bits: int = 3
    ) -> None:
        self.geometry, self.key_bits, self.device = geometry, key_bits, torch.device(device)
        require_device(self.device)
        tokens, dim = geometry.page_tokens, geometry.head_dim
        if key_bits not in (2, 3):
            raise ConfigError(f"rotated keys have 2 or 3 bits, not {key_bits}")
        if dim % 8 or tokens & (tokens - 1):
            raise ConfigError(
                f"device kernels take a head_dim that is a multiple of 8 and page_tokens that is a power of two, not "
                f"{dim} and {tokens}; attend this model's pages on the CPU"
            )
        heads = geometry.num_layers, geometry.num_kv_heads
        if state.size not in (0, heads[0] * heads[1] * dim):
            raise ConfigError(
                f"the state has {state.size} floats and this geometry needs {heads[0] * heads[1] * dim}; "
                "fit it from this model's pages (fit_state)"
            )
        means = state.reshape(*heads, dim) if state.size else np.zeros((*heads, dim), np.float32)
        matrix, scales = rotation_matrix(dim)
        transposed = np.ascontiguousarray(matrix.T)
        self.means, self.forth, self.back, self.scales, self.synthesis = (
            torch.from_numpy(array).to(self.device)
            for array in (means, transposed, matrix, scales, matrix * scales)
        )
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of a packed page."""
        tokens, dim = self.geometry.page_tokens, self.geometry.head_dim
        head = 8 + 2 * tokens + tokens * dim * (self.key_bits + 2) // 8
        return self.geometry.num_layers * self.geometry.num_kv_heads * head

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
        quarter = max(16, next_power_of_two(self.geometry.head_dim // 4))
        for side in range(2):
            encode_side[self._grid(sources, self.geometry.num_layers)](
                words, sources, counts, packed, floats, targets, flags, self.means, self.forth, self.scales,
                SIDE=side, **self._shape(), QUARTER=quarter, num_warps=self._warps(),
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
        floats = packed.view(torch.float32)
        width = max(16, next_power_of_two(self.geometry.head_dim))
        shape = self._shape() | {"ITEM": out.element_size()}
        for side in range(2):
            decode_side[self._grid(sources, span)](
                packed, floats, sources, counts, out, targets, self.means, self.back, self.scales,
                torch.finfo(self.dtype).max, layer, SIDE=side, SPAN=span, **shape, WIDTH=width,
                num_warps=self._warps(),
            )  # fmt: skip

    def _group(self) -> int:
        """KV heads of one tile."""
        heads = next_power_of_two(self.geometry.num_kv_heads)
        return max(1, min(heads, TILE_ROWS // self.geometry.page_tokens))

    def _warps(self) -> int:
        return 8 if self.geometry.head_dim > 128 else 4

    def _grid(self, pages: torch.Tensor, layers: int) -> tuple[int]:
        groups = -(-self.geometry.num_kv_heads // self._group())
        return (pages.numel() * layers * groups,)

    def _shape(self) -> dict[str, int]:
        geometry = self.geometry
        return {
            "LAYERS": geometry.num_layers, "HEADS": geometry.num_kv_heads, "TOKENS": geometry.page_tokens,
            "DIM": geometry.head_dim, "ITEM": geometry.item_bytes, "KEY_BITS": self.key_bits,
            "GROUP": self._group(), "CHUNK": CHUNK,
        }  # fmt: skip


__all__ = ["ALIGNMENT", "RotatedPages", "rotation_matrix"]
