"""How a move's bytes go: the contract between the mover, which has the thread, and those who carry moves out.

A carried move is a generator. It yields a fence whenever it has set a device to work, is continued once that is passed,
and returns where it landed; others are carried meanwhile. On the CPU it returns without yielding. It ends in exactly
one way: landed, or raised, and then nothing that it began is still running. What it raises names the reason:
`NonFiniteValues`, `Damaged`, else an error of input and output or of the codec.

Host replicas carry an xxh3-64 checksum seeded with their key (the page id), so bytes that were damaged, or that belong
to another page, are refused and never reach attention.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, Protocol

from tierkv.daemon.events import Copy, FitCodec, MoveDone, Quantize, Summarize
from tierkv.fence import Fence
from tierkv.pool import checksum
from tierkv.quant.contract import Bytes

Move = Quantize | Copy | Summarize | FitCodec


class Landed(NamedTuple):
    """A move has ended well. `src` and `dst` are pools as metrics name them, `size` bytes were written."""

    done: MoveDone
    src: str
    dst: str
    size: int


Carried = Generator[Fence, None, Landed]


class Damaged(Exception):
    """A host replica's bytes are not what was stored."""


class Carrier(Protocol):
    def warm_up(self) -> None:
        """Compile what moves need, so that the first one need not wait for it."""
        ...

    def carry(self, move: Move) -> Carried:
        """See the module."""
        ...


def verify(data: Bytes, expected: int, key: int) -> None:
    """Raises `Damaged`: a host replica is not what was stored under its key."""
    if checksum(data, key) != expected:
        raise Damaged(f"{len(data)} host bytes of page {key} do not match their checksum")
