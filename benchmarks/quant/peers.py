"""KIVI as its paper has it (Liu et al. 2024, arXiv 2402.02750): KIVI-G32 at 2 bits, in plain torch.

Keys are quantized per channel over groups of 32 tokens, values per token over groups of 32 channels. In each group
`x = zero + scale * code`, code 0..3, zero the group's minimum and scale a third of its range, both float16: 3 bits a
value, all in.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from tierkv.benchmarks.quant.held import Held

GROUP: Final = 32
TOP: Final = 3
"""The largest 2-bit code."""


class Packed(NamedTuple):
    """A tensor in groups: one of its axes is split into `[groups, GROUP]`."""

    codes: torch.Tensor  # uint8, a quarter of the last axis: element 4 i + j in bits 2 j of byte i
    scale: torch.Tensor  # float16; 1 long on the axis of GROUP
    zero: torch.Tensor  # float16

    @property
    def nbytes(self) -> int:
        return sum(int(part.nbytes) for part in self)


def pack(grouped: torch.Tensor, axis: int) -> Packed:
    """2-bit codes of a tensor whose groups lie along `axis`; the last axis is a multiple of 4."""
    values = grouped.float()
    low, high = values.amin(axis, keepdim=True), values.amax(axis, keepdim=True)
    zero, scale = low.half(), ((high - low) / TOP).half()
    steps = (values - zero.float()) / torch.where(scale == 0, 1, scale).float()
    codes = steps.round_().clamp_(0, TOP).to(torch.uint8)
    quads = codes.reshape(*codes.shape[:-1], -1, 4)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    return Packed((quads << shifts).sum(-1, dtype=torch.uint8), scale, zero)


def unpack(packed: Packed) -> torch.Tensor:
    """The float32 values, in groups as they were."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    codes = (packed.codes.unsqueeze(-1) >> shifts & TOP).flatten(-2)
    return packed.zero.float() + packed.scale.float() * codes


class Kivi(Held):
    """Raises `ValueError` where tokens or channels do not come in groups of 32."""

    def __init__(self, kv: torch.Tensor) -> None:
        tokens, channels = kv.shape[3:]
        if tokens % GROUP or channels % GROUP:
            raise ValueError(f"KIVI takes groups of {GROUP}, not {tokens} tokens of {channels} channels")
        lead = kv.shape[0], kv.shape[2]  # layers, heads
        self._keys = kv[:, 0].reshape(*lead, -1, GROUP, channels)
        self._values = kv[:, 1].reshape(*lead, tokens, -1, GROUP)
        self._dtype = kv.dtype
        self._packed: tuple[Packed, Packed] | None = None
        self._decoded: tuple[torch.Tensor, torch.Tensor] | None = None

    def encode(self) -> None:
        self._packed = pack(self._keys, -2), pack(self._values, -1)

    def decode(self) -> None:
        assert self._packed is not None
        keys, values = (unpack(part).to(self._dtype) for part in self._packed)
        self._decoded = keys.flatten(2, 3), values.flatten(3, 4)

    def kv(self) -> torch.Tensor:
        assert self._decoded is not None
        return torch.stack(self._decoded, 1)

    @property
    def bits_per_value(self) -> float:
        assert self._packed is not None
        stored = sum(part.nbytes for part in self._packed)
        return float(8 * stored / (self._keys.numel() + self._values.numel()))
