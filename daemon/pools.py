"""The two byte ranges a daemon owns: HBM behind a descriptor that workers map, host memory in a named file.

Both outlive their owner. The HBM pool is a memfd (or, on a GPU, an exported allocation) that lives as long as any
process maps it: a new owner *adopts* the descriptor that a worker hands back. The host pool is a file in the state
directory, which a new owner reopens as it is. Both are allocated up front: a sparse tmpfs page that cannot be had
kills its reader with SIGBUS, so shortage must show at start. Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import ConfigError

Bytes = NDArray[np.uint8]

PAGE_BYTES = 4096
"""Granularity of mappings; pool sizes are rounded down to it."""

HOST_FILE = "host.pool"
"""The host pool's file in the state directory."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""No process may change the pool's size: a shrunken file would kill whoever touches the lost part."""


class BytePool(Protocol):
    """A range of `size` bytes that the mover reads and writes."""

    @property
    def size(self) -> int: ...

    @property
    def data(self) -> Bytes | None:
        """The whole pool as bytes, `[size]`; None where the CPU cannot address it (then only `read` and `write`)."""
        ...

    def read(self, offset: int, size: int) -> Bytes:
        """Bytes `[offset, offset + size)`: a view where the CPU addresses the pool, else a copy."""
        ...

    def write(self, offset: int, source: Bytes) -> None: ...

    def descriptor(self) -> int:
        """What workers map. Stays the pool's own: duplicate it to keep it."""
        ...

    def close(self) -> None: ...


class DevicePool(BytePool, Protocol):
    """HBM of one device: also knows its own descriptor when a worker hands one back."""

    def same(self, descriptor: int) -> bool:
        """Whether `descriptor` is of this very memory."""
        ...


class DevicePools(Protocol):
    """Makes `DevicePool`s of one kind (memfd, CUDA)."""

    def round_down(self, size: int) -> int:
        """What a pool of `size` bytes has."""
        ...

    def create(self, size: int) -> DevicePool:
        """Fresh memory; `size` is rounded down. Raises `ConfigError`."""
        ...

    def adopt(self, descriptor: int, size: int) -> DevicePool:
        """Memory that a worker kept alive; duplicates `descriptor`. Raises `ConfigError` when it does not fit."""
        ...


def round_down(size: int) -> int:
    """`size` in whole mapping pages."""
    return size // PAGE_BYTES * PAGE_BYTES


class _MappedPool:
    """A mapped file as bytes."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, size) if size else None
        self.data: Bytes = (
            np.frombuffer(self._map, np.uint8) if self._map is not None else np.zeros(0, np.uint8)
        )

    def read(self, offset: int, size: int) -> Bytes:
        self._check(offset, size)
        return self.data[offset : offset + size]

    def write(self, offset: int, source: Bytes) -> None:
        self._check(offset, len(source))
        self.data[offset : offset + len(source)] = source

    def descriptor(self) -> int:
        return self._descriptor

    def close(self) -> None:
        """Unmap and close. A view that is still held keeps the mapping until it goes."""
        self.data = np.zeros(0, np.uint8)
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _check(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ValueError(f"bytes [{offset}, {offset + size}) lie outside a pool of {self.size} bytes")


class HbmPool(_MappedPool):
    """HBM of a machine without a GPU: a memfd, which leaves nothing behind when its last user is gone."""

    round_down = staticmethod(round_down)

    @classmethod
    def create(cls, size: int) -> HbmPool:
        """`size` bytes (rounded down to `PAGE_BYTES`), zeroed, allocated now.

        Raises:
            ConfigError: the size is below one page, or memory does not suffice.
        """
        size = round_down(size)
        if size == 0:
            raise ConfigError(f"the HBM pool needs at least {PAGE_BYTES} bytes; raise --hbm")
        descriptor = os.memfd_create("tierkv-hbm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            return cls(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(f"an HBM pool of {size:,} bytes cannot be had: {error}; lower --hbm") from None

    @classmethod
    def adopt(cls, descriptor: int, size: int) -> HbmPool:
        """Map the memory that a worker kept alive across its owner's death.

        Raises:
            ConfigError: not a memfd of this daemon's size, or one that another process could shrink.
        """
        size = round_down(size)
        try:
            found = os.fstat(descriptor)
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ConfigError(f"the handed-back descriptor is no memfd: {error}") from None
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            raise ConfigError(
                f"the handed-back HBM pool has {found.st_size:,} bytes, this daemon has {size:,}; "
                "start it with the old --hbm to keep the pages"
            )
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ConfigError("the handed-back HBM pool is not sealed against shrinking, so it is not ours")
        return cls(os.dup(descriptor), size)

    def same(self, descriptor: int) -> bool:
        try:
            return os.path.sameopenfile(descriptor, self._descriptor)  # (st_dev, st_ino)
        except OSError:
            return False


class HostPool(_MappedPool):
    """Host memory: a file of the state directory (tmpfs by default), 0600. Workers get a read-only descriptor."""

    def __init__(self, state_dir: Path, size: int) -> None:
        """Reopen the pool when its size is `size` (rounded down to `PAGE_BYTES`), else make it anew.

        Raises:
            ConfigError: the file system has too little room, or the file is not this user's.
        """
        size = round_down(size)
        path = state_dir / HOST_FILE
        self.reopened = False
        descriptor = self._reopen(path, size)
        if descriptor is None:
            descriptor = self._make(path, size)
        else:
            self.reopened = True
        self._reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        super().__init__(descriptor, size)

    def descriptor(self) -> int:
        return self._reader

    def close(self) -> None:
        super().close()
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1

    @staticmethod
    def _reopen(path: Path, size: int) -> int | None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{path} cannot be opened: {error}; remove it") from None
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise ConfigError(f"{path} is not a file of this user; remove it or choose another --state-dir")
        if found.st_size == size:
            os.fchmod(descriptor, 0o600)
            return descriptor
        os.close(descriptor)
        path.unlink()  # a worker that still maps the old one keeps it until it goes
        return None

    @staticmethod
    def _make(path: Path, size: int) -> int:
        room = os.statvfs(path.parent)
        if size > room.f_bavail * room.f_frsize:
            raise ConfigError(
                f"a host pool of {size:,} bytes does not fit into {path.parent}, which has "
                f"{room.f_bavail * room.f_frsize:,} free; lower --host or choose a --state-dir on a larger tmpfs"
            )
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if size:
                os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            os.close(descriptor)
            path.unlink()
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT):
                raise
            raise ConfigError(f"a host pool of {size:,} bytes cannot be had: {error}; lower --host") from None
        return descriptor
