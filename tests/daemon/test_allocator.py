"""Frames, slots and blocks of one pool."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.daemon.allocator import PoolAllocator, SizeClass, aligned

EXACT = SizeClass(frame=640, item=640)
LOW = SizeClass(frame=640, item=128)  # five a frame
OTHER = SizeClass(frame=448, item=448)  # another geometry


def test_a_frame_is_one_exact_page_or_as_many_low_bit_pages_as_fit() -> None:
    pool = PoolAllocator(640)
    assert pool.allocate(EXACT) == 0
    assert pool.allocate(LOW) is None
    pool.release(EXACT, 0)
    assert {pool.allocate(LOW) for _ in range(5)} == {0, 128, 256, 384, 512}
    assert pool.allocate(LOW) is None


def test_a_frame_is_whole_again_when_its_last_low_bit_page_leaves() -> None:
    pool = PoolAllocator(1280)
    offsets = [pool.allocate(LOW) for _ in range(6)]
    assert pool.free_frames(640) == 0
    for offset in offsets:
        assert offset is not None
        pool.release(LOW, offset)
    assert pool.free_frames(640) == 2 and pool.used_bytes == 0


def test_exact_and_low_bit_frames_grow_towards_each_other() -> None:
    pool = PoolAllocator(10 * 640)
    assert pool.allocate(EXACT) == 0
    assert pool.allocate(LOW) == 9 * 640


def test_the_rest_of_a_pool_that_no_frame_fits_serves_blocks() -> None:
    pool = PoolAllocator(640 + 192)
    assert pool.allocate(EXACT) == 0
    assert pool.allocate_block(aligned(130)) == 640
    assert pool.free_bytes == 0


def test_returning_bytes_twice_is_caught() -> None:
    pool = PoolAllocator(1280)
    first, second = pool.allocate(LOW), pool.allocate(LOW)
    assert first is not None and second is not None
    pool.release(LOW, first)
    with pytest.raises(AssertionError, match="returned twice"):
        pool.release(LOW, first)


def test_peak_counts_whole_frames() -> None:
    pool = PoolAllocator(10 * 640)
    offset = pool.allocate(LOW)
    assert offset is not None
    pool.release(LOW, offset)
    assert pool.peak_bytes == 640 and pool.used_bytes == 0


operations = st.lists(
    st.tuples(st.sampled_from(["take", "give"]), st.sampled_from([EXACT, LOW, OTHER]), st.integers(0, 10**6)),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(size=st.integers(0, 20 * 640), steps=operations)
def test_items_never_overlap_and_a_twin_can_claim_them(
    size: int, steps: list[tuple[str, SizeClass, int]]
) -> None:
    pool = PoolAllocator(size)
    held: list[tuple[SizeClass, int]] = []
    for action, size_class, pick in steps:
        if action == "take":
            offset = pool.allocate(size_class)
            if offset is not None:
                held.append((size_class, offset))
        elif held:
            pool.release(*held.pop(pick % len(held)))
        pool.check_integrity()
        spans = sorted((offset, offset + c.item) for c, offset in held)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert all(start >= 0 and stop <= size for start, stop in spans)
    twin = PoolAllocator(size)
    assert all(twin.claim(size_class, offset) for size_class, offset in held)
    assert not any(twin.claim(size_class, offset) for size_class, offset in held), "claimed once only"
    twin.check_integrity()
    assert twin.used_bytes == pool.used_bytes
    for size_class, offset in held:
        twin.release(size_class, offset)
    assert twin.used_bytes == 0


@pytest.mark.parametrize("offset", [-64, 64, 10**9])
def test_offsets_that_cannot_be_items_are_not_claimed(offset: int) -> None:
    pool = PoolAllocator(1280)
    assert not pool.claim(EXACT, offset)
    assert not pool.claim_block(offset if offset < 0 else 10**9, 64)
