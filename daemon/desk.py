"""What a move with a kernel needs beside the pools: the kernel's arguments, a flag, and room for pages on the way.

There are a few desks, so that one move's copies run beside another's kernels. Staging lies on the device outside the
HBM pool, and is as large as the largest page that has passed.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from tierkv.device import Device, Stream
from tierkv.fence import Fence

DESKS = 4
"""Two would overlap copies with kernels; the others are for moves whose host part takes longer."""

_SLOTS = 4
"""int64 words of a slip: source, target, tokens, flag."""


class Desk:
    """Used by one move at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slip = device.pinned(8 * _SLOTS)
        self._words = self._slip.view(torch.int64)
        self._arguments = torch.zeros(8 * _SLOTS, dtype=torch.uint8, device=device.name)
        words, halves = self._arguments.view(torch.int64), self._arguments.view(torch.int32)
        self.source, self.target = words[0:1], words[1:2]  # [1] int64 byte offsets
        self.count, self.flag = halves[4:5], halves[6:7]  # [1] int32
        self._exact = self._packed = torch.zeros(0, dtype=torch.uint8, device=device.name)
        self._host = device.pinned(0)

    def fill(self, stream: Stream, source: int, target: int, count: int) -> None:
        """Bring the arguments to the device, and clear the flag."""
        self._words[:] = torch.tensor([source, target, count, 0])
        stream.copy(self._arguments, self._slip)

    def return_flag(self, stream: Stream) -> None:
        """Bring the flag back; `flagged` is right when the stream has got past this."""
        stream.copy(self._slip[24:28], self._arguments[24:28])

    @property
    def flagged(self) -> bool:
        return bool(self._words[3])

    def exact(self, size: int) -> torch.Tensor:
        """Device bytes for an exact page; rounded up, as kernels read them in words."""
        if len(self._exact) < size:
            self._exact = self._fresh(size)
        return self._exact

    def packed(self, size: int) -> torch.Tensor:
        """Device bytes for a packed page."""
        if len(self._packed) < size:
            self._packed = self._fresh(size)
        return self._packed

    def host(self, size: int) -> torch.Tensor:
        """Pinned host bytes."""
        if len(self._host) < size:
            self._host = self._device.pinned(size)
        return self._host[:size]

    def _fresh(self, size: int) -> torch.Tensor:
        return torch.zeros(-(-size // 64) * 64, dtype=torch.uint8, device=self._device.name)


class Desks:
    def __init__(self, device: Device, desks: int = DESKS) -> None:
        self._free = [Desk(device) for _ in range(desks)]

    def take(self) -> Generator[Fence, None, Desk]:
        """A free desk, waited for as a carried move waits. Give it back."""
        while not self._free:
            yield self
        return self._free.pop()

    def give_back(self, desk: Desk) -> None:
        self._free.append(desk)

    # A fence: passed while one is free ---------------------------------------------------------------------------

    def query(self) -> bool:
        return bool(self._free)

    def synchronize(self) -> None:
        """The mover's thread, which frees desks, cannot wait for one."""
        if not self._free:
            raise RuntimeError("every desk is in use by a move that this thread carries")
