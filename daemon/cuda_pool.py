"""HBM of a GPU as a `DevicePool`: memory behind a file descriptor, so that it lives as long as any process maps it.

The owner creates the memory, exports a descriptor and maps it; a worker (or a later owner) imports the descriptor and
maps it too. Devices are matched by UUID, since ordinals differ between processes. What was set up is taken down in
reverse order, also when a step in the middle fails, so a failed start leaves nothing on the device.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
from contextlib import ExitStack

import numpy as np

from tierkv.daemon.cuda_driver import Bytes, CudaError, Driver
from tierkv.errors import ConfigError

F_DUPFD_QUERY = 1027
"""`fcntl` of Linux 6.10: are two descriptors duplicates of each other?"""

_KCMP = {"x86_64": 312, "aarch64": 272}
"""System call numbers of kcmp(2), for older kernels."""


def find_device(driver: Driver, uuid: str) -> int:
    """The ordinal that the device has in this process. Raises `ConfigError` when it is not visible."""
    seen = [driver.uuid(device) for device in range(driver.device_count())]
    if uuid not in seen:
        raise ConfigError(
            f"the daemon's GPU {uuid} is not visible here (visible: {', '.join(seen) or 'none'}); "
            "set CUDA_VISIBLE_DEVICES so that it is"
        )
    return seen.index(uuid)


def same_description(first: int, second: int) -> bool:
    """Whether two descriptors are duplicates: CUDA's all look alike to fstat, so the kernel is asked.

    False also where neither `fcntl(F_DUPFD_QUERY)` nor kcmp(2) is allowed.
    """
    try:
        return int(fcntl.fcntl(first, F_DUPFD_QUERY, second)) == 1
    except OSError:
        number = _KCMP.get(platform.machine())
        if number is None:
            return False
        pid, kcmp_file = os.getpid(), 0
        return int(ctypes.CDLL(None, use_errno=True).syscall(number, pid, pid, kcmp_file, first, second)) == 0


class CudaPool:
    """A mapped device allocation. Construct with `create` or `adopt`; owns its descriptor and everything mapped."""

    data: None = None
    """The CPU cannot address device memory: `read` and `write` copy."""

    def __init__(
        self, driver: Driver, device: int, size: int, descriptor: int, address: int, undo: ExitStack
    ) -> None:
        self.size = size
        self.device = device
        self.address = address
        """Where the pool is mapped in this process, for kernels."""
        self._driver = driver
        self._descriptor = descriptor
        self._undo = undo

    @classmethod
    def create(cls, driver: Driver, device: int, size: int) -> CudaPool:
        """Fresh memory of `size` bytes, rounded down to the device's granularity: a size is a total, never exceeded.

        Raises:
            ConfigError: less than one granule, more than is free, or a device that cannot share memory.
        """
        granule = driver.granularity(device)
        rounded = size // granule * granule
        if rounded == 0:
            raise ConfigError(
                f"hbm = {size:,} bytes is less than one allocation of this GPU ({granule:,}); raise --hbm"
            )
        if not driver.shares_descriptors(device):
            raise ConfigError(
                f"GPU {device} cannot export memory as a file descriptor; tierkv cannot share it"
            )
        if rounded > (free := driver.free_bytes(device)):
            raise ConfigError(f"hbm = {rounded:,} bytes, but GPU {device} has {free:,} free; lower --hbm")
        with ExitStack() as undo:
            try:
                handle = driver.create(device, rounded)
                undo.callback(driver.release, device, handle)
                descriptor = driver.export(device, handle)
                undo.callback(os.close, descriptor)
                address = _map(driver, device, rounded, handle, undo)
            except CudaError as error:
                raise ConfigError(
                    f"an HBM pool of {rounded:,} bytes cannot be had on GPU {device}: {error}"
                ) from None
            return cls(driver, device, rounded, descriptor, address, undo.pop_all())

    @classmethod
    def adopt(cls, driver: Driver, device: int, descriptor: int, size: int) -> CudaPool:
        """Map memory that another process created with this `size`; `descriptor` is duplicated.

        Raises:
            ConfigError: the descriptor is not such memory.
        """
        granule = driver.granularity(device)
        rounded = size // granule * granule
        with ExitStack() as undo:
            try:
                kept = os.dup(descriptor)
                undo.callback(os.close, kept)
                handle = driver.import_(device, kept)
                undo.callback(driver.release, device, handle)
                address = _map(driver, device, rounded, handle, undo)
            except OSError as error:
                raise ConfigError(
                    f"the handed-over HBM pool of {rounded:,} bytes cannot be mapped on GPU {device}: {error}"
                ) from None
            return cls(driver, device, rounded, kept, address, undo.pop_all())

    def read(self, offset: int, size: int) -> Bytes:
        self._check(offset, size)
        out = np.empty(size, np.uint8)
        self._driver.read(self.device, self.address + offset, out)
        return out

    def write(self, offset: int, source: Bytes) -> None:
        self._check(offset, source.nbytes)
        self._driver.write(self.device, self.address + offset, np.ascontiguousarray(source))

    def descriptor(self) -> int:
        return self._descriptor

    def same(self, descriptor: int) -> bool:
        return same_description(self._descriptor, descriptor)

    def close(self) -> None:
        """Unmap, and forget the memory; the device frees it when nobody else maps it. Twice is once."""
        self._undo.close()
        self._descriptor = -1

    def _check(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ValueError(f"bytes [{offset}, {offset + size}) lie outside a pool of {self.size} bytes")


class CudaPools:
    """`DevicePools` of one device."""

    def __init__(self, driver: Driver, device: int = 0) -> None:
        self._driver = driver
        self._device = device

    def round_down(self, size: int) -> int:
        granule = self._driver.granularity(self._device)
        return size // granule * granule

    def create(self, size: int) -> CudaPool:
        return CudaPool.create(self._driver, self._device, size)

    def adopt(self, descriptor: int, size: int) -> CudaPool:
        return CudaPool.adopt(self._driver, self._device, descriptor, size)


class RegisteredHost:
    """The host pool's pages, pinned for a device from construction to `close`.

    Raises:
        ConfigError: the memory cannot be pinned (`ulimit -l`, or too little of it).
    """

    def __init__(self, driver: Driver, device: int, data: Bytes) -> None:
        self._driver, self._device, self._address = driver, device, int(data.ctypes.data)
        self._open = data.nbytes > 0
        if self._open:
            try:
                driver.register_host(device, self._address, data.nbytes)
            except CudaError as error:
                raise ConfigError(
                    f"a host pool of {data.nbytes:,} bytes cannot be pinned for GPU {device}: {error}; lower --host"
                ) from None

    def close(self) -> None:
        """Call before the memory is unmapped. Twice is once."""
        if self._open:
            self._open = False
            self._driver.unregister_host(self._device, self._address)


def _map(driver: Driver, device: int, size: int, handle: int, undo: ExitStack) -> int:
    """Map `handle` for reading and writing; `undo` learns how to take it down. Returns the address."""
    address = driver.reserve(device, size)
    undo.callback(driver.free_address, device, address, size)
    driver.map(device, address, size, handle)
    undo.callback(driver.unmap, device, address, size)
    driver.set_access(device, address, size)
    return address
