"""Has a device got past a point? What others are told of memory waits for that; on the CPU nothing does."""

from __future__ import annotations

from typing import Protocol


class Fence(Protocol):
    """A point in a device's work. `torch.cuda.Event` is one. Any thread may ask."""

    def query(self) -> bool:
        """Everything launched before the point is done, and its writes can be read by anyone. Never waits."""
        ...

    def synchronize(self) -> None:
        """Wait until it is so."""
        ...
