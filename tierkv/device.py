"""A GPU as torch has it: memory that others made as tensors, streams, fences, pinned memory. Imports torch.

Work on a stream is in order, work on different ones is not: one waits for another's fence, on the device, never on
the host. Whoever uses memory on a stream keeps it alive, and what it holds unchanged, until a later fence is passed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from tierkv.fence import Fence


class Stream(Protocol):
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy of bytes; host memory should be pinned, else the call may last as long as the copy."""
        ...

    def launching(self) -> AbstractContextManager[object]:
        """Kernels launched within go to this stream."""
        ...

    def wait(self, fence: Fence) -> None:
        """What is launched from now on begins after the fence, which is one of the same device."""
        ...

    def fence(self) -> Fence:
        """Passed when everything launched here so far is done."""
        ...


class Device(Protocol):
    @property
    def name(self) -> torch.device: ...

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        """Mapped device memory as bytes, without a copy. The tensor and its views keep `owner` alive."""
        ...

    def stream(self) -> Stream: ...

    def fence(self) -> Fence:
        """Passed when everything is done that this thread has launched on its current stream."""
        ...

    def pinned(self, size: int) -> torch.Tensor:
        """Fresh host bytes that the device copies from and to directly."""
        ...

    def synchronize(self) -> None:
        """Wait until everything that this process has launched is done."""
        ...


class CudaDevice:
    """The GPU of ordinal `index` in this process."""

    def __init__(self, index: int) -> None:
        self.name = torch.device("cuda", index)

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        tensor: torch.Tensor = torch.as_tensor(_Foreign(address, size, owner), device=self.name)
        return tensor

    def stream(self) -> CudaStream:
        return CudaStream(self.name)

    def fence(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.name))
        return event

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.name)


class CudaStream:
    """A stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def launching(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def wait(self, fence: Fence) -> None:
        assert isinstance(fence, torch.cuda.Event)
        self._stream.wait_event(fence)

    def fence(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


class _Foreign:
    """Device memory that torch did not allocate. A tensor made of it holds on to it, and so to `owner`."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2,
        }  # fmt: skip
