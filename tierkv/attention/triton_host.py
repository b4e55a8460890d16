"""Host memory that a GPU's kernels read in place: registered with CUDA, which pins and maps it, once a mapping."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.attention.layer_view import unmarked
from tierkv.errors import ConfigError

PORTABLE, READ_ONLY = 0x01, 0x08
"""Flags of cudaHostRegister: for every context of the process, and for memory that is mapped read-only."""


class _Registered:
    """Bytes that CUDA has pinned until this goes; they stay mapped as long."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        place, answers = (data.ctypes.data, data.size), []
        for flags in (PORTABLE | READ_ONLY, PORTABLE):
            answers.append(int(_runtime().cudaHostRegister(*place, flags)))
            if not answers[-1]:
                break
        else:
            raise ConfigError(
                f"CUDA does not register the host pool of {data.size:,} bytes (errors {answers}), so kernels cannot "
                "read cold pages in place: raise the limit on locked memory, or take recall='background'"
            )
        weakref.finalize(self, _release, data)


def _release(data: NDArray[np.uint8]) -> None:
    with contextlib.suppress(Exception):  # the process may be on its way out
        _runtime().cudaHostUnregister(data.ctypes.data)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


_registered: weakref.WeakValueDictionary[tuple[int, int], _Registered] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class HostMemory:
    """Mappings that one owner wants registered; the process registers each once."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], _Registered] = {}

    def reach(self, data: NDArray[np.uint8]) -> torch.Tensor:
        """`data` as a tensor whose address kernels can take. The first call pins the mapping: seconds for a large one.

        Raises:
            ConfigError: CUDA does not register it.
        """
        place = data.ctypes.data, data.size
        if data.size and place not in self._held:
            with _lock:
                self._held[place] = _registered.get(place) or _registered.setdefault(place, _Registered(data))
        return torch.from_numpy(unmarked(data))


__all__ = ["HostMemory"]
