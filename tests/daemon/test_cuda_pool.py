"""The CUDA pool against a driver that checks the order of calls and that nothing is left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.fake_cuda import GRANULE, FakeDriver
from tierkv.daemon.cuda_pool import CudaPool, CudaPools, RegisteredHost, find_device, same_description
from tierkv.errors import ConfigError


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_create_maps_in_cudas_order_and_close_undoes_it_in_reverse() -> None:
    before, driver = descriptors(), FakeDriver()
    pool = CudaPool.create(driver, 0, 4 * GRANULE)
    assert driver.calls == ["create", "export", "reserve", "map", "set_access"]
    driver.calls.clear()
    pool.close()
    assert driver.calls == ["unmap", "free_address", "release"]
    pool.close()  # twice is once
    assert driver.left() == (0, 0, 0, 0)
    assert descriptors() == before


def test_a_size_is_a_total_so_it_is_rounded_down_to_the_granularity() -> None:
    pool = CudaPool.create(FakeDriver(), 0, 3 * GRANULE + 17)
    assert pool.size == 3 * GRANULE
    pool.close()


@pytest.mark.parametrize("step", ["create", "export", "reserve", "map", "set_access"])
def test_a_failure_at_any_step_of_create_leaves_nothing(step: str) -> None:
    before, driver = descriptors(), FakeDriver(fails=step)
    with pytest.raises(ConfigError, match=f"{step} failed: CUDA_ERROR_OUT_OF_MEMORY"):
        CudaPool.create(driver, 0, GRANULE)
    assert driver.left() == (0, 0, 0, 0)
    assert descriptors() == before


@pytest.mark.parametrize("step", ["import", "reserve", "map", "set_access"])
def test_a_failure_at_any_step_of_adopt_leaves_the_callers_descriptor_alone(step: str) -> None:
    owner = CudaPool.create(FakeDriver(), 0, GRANULE)
    before, driver = descriptors(), FakeDriver(fails=step)
    with pytest.raises(ConfigError, match="cannot be mapped"):
        CudaPool.adopt(driver, 0, owner.descriptor(), GRANULE)
    assert driver.left() == (0, 0, 0, 0)
    assert descriptors() == before
    os.fstat(owner.descriptor())
    owner.close()


def test_what_one_process_writes_the_other_reads_and_it_outlives_its_creator() -> None:
    owner_driver, worker_driver = FakeDriver(), FakeDriver()
    owner = CudaPools(owner_driver).create(2 * GRANULE)
    worker = CudaPools(worker_driver).adopt(owner.descriptor(), 2 * GRANULE)
    owner.write(64, np.arange(16, dtype=np.uint8))
    owner.close()
    assert worker.read(64, 16).tolist() == list(range(16))
    successor = CudaPools(FakeDriver()).adopt(worker.descriptor(), 2 * GRANULE)
    worker.close()
    assert successor.read(64, 16).tolist() == list(range(16))
    successor.close()


def test_strided_bytes_are_written_as_they_read() -> None:
    pool = CudaPool.create(FakeDriver(), 0, GRANULE)
    pool.write(0, np.arange(32, dtype=np.uint8)[::2])
    assert pool.read(0, 16).tolist() == list(range(0, 32, 2))
    pool.close()


@pytest.mark.parametrize(("offset", "size"), [(-1, 4), (GRANULE - 3, 4), (0, GRANULE + 1)])
def test_bytes_outside_the_pool_are_refused(offset: int, size: int) -> None:
    pool = CudaPool.create(FakeDriver(), 0, GRANULE)
    with pytest.raises(ValueError, match="outside a pool"):
        pool.read(offset, size)
    with pytest.raises(ValueError, match="outside a pool"):
        pool.write(offset, np.zeros(size, np.uint8))
    pool.close()


def test_a_pool_of_another_size_or_another_kind_of_descriptor_is_not_adopted() -> None:
    owner = CudaPool.create(FakeDriver(), 0, GRANULE)
    with pytest.raises(ConfigError, match="cannot be mapped"):
        CudaPool.adopt(FakeDriver(), 0, owner.descriptor(), 2 * GRANULE)
    with open(os.devnull) as stranger, pytest.raises(ConfigError, match="cannot be mapped"):
        CudaPool.adopt(FakeDriver(), 0, stranger.fileno(), GRANULE)
    owner.close()


def test_sizes_that_the_device_cannot_serve_are_refused_before_anything_is_made() -> None:
    driver = FakeDriver(free=8 << 20)
    with pytest.raises(ConfigError, match="has 8,388,608 free; lower --hbm"):
        CudaPool.create(driver, 0, 1 << 30)
    with pytest.raises(ConfigError, match=r"less than one allocation of this GPU \(2,097,152\)"):
        CudaPool.create(driver, 0, GRANULE - 1)
    with pytest.raises(ConfigError, match="cannot export"):
        CudaPool.create(FakeDriver(shares=False), 0, GRANULE)
    assert driver.calls == []


def test_devices_are_matched_by_uuid_not_by_ordinal() -> None:
    assert find_device(FakeDriver(), "bb" * 16) == 1
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        find_device(FakeDriver(), "cc" * 16)


def test_a_descriptor_that_comes_back_over_a_socket_is_known_again() -> None:
    pool = CudaPool.create(FakeDriver(), 0, GRANULE)
    stranger = CudaPool.create(FakeDriver(), 0, GRANULE)
    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        socket.send_fds(left, [b"x"], [pool.descriptor()])
        returned = socket.recv_fds(right, 1, 1)[1][0]
    assert returned != pool.descriptor()
    assert pool.same(returned)
    assert not pool.same(stranger.descriptor())
    os.close(returned)
    reopened = os.open(f"/proc/self/fd/{pool.descriptor()}", os.O_RDWR)
    assert not same_description(
        pool.descriptor(), reopened
    )  # same bytes, other description: CUDA never makes one
    os.close(reopened)
    pool.close()
    stranger.close()


def test_the_host_pool_is_pinned_once_and_unpinned_once() -> None:
    driver, data = FakeDriver(), np.zeros(8192, np.uint8)
    registered = RegisteredHost(driver, 0, data)
    assert driver.pinned == {data.ctypes.data: 8192}
    registered.close()
    registered.close()
    assert driver.calls == ["register_host", "unregister_host"]
    with pytest.raises(ConfigError, match=r"cannot be pinned.*lower --host"):
        RegisteredHost(FakeDriver(fails="register_host"), 0, data)
    nothing = FakeDriver()
    RegisteredHost(nothing, 0, np.zeros(0, np.uint8)).close()
    assert nothing.calls == []


def test_without_cuda_python_the_modules_import_and_use_says_what_to_install() -> None:
    code = """
import sys
sys.modules["cuda"] = None
from tierkv.daemon import cuda_driver, cuda_pool
try:
    cuda_driver.CudaDriver()
except Exception as error:
    print(type(error).__name__, error)
"""
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True
    ).stdout
    assert said.startswith("ConfigError")
    assert 'pip install ".[cuda]"' in said
