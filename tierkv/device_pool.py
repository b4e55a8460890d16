"""HBM of a GPU as a worker maps it: one tensor over the daemon's memory, without a copy. Imports torch.

Bytes that the daemon writes are there when it tells of them; what this process's kernels write is there for the daemon
when it is told, because `Client` holds a call back until the kernels before it are done (`fence`).
"""

from __future__ import annotations

import os
import weakref

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.daemon.cuda_driver import CudaDriver, Driver
from tierkv.daemon.cuda_pool import CudaPool, find_device
from tierkv.device import CudaDevice, Device
from tierkv.fence import Fence


class _Owner:
    """Kept by every tensor over the pool: when the last one goes, the pool is unmapped."""


class MappedDevice:
    """`HbmMapping` of a GPU. `device` is the driver's ordinal `index` as torch has it.

    Raises:
        ConfigError: `descriptor` is not such memory.
    """

    def __init__(self, driver: Driver, index: int, device: Device, descriptor: int, size: int) -> None:
        self.data: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._device = device
        self._pool = CudaPool.adopt(driver, index, descriptor, size)
        owner = _Owner()
        self.tensor: torch.Tensor | None = device.tensor(self._pool.address, self._pool.size, owner)
        self._unmap = weakref.finalize(owner, self._pool.close)
        self._unmap.atexit = False  # the process's end does it, and the driver may be gone by then

    @property
    def descriptor(self) -> int:
        return self._pool.descriptor()

    def read(self, offset: int, size: int) -> NDArray[np.uint8]:
        """A copy; waits for the device."""
        return self._pool.read(offset, size)

    def fence(self) -> Fence:
        return self._device.fence()

    def settle(self) -> None:
        self._device.synchronize()

    def same(self, descriptor: int) -> bool:
        return self._pool.same(descriptor)

    def close(self) -> None:
        """Let go; a tensor that is still held keeps the mapping until it goes."""
        self.tensor = None


def map_device(descriptor: int, size: int, uuid: str) -> MappedDevice:
    """Map the pool behind `descriptor`, which is closed, on the GPU of this UUID.

    Raises:
        ConfigError: the GPU is not visible here, or cuda-python is not installed.
    """
    try:
        driver = CudaDriver()
        index = find_device(driver, uuid)
        return MappedDevice(driver, index, CudaDevice(index), descriptor, size)
    finally:
        os.close(descriptor)
