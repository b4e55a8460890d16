"""Host memory that kernels read in place: registered with CUDA once, and let go with the last who wants it."""

from __future__ import annotations

import gc

import numpy as np
import pytest

pytest.importorskip("triton", reason="device kernels need triton: pip install triton")

from tierkv.attention import triton_host
from tierkv.attention.triton_host import PORTABLE, READ_ONLY, HostMemory
from tierkv.errors import ConfigError


class FakeRuntime:
    """cudaHostRegister and cudaHostUnregister, which refuse the flags in `refused`."""

    def __init__(self, *refused: int) -> None:
        self.refused = refused
        self.registered: dict[int, tuple[int, int]] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if flags in self.refused:
            return 801  # cudaErrorNotSupported
        assert address not in self.registered, "registered twice"
        self.registered[address] = size, flags
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def runtime(monkeypatch: pytest.MonkeyPatch, *refused: int) -> FakeRuntime:
    fake = FakeRuntime(*refused)
    monkeypatch.setattr(triton_host, "_runtime", lambda: fake)
    return fake


def mapping() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    data = np.arange(64, dtype=np.uint8)
    data.flags.writeable = False  # as a worker maps it
    return data


def test_a_mapping_is_registered_once_and_until_the_last_owner_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, data = runtime(monkeypatch), mapping()
    first, second = HostMemory(), HostMemory()
    for owner in (first, first, second):
        tensor = owner.reach(data)
        assert tensor.data_ptr() == data.ctypes.data and tensor.tolist() == list(range(64))
    assert fake.registered == {data.ctypes.data: (64, PORTABLE | READ_ONLY)}
    del first
    gc.collect()
    assert fake.registered
    del second, owner
    gc.collect()
    assert not fake.registered


def test_where_read_only_memory_is_not_registered_as_such_it_is_tried_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, data, owner = runtime(monkeypatch, PORTABLE | READ_ONLY), mapping(), HostMemory()
    owner.reach(data)
    assert fake.registered == {data.ctypes.data: (64, PORTABLE)}


def test_memory_that_cuda_does_not_take_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime(monkeypatch, PORTABLE | READ_ONLY, PORTABLE)
    with pytest.raises(ConfigError, match=r"801, 801.*recall='background'"):
        HostMemory().reach(mapping())


def test_an_empty_host_pool_needs_no_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = runtime(monkeypatch)
    assert not HostMemory().reach(np.zeros(0, np.uint8)).numel()
    assert not fake.registered
