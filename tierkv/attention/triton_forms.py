"""How a layer of a pool's pages is read on a device: which kernel reads each form, and what it is told.

Exact pages, and those of int8 and nf4, hold values in the model's space; k3v2's, rotated2's, klt2's and klt25's are
coded in a space of their own. No kernel reads kivi2's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.attention.contract import PoolView
from tierkv.attention.layer_view import unmarked
from tierkv.attention.triton_host import HostMemory
from tierkv.attention.triton_pages import read_pages
from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.quant import codes
from tierkv.quant.contract import Codec
from tierkv.quant.dynamic_map import DYNAMIC_MAP
from tierkv.quant.klt_triton import KltPages
from tierkv.quant.normal_float import NORMAL_FLOAT_MAP
from tierkv.quant.rotated_triton import RotatedPages
from tierkv.table import Kind
from tierkv.triton_setup import next_power_of_two

KEY_BITS = {codes.K3V2: 3, codes.ROTATED2: 2}
BLOCKWISE_BITS = {codes.INT8: 8, codes.NF4: 4}
EXACT_CODES = range(codes.EXACT, codes.EXACT + 3)
KEPT_CODECS = 64
"""Device codecs that are kept at most: a layered form has one for each layer that differs."""


class Plain(NamedTuple):
    """Pages in the model's space."""

    geometry: Geometry
    pool: torch.Tensor  # in the page dtype, or with `bits` in bytes
    numbers: torch.Tensor  # the pool in float32, with `bits`
    levels: torch.Tensor  # of the codes, with `bits`
    bits: int  # of a code; 0: exact
    layer: int
    layers: int

    def read(self, offsets: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
        """This layer of pages into `out` `[pages, 2, kv_heads, page_tokens, head_dim]`, zeros beyond `counts`."""
        geometry = self.geometry
        read_pages[(len(offsets) * 2 * geometry.num_kv_heads,)](
            self.pool, self.numbers, self.levels, offsets, counts, out, self.layer,
            LAYERS=self.layers, HEADS=geometry.num_kv_heads, TOKENS=geometry.page_tokens, DIM=geometry.head_dim,
            WIDTH=next_power_of_two(geometry.head_dim), ITEM=geometry.item_bytes, BITS=self.bits,
        )  # fmt: skip


class Coded(NamedTuple):
    """Pages in the space of a codec's codes."""

    codec: RotatedPages | KltPages
    pool: torch.Tensor  # bytes
    numbers: torch.Tensor  # the same in float32
    layer: int

    def read(self, offsets: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
        """As of `Plain`."""
        self.codec.decode_layer(self.layer, self.pool, offsets, counts, out)


class Forms(NamedTuple):
    """A layer of a pool. `None`: pages of that form there are none, or no kernel reads them."""

    geometry: Geometry
    exact: Plain
    middle: Plain | None = None
    packed: Plain | Coded | None = None

    def of(self, kind: int) -> Plain | Coded:
        """Raises ConfigError where no kernel reads pages of a kind."""
        form = {Kind.EXACT: self.exact, Kind.MIDDLE: self.middle, Kind.QUANTIZED: self.packed}[Kind(kind)]
        if form is None:
            raise ConfigError(
                f"attention on a device reads no pages of kind {Kind(kind).name} here: no kernel knows their codec, or "
                "its state does not exist"
            )
        return form


def bytes_of(pool: PoolView) -> torch.Tensor:
    """The pool as a tensor over the same memory; of `data` in this process's, as `tierkv.pool` maps it."""
    return torch.from_numpy(unmarked(pool.data)) if pool.tensor is None else pool.tensor


def exact_form(geometry: Geometry, pool: torch.Tensor, layer: int) -> Plain:
    """Exact pages of `geometry` in a pool of bytes."""
    whole = pool[: pool.numel() // geometry.item_bytes * geometry.item_bytes]
    words = whole.view(getattr(torch, geometry.dtype))
    return Plain(geometry, words, words, words, 0, layer, geometry.num_layers)


def coded_form(codec: RotatedPages | KltPages, pool: torch.Tensor, layer: int) -> Coded:
    return Coded(codec, pool, pool[: pool.numel() // 4 * 4].view(torch.float32), layer)


def refuse_codec(codec: Codec, geometry: Geometry, what: str) -> None:
    """Raises ConfigError where no kernel reads a codec's pages."""
    for layer in range(geometry.num_layers):
        code = codec.layer_block(geometry, layer).code
        if code not in (*KEY_BITS, *BLOCKWISE_BITS, codes.KLT2, *EXACT_CODES):
            raise ConfigError(
                f"attention on a device reads no {what} pages of {codec.name!r}: start the daemon with k3v2, klt2, "
                "klt25, rotated2, int8 or nf4"
            )


@cache
def _levels(bits: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(DYNAMIC_MAP if bits == 8 else NORMAL_FLOAT_MAP).to(device)


class Device:
    """What is made once for a device: codecs with their constants there, which sessions of a model share, and host
    memory that its kernels reach.
    """

    def __init__(self) -> None:
        self.host = HostMemory()
        self._made: dict[tuple[object, ...], tuple[NDArray[np.float32], RotatedPages | KltPages]] = {}

    def codec(
        self, code: int, geometry: Geometry, state: NDArray[np.float32], device: torch.device
    ) -> RotatedPages | KltPages:
        """Raises ConfigError where kernels cannot serve the geometry."""
        key = (code, geometry, state.ctypes.data, state.size, device)
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= KEPT_CODECS:
                self._made.pop(next(iter(self._made)))
            make: Callable[[], RotatedPages | KltPages] = (
                (lambda: RotatedPages(geometry, state, device, KEY_BITS[code]))
                if code in KEY_BITS
                else (lambda: KltPages(geometry, state, device))
            )
            found = self._made[key] = state, make()  # the state is held, so that its address stays its own
        return found[1]


def forms_of(pool: PoolView, layer: int, made: Device, device: torch.device) -> Forms:
    """One layer of a pool, for kernels that run on `device`."""
    geometry = pool.geometry
    afar = device.type == "cuda" and pool.tensor is None
    data = made.host.reach(pool.data) if afar else bytes_of(pool)

    def form(codec: Codec) -> Plain | Coded | None:
        block = codec.layer_block(geometry, layer)
        own, part = replace(geometry, num_layers=block.num_layers), data[block.start :]
        part = part[: part.numel() // 4 * 4]
        if block.code in EXACT_CODES:
            return exact_form(own, part, block.layer)
        if block.code in BLOCKWISE_BITS:
            bits = BLOCKWISE_BITS[block.code]
            numbers, levels = part.view(torch.float32), _levels(bits, device)
            return Plain(own, part, numbers, levels, bits, block.layer, block.num_layers)
        state = pool.codec_state[block.state]
        if not state.size or block.code not in (*KEY_BITS, codes.KLT2):
            return None
        return coded_form(made.codec(block.code, own, state, device), part, block.layer)

    middle = None if pool.middle is None else form(pool.middle)
    assert not isinstance(middle, Coded)
    return Forms(geometry, exact_form(geometry, data, layer), middle, form(pool.codec))


__all__ = [
    "Coded",
    "Device",
    "Forms",
    "Plain",
    "bytes_of",
    "coded_form",
    "exact_form",
    "forms_of",
    "refuse_codec",
]
