"""Reading a sequence by its markers: in any chunks, cut short, and forked."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.markers import Marker, Markers
from tierkv.regions import Region, Run

SYSTEM, USER, ANSWER, CALL, TOOL = (
    Region.SYSTEM, Region.USER, Region.SCRATCHPAD, Region.TOOL_IN, Region.TOOL_OUT,
)  # fmt: skip
SMALL = Markers([
    Marker((90, 1), SYSTEM), Marker((90, 2), USER), Marker((90, 2, 3), TOOL), Marker((90, 4), ANSWER),
    Marker((91,), CALL),
])  # fmt: skip


def regions(runs: list[Run]) -> list[Region]:
    return [run.region for run in runs for _ in range(run.tokens)]


def test_before_any_marker_a_prompt_is_the_users_and_a_lone_token_generated() -> None:
    reader = SMALL.reader()
    assert reader.label([7, 7, 7]) == [Run(USER, 3)]
    assert reader.label([7]) == [Run(ANSWER, 1)]
    assert reader.label([]) == []


def test_a_lone_token_has_the_region_of_its_message() -> None:
    reader = SMALL.reader()
    reader.label([90, 2, 3, 7, 7])
    assert [reader.label([token]) for token in (7, 7)] == [[Run(TOOL, 1)]] * 2


def test_the_longest_of_two_markers_wins() -> None:
    assert SMALL.label([90, 1, 7, 7, 7, 7, 90, 2, 3, 7]) == [Run(SYSTEM, 6), Run(TOOL, 4)]
    assert SMALL.label([90, 1, 7, 7, 7, 7, 90, 2, 7, 3]) == [Run(SYSTEM, 6), Run(USER, 4)]


def test_few_tokens_before_the_first_message_are_of_it_and_more_are_not() -> None:
    assert SMALL.label([7, 7, 7, 7, 90, 1, 8]) == [Run(SYSTEM, 7)]
    assert SMALL.label([7, 7, 7, 7, 7, 90, 1, 8]) == [Run(USER, 5), Run(SYSTEM, 3)]


def test_a_message_that_only_calls_has_no_page_for_its_opening() -> None:
    told = [90, 1, 7, 7, 7]
    assert SMALL.label([*told, 90, 4, 8, 91, 7]) == [Run(SYSTEM, 5), Run(CALL, 5)]
    assert SMALL.label([*told, 90, 4, 8, 8, 8, 8, 8, 91, 7]) == [Run(SYSTEM, 5), Run(ANSWER, 7), Run(CALL, 2)]
    reader = SMALL.reader()
    assert reader.label([*told, 90, 4]) == [Run(SYSTEM, 5), Run(ANSWER, 2)]
    assert reader.label([91, 7]) == [Run(CALL, 2)]  # a generated call: the opening is laid out


CHUNKS = st.lists(st.lists(st.sampled_from([90, 91, 1, 2, 3, 4, 7]), max_size=9), max_size=6)


def opened(ids: list[int], stop: int) -> Region | None:
    """By the definition: the region of the last marker that ends in `ids[:stop]`."""
    region = None
    for end in range(1, stop + 1):
        fits = [
            m
            for m in SMALL.markers
            if end >= len(m.tokens) and tuple(ids[end - len(m.tokens) : end]) == m.tokens
        ]
        fits = [m for m in fits if m.region != CALL or region == ANSWER]
        if fits:
            region = max(fits, key=lambda m: len(m.tokens)).region
    return region


@given(CHUNKS)
def test_however_it_is_cut_into_chunks_each_ends_in_the_region_of_the_last_marker(
    chunks: list[list[int]],
) -> None:
    reader, ids = SMALL.reader(), list[int]()
    for chunk in chunks:
        runs = reader.label(chunk)
        ids += chunk
        assert sum(run.tokens for run in runs) == len(chunk)
        assert all(one.region != other.region for one, other in pairwise(runs))
        if chunk and (last := opened(ids, len(ids))) is not None:
            assert runs[-1].region == last


@given(CHUNKS, st.integers(0, 54))
def test_what_is_cut_was_never_read(chunks: list[list[int]], kept: int) -> None:
    reader, fresh, ids = SMALL.reader(), SMALL.reader(), list[int]()
    for chunk in chunks:
        reader.label(chunk)
        ids += chunk
    kept = min(kept, len(ids))
    reader.cut(kept)
    fresh.label(ids[:kept])
    follow = [3, 7, 90, 4, 91]
    assert reader.label(follow) == fresh.label(follow)


def test_forks_go_their_own_ways() -> None:
    reader = SMALL.reader()
    reader.label([90, 2, 7])
    child = reader.fork()
    assert reader.label([90, 4, 7]) == [Run(ANSWER, 3)]
    assert child.label([7]) == [Run(USER, 1)]
    reader.cut(3)
    assert reader.label([7]) == [Run(USER, 1)]


def test_tokens_that_are_there_already_open_nothing() -> None:
    reader = SMALL.reader(held=3)
    assert reader.label([2, 7]) == [Run(USER, 2)]
    assert regions(reader.label([90, 1, 7])) == [SYSTEM] * 3
    reader.cut(2)
    assert reader.label([7]) == [Run(ANSWER, 1)]


def test_a_marker_has_tokens() -> None:
    with pytest.raises(ValueError, match="marker of user has no tokens"):
        Markers([Marker((), Region.USER)])
