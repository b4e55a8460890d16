"""A GPU made of memfds: refuses what CUDA refuses, counts what is left, and is late like the real one.

Reserved addresses are real ones of this process, so mapped memory can be read as a tensor and kernels run on it in
triton's interpreter. What is launched on a stream is done one launch at a time, when somebody looks at a fence.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tierkv.daemon.cuda_driver import Bytes, CudaError
from tierkv.daemon.gpu import Gpu
from tierkv.fence import Fence

GRANULE = 2 << 20
UUIDS = ["aa" * 16, "bb" * 16]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
MAP_FIXED, NOTHING = 0x10, 0


def _map(address: int, size: int, access: int, flags: int, descriptor: int) -> int:
    found = _libc.mmap(address or None, size, access, flags, descriptor, 0)
    assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return int(found)


class FakeDriver:
    """Device memory as memfds. Refuses what CUDA refuses: mapping what is not reserved, freeing what is mapped."""

    def __init__(self, free: int = 64 << 20, shares: bool = True, fails: str = "") -> None:
        self.free, self.shares, self.fails = free, shares, fails
        self.calls: list[str] = []
        self.handles: dict[int, int] = {}  # handle -> memfd
        self.reserved: dict[int, int] = {}  # address -> size
        self.mapped: dict[int, int] = {}  # address -> handle
        self.accessible: set[int] = set()
        self.pinned: dict[int, int] = {}
        self._next = 1

    def _say(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise CudaError(f"{name} failed: CUDA_ERROR_OUT_OF_MEMORY")

    def _number(self) -> int:
        self._next += 1
        return self._next

    def left(self) -> tuple[int, int, int, int]:
        return len(self.handles), len(self.reserved), len(self.mapped), len(self.pinned)

    def device_count(self) -> int:
        return len(UUIDS)

    def uuid(self, device: int) -> str:
        return UUIDS[device]

    def shares_descriptors(self, device: int) -> bool:
        return self.shares

    def free_bytes(self, device: int) -> int:
        return self.free

    def granularity(self, device: int) -> int:
        return GRANULE

    def create(self, device: int, size: int) -> int:
        self._say("create")
        assert size % GRANULE == 0, "CUDA refuses sizes off the granularity"
        memory = os.memfd_create("device")
        os.ftruncate(memory, size)
        self.handles[handle := self._number()] = memory
        return handle

    def export(self, device: int, handle: int) -> int:
        self._say("export")
        return os.dup(self.handles[handle])

    def import_(self, device: int, descriptor: int) -> int:
        self._say("import")
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:device"):
            raise CudaError("import failed: CUDA_ERROR_INVALID_VALUE")
        self.handles[handle := self._number()] = os.dup(descriptor)
        return handle

    def release(self, device: int, handle: int) -> None:
        self._say("release")
        os.close(self.handles.pop(handle))

    def reserve(self, device: int, size: int) -> int:
        self._say("reserve")
        address = _map(0, size, NOTHING, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self.reserved[address] = size
        return address

    def free_address(self, device: int, address: int, size: int) -> None:
        self._say("free_address")
        assert address not in self.mapped, "CUDA refuses to free mapped addresses"
        assert self.reserved.pop(address) == size
        _libc.munmap(address, size)

    def map(self, device: int, address: int, size: int, handle: int) -> None:
        self._say("map")
        assert self.reserved[address] == size
        if os.fstat(self.handles[handle]).st_size != size:
            raise CudaError("map failed: CUDA_ERROR_INVALID_VALUE")
        self.mapped[address] = handle

    def unmap(self, device: int, address: int, size: int) -> None:
        self._say("unmap")
        del self.mapped[address]
        self.accessible.discard(address)
        _map(address, size, NOTHING, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED, -1)

    def set_access(self, device: int, address: int, size: int) -> None:
        self._say("set_access")
        memory = self.handles[self.mapped[address]]
        _map(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, memory)
        self.accessible.add(address)

    def _memory(self, address: int, size: int) -> Bytes:
        inside = (a <= address and address + size <= a + self.reserved[a] for a in self.accessible)
        assert any(inside), "a device fault in CUDA"
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)

    def read(self, device: int, address: int, out: Bytes) -> None:
        assert out.flags.c_contiguous
        out[:] = self._memory(address, out.nbytes)

    def write(self, device: int, address: int, source: Bytes) -> None:
        assert source.flags.c_contiguous
        self._memory(address, source.nbytes)[:] = source.reshape(-1).view(np.uint8)

    def register_host(self, device: int, address: int, size: int) -> None:
        self._say("register_host")
        self.pinned[address] = size

    def unregister_host(self, device: int, address: int) -> None:
        self._say("unregister_host")
        del self.pinned[address]


class FakeFence:
    """Passed when `launched` of the stream's launches are done. A look does one."""

    def __init__(self, stream: FakeStream, launched: int) -> None:
        self.stream, self.launched = stream, launched

    def query(self) -> bool:
        passed = self.stream.done >= self.launched
        if not passed and not self.stream.held:
            self.stream.advance()
        return passed

    def synchronize(self) -> None:
        while self.stream.done < self.launched:
            self.stream.advance()


class FakeStream:
    """Launches wait in a queue; `held` keeps them there, but from whoever synchronizes."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], object]] = deque()
        self.done, self.launched, self.held = 0, 0, False

    def advance(self) -> None:
        self.waiting.popleft()()
        self.done += 1

    def launch(self, work: Callable[[], object]) -> None:
        self.waiting.append(work)
        self.launched += 1

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape
        self.launch(lambda: target.copy_(source))

    def wait(self, fence: Fence) -> None:
        self.launch(fence.synchronize)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Kernels cannot be put off, so all that they come after is done first."""
        self.fence().synchronize()
        yield

    def fence(self) -> FakeFence:
        return FakeFence(self, self.launched)


class FakeDevice:
    """The fake GPU as torch has it: `current` is the stream on which a worker's kernels run."""

    name = torch.device("cpu")

    def __init__(self) -> None:
        self.current = FakeStream()
        self.streams: list[FakeStream] = []
        self.synchronized = 0

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        memory = (ctypes.c_uint8 * size).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]  # a tensor keeps its array, and that the memory
        return torch.from_numpy(np.frombuffer(memory, np.uint8))

    def stream(self) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def fence(self) -> FakeFence:
        return self.current.fence()

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def synchronize(self) -> None:
        self.synchronized += 1
        for stream in (self.current, *self.streams):
            stream.fence().synchronize()


def fake_gpu(driver: FakeDriver | None = None, device: FakeDevice | None = None) -> Gpu:
    return Gpu(driver or FakeDriver(), 0, device or FakeDevice())
