"""How a long prompt is cut: everything once, no slice larger than its room, none that would be a decode step."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tierkv.slices import CHUNK_TOKENS, Room, even, within


def test_a_budget_gives_less_the_more_it_holds() -> None:
    """64 exact pages, low-bit ones an eighth: two thirds of what is free, then of what 256 low-bit pages leave."""
    room = Room(64 * 800, 16, 800, 100)
    assert room.tokens(0) == 42 * 16
    assert room.tokens(256 * 16) == 21 * 16  # 32 are free
    assert room.tokens(400 * 16) == 16 * 16  # a quarter, whatever is there
    assert Room(100, 16, 800, 100).tokens(0) == 16
    assert Room(1 << 40, 16, 800, 100).tokens(0) == CHUNK_TOKENS


@given(
    columns=st.integers(0, 20_000),
    before=st.integers(0, 50_000),
    pages=st.integers(1, 2_000),
    packed=st.integers(1, 800),
)
def test_slices_cover_the_prompt_within_their_room(
    columns: int, before: int, pages: int, packed: int
) -> None:
    room = Room(pages * 800, 16, 800, packed)
    slices = within(columns, before, room)
    assert [0, *(stop for _, stop in slices)] == [*(start for start, _ in slices), columns]
    assert all(0 < stop - start <= room.tokens(before + start) for start, stop in slices)
    assert columns == 1 or all(stop - start > 1 for start, stop in slices)
    sizes = [room.tokens(before + start) for start, _ in slices]
    assert all(a >= b for a, b in itertools.pairwise(sizes))


@given(columns=st.integers(1, 10_000), chunk=st.integers(2, 5_000))
def test_even_slices_differ_by_one_at_most(columns: int, chunk: int) -> None:
    slices = even(columns, chunk)
    sizes = [stop - start for start, stop in slices]
    assert sum(sizes) == columns and max(sizes) <= chunk and max(sizes) - min(sizes) <= 1
    assert len(slices) == -(-columns // chunk)
