"""Links between blocks are found, and change what pages are worth, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tierkv.daemon.policy import TokenState
from tierkv.daemon.policy.lift import MemDecayLift
from tierkv.regions import Region
from tierkv.study.memdecay.scenarios import Block
from tierkv.study.memdecay.variants_links import (
    Copy,
    CopyRefresh,
    Evidence,
    SharedFate,
    Span,
    Supersede,
    Superseded,
    copies_of,
    evidence_of,
    other_evidence,
    quotes_of,
    superseded_of,
)

S, L, U, I, O, R, P = Region  # noqa: E741


def block(part: str, region: Region, start: int, stop: int, call: str = "", *evidence: str) -> Block:
    return Block(part, region, start, stop, call, evidence)


BLOCKS = (
    block("opening", S, 0, 4),
    block("opening", L, 4, 8, "", "one", "paper"),
    block("one", I, 8, 10),
    block("one", O, 10, 20, "stock"),
    block("paper", R, 20, 30),
    block("two", O, 30, 36, "stock"),
    block("three", U, 36, 40),
    block("four", O, 40, 44, "stock"),
    block("closing", P, 44, 50),
)


def inserted(one: MemDecayLift, regions: list[Region], *sizes: int) -> TokenState:
    """Pieces of `sizes` tokens, one a step, from step 0 on."""
    state, at = one.new_state(), 0
    for step, size in enumerate(sizes):
        state.append(np.array(regions[at : at + size], np.int8), step)
        at += size
    return state


def test_a_plan_is_linked_to_every_block_of_the_parts_it_names() -> None:
    assert evidence_of(BLOCKS) == (Evidence(Span(4, 8), (Span(8, 10), Span(10, 20), Span(20, 30))),)
    # Told wrong: as many parts, which are not named, not the opening and not the closing.
    assert other_evidence(BLOCKS) == (Evidence(Span(4, 8), (Span(30, 36), Span(36, 40))),)
    assert other_evidence(BLOCKS[:5]) == ()


def test_a_result_is_superseded_by_the_next_of_its_call() -> None:
    assert superseded_of(BLOCKS) == (Superseded(Span(10, 20), 36), Superseded(Span(30, 36), 44))


def pages_of(state: TokenState, *borders: int) -> list[float]:
    """Scores of the pages between the borders, at step 0."""
    starts = np.array(borders[:-1])
    return state.page_scores(starts, np.diff(borders).astype(np.int32), 0).tolist()


def test_evidence_is_worth_a_share_of_its_plan() -> None:
    links = (Evidence(Span(1, 3), (Span(4, 5), Span(6, 8))),)
    state = inserted(SharedFate(links=links, share=0.75), [U, L, L, U, P, U, P, P], 8)
    # Plan .9, of which evidence has .675 at least; user .6, scratchpad .25.
    assert pages_of(state, 0, 1, 3, 4, 5, 6, 8) == pytest.approx([0.6, 0.9, 0.6, 0.675, 0.6, 0.675])
    assert pages_of(state, 3, 5, 6) == pytest.approx(
        [0.675, 0.6]
    )  # one token of it is enough; .425 otherwise
    # A plan's relief: 24 * (.2 / 2 - 0) = 2.4 more, of all of which evidence has .75.
    state.columns[0, 2] = 0.2
    assert pages_of(state, 6, 8) == pytest.approx([0.75 * 3.3])


def test_evidence_that_is_worth_more_than_its_plan_stays_so_and_a_plan_may_still_come() -> None:
    links = (Evidence(Span(2, 3), (Span(0, 1),)),)
    assert pages_of(inserted(SharedFate(links=links), [S, S, L], 3), 0, 1, 3)[0] == pytest.approx(1.0)
    assert pages_of(inserted(SharedFate(links=links), [P, P], 2), 0, 1, 2) == pytest.approx([0.25, 0.25])


def test_a_superseded_result_is_worth_nothing_once_the_newer_is_there() -> None:
    links = (Superseded(Span(1, 3), 5),)
    regions = [O, O, O, U, O]
    before, after = (inserted(Supersede(links=links), regions[:n], n) for n in (4, 5))
    assert pages_of(before, 0, 1, 2, 3, 4) == pytest.approx([0.6] * 4)
    assert pages_of(after, 0, 1, 2, 3, 4, 5) == pytest.approx([0.6, 0, 0, 0.6, 0.6])
    assert pages_of(after, 0, 2, 4) == [0, 0]  # with others in the page, too


def test_copies_are_spans_of_an_earlier_block() -> None:
    #         0-7 block, 8-14 block: tokens 2 to 6 stand again at 9 to 13
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4, 5, 6, 7, 10]
    assert copies_of(tokens, [0, 8], least=4) == (Copy(Span(2, 7), 14),)
    assert copies_of(tokens, [0, 8], least=6) == ()
    assert copies_of(tokens, [0], least=4) == ()  # within a block is not from an earlier one


def test_of_two_sources_the_later_counts_and_a_source_ends_where_its_block_does() -> None:
    tokens = [1, 2, 3, 4, 9, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6]
    # Blocks 0-4, 5-8, 9-15. The last block holds 1 2 3 4 5: block 5-8 has 1 2 3 4, and its end cuts the fifth off.
    assert copies_of(tokens, [0, 5, 9], least=3) == (Copy(Span(0, 4), 9), Copy(Span(5, 9), 14))


def test_a_copied_span_is_worth_more_when_its_copy_is_whole() -> None:
    one = CopyRefresh(links=(Copy(Span(2, 4), 7), Copy(Span(3, 4), 7)), raised=0.5, around=1)
    state = inserted(one, [U] * 6, 6)
    assert pages_of(state, *range(7)) == pytest.approx([0.6] * 6)
    state.append(np.array([U], np.int8), 0)
    # Tokens 1 to 4 stand beside or in the source; who is quoted twice has no more than who is quoted once.
    assert pages_of(state, *range(8)) == pytest.approx([0.6, 1.1, 1.1, 1.1, 1.1, 0.6, 0.6])


def test_a_tool_call_that_repeats_its_form_is_no_quote() -> None:
    form = list(range(100, 108))
    blocks = (block("a", I, 0, 8), block("a", R, 8, 16), block("b", I, 16, 24), block("b", P, 24, 32))
    document = list(range(200, 208))
    tokens = [*form, *document, *form, *document]
    assert quotes_of(tokens, blocks) == (Copy(Span(8, 16), 32),)
    assert len(copies_of(tokens, [b.start for b in blocks])) == 2
