"""The page table's arrays against a list of pages, under random appends, cuts and replica changes."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.protocol import PageChange, PageEntry
from tierkv.regions import Region
from tierkv.rows import PageTable
from tierkv.table import Kind


@dataclass
class Page:
    page: int
    region: int
    count: int
    kind: int
    offset: int


appends = st.tuples(st.just("append"), st.integers(1, 16), st.sampled_from(list(Kind)))
grows = st.tuples(st.just("grow"), st.integers(1, 5), st.none())
cuts = st.tuples(st.just("cut"), st.integers(0, 400), st.none())
changes = st.tuples(st.just("change"), st.integers(0, 200), st.sampled_from(list(Kind)))


def compare(table: PageTable, pages: list[Page]) -> None:
    starts = [sum(page.count for page in pages[:row]) for row in range(len(pages))]
    total = sum(page.count for page in pages)
    assert table.tokens == total and table.length == len(pages)
    for stop in {0, total // 2, max(0, total - 1), total}:
        rows = table.rows(stop)
        expected = [
            (page.offset, page.kind, min(page.count, stop - start), start)
            for page, start in zip(pages, starts, strict=True)
            if start < stop and page.kind != Kind.NONE
        ]
        assert list(zip(*(column.tolist() for column in rows), strict=True)) == expected
        entries = table.entries(stop)
        assert [(e.page, e.region, e.count, e.kind) for e in entries] == [
            (page.page, page.region, min(page.count, stop - start), page.kind)
            for page, start in zip(pages, starts, strict=True)
            if start < stop
        ]
        assert [page for page, _ in table.after(stop)] == [page.page for page in pages[len(entries) :]]


@given(st.lists(st.one_of(appends, appends, grows, cuts, changes), max_size=120))
@settings(max_examples=60, deadline=None)
def test_a_page_table_is_a_list_of_pages(steps: list[tuple[str, int, Kind | None]]) -> None:
    table, pages = PageTable(), list[Page]()
    for number, (verb, value, kind) in enumerate(steps):
        if verb == "append":
            assert kind is not None
            page = Page(number, Region.USER, value, kind, number * 64 if kind else -1)
            pages.append(page)
            table.append(PageEntry(page.page, page.region, page.count, page.kind, page.offset))
        elif verb == "grow" and pages:
            pages[-1].count += value
            table.grow_last(value)
        elif verb == "change":
            assert kind is not None
            table.change(PageChange(value, kind, 7 * 64, 0, -1, 0))
            for page in pages:
                if page.page == value:
                    page.kind, page.offset = kind, 7 * 64 if kind else -1
        elif verb == "cut" and value <= sum(page.count for page in pages):
            gone = []
            while pages and sum(page.count for page in pages[:-1]) >= value:
                gone.insert(0, (pages[-1].page, pages[-1].offset))
                pages.pop()
            if pages:
                pages[-1].count -= sum(page.count for page in pages) - value
            assert table.cut(value) == gone
        compare(table, pages)
