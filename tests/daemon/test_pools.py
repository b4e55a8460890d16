from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from tierkv.daemon.pools import HOST_FILE, HbmPool, HostPool
from tierkv.errors import ConfigError

SIZE = 5 * 4096


def test_pool_sizes_are_rounded_down_to_whole_mapping_pages(tmp_path: Path) -> None:
    hbm, host = HbmPool.create(SIZE + 4095), HostPool(tmp_path, SIZE + 1)
    assert hbm.size == len(hbm.data) == host.size == len(host.data) == SIZE
    hbm.close()
    host.close()


def test_an_hbm_pool_below_one_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="4096"):
        HbmPool.create(4095)


def test_an_adopted_pool_is_the_same_memory_also_after_its_maker_is_gone() -> None:
    first = HbmPool.create(SIZE)
    first.data[:] = np.arange(SIZE) % 251
    kept = os.dup(first.descriptor())  # what a worker holds
    first.close()
    second = HbmPool.adopt(kept, SIZE)
    assert second.same(kept)
    assert np.array_equal(second.data, np.arange(SIZE) % 251)
    second.close()
    os.close(kept)


def test_two_pools_are_not_the_same() -> None:
    one, other = HbmPool.create(SIZE), HbmPool.create(SIZE)
    assert one.same(one.descriptor()) and not one.same(other.descriptor())
    one.close()
    other.close()


def test_nobody_can_shrink_an_hbm_pool() -> None:
    pool = HbmPool.create(SIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(pool.descriptor(), 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(pool.descriptor(), 2 * SIZE)
    pool.close()


def test_only_a_sealed_memfd_of_the_right_size_is_adopted(tmp_path: Path) -> None:
    pool = HbmPool.create(SIZE)
    with pytest.raises(ConfigError, match=r"20,480 bytes, this daemon has 8,192"):
        HbmPool.adopt(pool.descriptor(), 8192)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SIZE)
    with pytest.raises(ConfigError, match="not sealed"):
        HbmPool.adopt(unsealed, SIZE)
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(SIZE)
        with pytest.raises(ConfigError):
            HbmPool.adopt(file.fileno(), SIZE)
    pool.close()
    os.close(unsealed)


def test_a_host_pool_is_private_and_allocated_up_front(tmp_path: Path) -> None:
    pool = HostPool(tmp_path, SIZE)
    found = os.stat(tmp_path / HOST_FILE)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size == SIZE and found.st_blocks * 512 >= SIZE  # not sparse
    pool.close()


def test_a_host_pool_is_reopened_as_it_is(tmp_path: Path) -> None:
    first = HostPool(tmp_path, SIZE)
    first.write(100, np.full(50, 7, np.uint8))
    first.close()
    second = HostPool(tmp_path, SIZE)
    assert second.reopened and not first.reopened
    assert second.read(99, 52).tolist() == [0] + [7] * 50 + [0]
    second.close()


def test_a_host_pool_of_another_size_is_made_anew(tmp_path: Path) -> None:
    first = HostPool(tmp_path, SIZE)
    first.write(0, np.ones(10, np.uint8))
    second = HostPool(tmp_path, 2 * SIZE)
    assert second.size == 2 * SIZE and not second.reopened and not second.data.any()
    assert first.data[:10].all()  # who maps the old one keeps it
    first.close()
    second.close()


def test_workers_cannot_write_the_host_pool(tmp_path: Path) -> None:
    pool = HostPool(tmp_path, SIZE)
    with pytest.raises(PermissionError):
        mmap.mmap(pool.descriptor(), SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with mmap.mmap(pool.descriptor(), SIZE, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        pool.write(0, np.frombuffer(b"hello", np.uint8))
        assert view[:5] == b"hello"
    pool.close()


def test_a_host_pool_that_does_not_fit_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    with pytest.raises(ConfigError, match="lower --host"):
        HostPool(tmp_path, room.f_bavail * room.f_frsize + (1 << 30))
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_place_of_the_host_pool_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(bytes(SIZE))
    (tmp_path / HOST_FILE).symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match="remove it"):
        HostPool(tmp_path, SIZE)


def test_a_node_without_a_host_tier_has_an_empty_host_pool(tmp_path: Path) -> None:
    pool = HostPool(tmp_path, 0)
    assert pool.size == 0 and len(pool.data) == 0 and os.fstat(pool.descriptor()).st_size == 0
    pool.close()


@pytest.mark.parametrize(("offset", "size"), [(-1, 2), (SIZE - 1, 2), (SIZE, 1), (0, SIZE + 1), (0, -1)])
def test_bytes_outside_a_pool_are_refused(offset: int, size: int) -> None:
    pool = HbmPool.create(SIZE)
    with pytest.raises(ValueError, match="outside"):
        pool.read(offset, size)
    pool.close()


def test_closing_keeps_views_that_are_still_held() -> None:
    pool = HbmPool.create(SIZE)
    view = pool.read(0, 10)
    view[:] = 3
    pool.close()
    assert view.tolist() == [3] * 10
