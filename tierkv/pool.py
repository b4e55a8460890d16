"""The daemon's pools as a worker maps them: HBM to read and write, host memory to read.

The HBM mapping is left out of forked children: a child that outlived its worker could write into memory that the
daemon has given to somebody else.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np
import xxhash
from numpy.typing import NDArray

from tierkv.errors import ProtocolError


class MappedPool:
    """A mapped descriptor, which it owns. `data` is `[size]` bytes."""

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

    def same(self, descriptor: int) -> bool:
        """Whether `descriptor` is of this very memory."""
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


def codec_state(data: NDArray[np.uint8], offset: int, floats: int) -> NDArray[np.float32]:
    """The codec's per-model state at byte `offset` of the HBM pool; empty when it does not exist (offset < 0)."""
    if offset < 0 or floats == 0:
        return np.zeros(0, np.float32)
    return data[offset : offset + 4 * floats].view(np.float32)
