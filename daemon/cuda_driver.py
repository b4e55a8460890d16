"""The CUDA driver calls that a pool needs, one method each, through cuda-python. Nothing else in tierkv calls them.

Every call names its device, because threads (loop, mover, attach) share one primary context and CUDA keeps the
current one per thread. Failures are `CudaError`s with CUDA's own name for the reason.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import ConfigError

Bytes = NDArray[np.uint8]


class CudaError(OSError):
    """A driver call failed. The mover counts it as reason `io`."""


class Driver(Protocol):
    """What `cuda_pool` asks of a device. Handles and addresses are plain integers."""

    def device_count(self) -> int: ...

    def uuid(self, device: int) -> str:
        """32 hexadecimal digits; the same in every process, whatever CUDA_VISIBLE_DEVICES says."""
        ...

    def shares_descriptors(self, device: int) -> bool:
        """Whether allocations can be exported as POSIX file descriptors."""
        ...

    def free_bytes(self, device: int) -> int: ...

    def granularity(self, device: int) -> int:
        """Bytes of which a shareable allocation is a multiple (2 MiB on present devices)."""
        ...

    def create(self, device: int, size: int) -> int:
        """Physical memory, exportable; returns its handle."""
        ...

    def export(self, device: int, handle: int) -> int:
        """A new file descriptor, owned by the caller."""
        ...

    def import_(self, device: int, descriptor: int) -> int:
        """A handle to the memory behind `descriptor`, which stays the caller's."""
        ...

    def release(self, device: int, handle: int) -> None: ...

    def reserve(self, device: int, size: int) -> int:
        """A range of addresses with nothing behind it."""
        ...

    def free_address(self, device: int, address: int, size: int) -> None: ...

    def map(self, device: int, address: int, size: int, handle: int) -> None: ...

    def unmap(self, device: int, address: int, size: int) -> None: ...

    def set_access(self, device: int, address: int, size: int) -> None:
        """Let `device` read and write the mapped range."""
        ...

    def read(self, device: int, address: int, out: Bytes) -> None:
        """Copy from the device; `out` is contiguous."""
        ...

    def write(self, device: int, address: int, source: Bytes) -> None:
        """Copy to the device; `source` is contiguous."""
        ...

    def register_host(self, device: int, address: int, size: int) -> None:
        """Pin host memory, so that the device copies from it directly."""
        ...

    def unregister_host(self, device: int, address: int) -> None: ...


class CudaDriver:
    """`Driver` over `cuda.bindings.driver`.

    Raises:
        ConfigError: cuda-python or NVIDIA's driver is not there.
    """

    def __init__(self) -> None:
        try:
            self._cuda: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError:
            raise ConfigError(
                'a CUDA pool needs cuda-python, which is not installed: pip install ".[cuda]" in a checkout of tierkv'
            ) from None
        try:
            self._call("cuInit", 0)
        except Exception as error:  # cuda-python raises its own kinds when libcuda is absent
            raise ConfigError(f"CUDA cannot be used on this machine: {error}") from None
        self._contexts: dict[int, Any] = {}

    def device_count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def uuid(self, device: int) -> str:
        raw = self._call("cuDeviceGetUuid", self._call("cuDeviceGet", device)).bytes
        return bytes(raw).hex()

    def shares_descriptors(self, device: int) -> bool:
        attribute = (
            self._cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        )
        return bool(self._call("cuDeviceGetAttribute", attribute, self._call("cuDeviceGet", device)))

    def free_bytes(self, device: int) -> int:
        self._enter(device)
        free, _total = self._call("cuMemGetInfo")
        return int(free)

    def granularity(self, device: int) -> int:
        minimum = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties(device), minimum))

    def create(self, device: int, size: int) -> int:
        self._enter(device)
        return int(self._call("cuMemCreate", size, self._properties(device), 0))

    def export(self, device: int, handle: int) -> int:
        self._enter(device)
        return int(self._call("cuMemExportToShareableHandle", handle, self._descriptor_type, 0))

    def import_(self, device: int, descriptor: int) -> int:
        self._enter(device)
        return int(self._call("cuMemImportFromShareableHandle", descriptor, self._descriptor_type))

    def release(self, device: int, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def reserve(self, device: int, size: int) -> int:
        self._enter(device)
        return int(self._call("cuMemAddressReserve", size, 0, 0, 0))

    def free_address(self, device: int, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def map(self, device: int, address: int, size: int, handle: int) -> None:
        self._enter(device)
        self._call("cuMemMap", address, size, 0, handle, 0)

    def unmap(self, device: int, address: int, size: int) -> None:
        self._enter(device)
        self._call("cuMemUnmap", address, size)

    def set_access(self, device: int, address: int, size: int) -> None:
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, size, [access], 1)

    def read(self, device: int, address: int, out: Bytes) -> None:
        self._enter(device)
        self._call("cuMemcpyDtoH", out.ctypes.data, address, out.nbytes)

    def write(self, device: int, address: int, source: Bytes) -> None:
        self._enter(device)
        self._call("cuMemcpyHtoD", address, source.ctypes.data, source.nbytes)

    def register_host(self, device: int, address: int, size: int) -> None:
        self._enter(device)
        flags = self._cuda.CU_MEMHOSTREGISTER_PORTABLE | self._cuda.CU_MEMHOSTREGISTER_DEVICEMAP
        self._call("cuMemHostRegister", address, size, flags)

    def unregister_host(self, device: int, address: int) -> None:
        self._enter(device)
        self._call("cuMemHostUnregister", address)

    @property
    def _descriptor_type(self) -> Any:
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _properties(self, device: int) -> Any:
        """Pinned memory of `device` that can be exported."""
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._descriptor_type
        properties.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        return properties

    def _enter(self, device: int) -> None:
        """Make the device's primary context current in this thread."""
        if device not in self._contexts:
            self._contexts[device] = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device))
        self._call("cuCtxSetCurrent", self._contexts[device])

    def _call(self, name: str, *args: object) -> Any:
        status, *values = getattr(self._cuda, name)(*args)
        if status != self._cuda.CUresult.CUDA_SUCCESS:
            raise CudaError(f"{name} failed: {status.name}")
        return values[0] if len(values) == 1 else tuple(values)
