"""The daemon's pools as a worker maps them: HBM to read and write, host memory to read. Both of this machine's memory;
HBM of a GPU is `device_pool.py`'s.

The HBM mapping is left out of forked children: a child that outlived its worker could write into memory that the
daemon has given to somebody else.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from tierkv.errors import ProtocolError
from tierkv.fence import Fence

if TYPE_CHECKING:  # seconds, which a worker without a GPU need not pay
    import torch


class HbmMapping(Protocol):
    """A worker's mapping of the HBM pool. It owns a descriptor, which it hands back to a new owner."""

    @property
    def data(self) -> NDArray[np.uint8]:
        """`[size]` bytes; empty where the CPU cannot address them."""
        ...

    @property
    def tensor(self) -> torch.Tensor | None:
        """The pool as bytes on a device; None: it is `data`."""
        ...

    @property
    def descriptor(self) -> int: ...

    def read(self, offset: int, size: int) -> NDArray[np.uint8]: ...

    def fence(self) -> Fence | None:
        """Passed when what this thread's kernels read and write in the pool is done; None: it is."""
        ...

    def settle(self) -> None:
        """Wait until no kernel of this process reads or writes the pool."""
        ...

    def same(self, descriptor: int) -> bool:
        """Whether `descriptor` is of this very memory."""
        ...

    def close(self) -> None: ...


class MappedPool:
    """A mapped descriptor, which it owns. `data` is `[size]` bytes."""

    tensor: None = None

    def __init__(self, descriptor: int, size: int, writable: bool) -> None:
        found = os.fstat(descriptor).st_size
        if found < size:
            os.close(descriptor)
            raise ProtocolError(f"the daemon announced a pool of {size:,} bytes and sent one of {found:,}")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, size, mmap.MAP_SHARED, access) if size else None
        self.data: NDArray[np.uint8] = (
            np.frombuffer(self._map, np.uint8) if self._map is not None else np.zeros(0, np.uint8)
        )
        if self._map is not None and writable:
            self._map.madvise(mmap.MADV_DONTFORK)

    def read(self, offset: int, size: int) -> NDArray[np.uint8]:
        """A view."""
        return self.data[offset : offset + size]

    def fence(self) -> None:
        """The CPU has written when a call returns."""

    def settle(self) -> None:
        """Nothing is running."""

    def same(self, descriptor: int) -> bool:
        return os.path.sameopenfile(descriptor, self.descriptor)

    def close(self) -> None:
        """Unmap and close; a view that is still held keeps the mapping until it goes."""
        self.data = np.zeros(0, np.uint8)
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


KEY_MASK = (1 << 64) - 1
"""xxh3 seeds are 64 bits."""


def checksum(data: NDArray[np.uint8], key: int) -> int:
    """xxh3-64 of a host replica's bytes, seeded with the page id."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(data).data, seed=key & KEY_MASK)


def codec_state(
    read: Callable[[int, int], NDArray[np.uint8]], offset: int, floats: int
) -> NDArray[np.float32]:
    """The codec's per-model state at byte `offset` of the HBM pool; empty when it does not exist (offset < 0)."""
    if offset < 0 or floats == 0:
        return np.zeros(0, np.float32)
    return read(offset, 4 * floats).view(np.float32)
