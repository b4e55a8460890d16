"""Options of recall: what cannot be is refused before a generation begins; estimates name the best pages first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tierkv.errors import ConfigError
from tierkv.protocol import PageEntry
from tierkv.recall import Estimates, RecallOptions
from tierkv.rows import PageTable
from tierkv.table import Kind


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "sometimes"},
        {"pages": -1},
        {"read": -2},
        {"seconds": float("nan")},
        {"seconds": 1e9},
        {"pages": 1 << 20},
    ],
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"recall"):
        RecallOptions(**wrong)


def test_each_mode_adds_to_the_one_before() -> None:
    modes = [RecallOptions(mode) for mode in ("off", "background", "direct", "strict")]
    assert [mode.estimates for mode in modes] == [False, True, True, True]
    assert [mode.reads for mode in modes] == [False, False, True, True]


def test_the_best_estimates_come_first_and_pages_without_any_not_at_all() -> None:
    found = Estimates(np.array([7, 8, 9, 10]), np.array([0.1, 0.0, 0.4, 1.5], np.float32))
    assert found.best(3)[0] == [10, 9, 7]
    assert found.best(3)[1] == pytest.approx([1.0, 0.4, 0.1])  # a share is never beyond 1
    assert found.best(9)[0] == [10, 9, 7]


def test_host_bytes_are_verified_once_at_each_place() -> None:
    table, seen = PageTable(), []

    def verify(page: int, kind: int, offset: int, checksum: int) -> bool:
        seen.append((page, offset))
        return page != 2

    for page in (1, 2, 3):
        table.append(PageEntry(page, 0, 16, Kind.NONE, -1, Kind.EXACT, 64 * page, 5))
    assert table.cold(48, verify).pages.tolist() == [1, 3]
    assert table.cold(40, verify).counts.tolist() == [16, 8]
    assert seen == [(1, 64), (2, 128), (3, 192)]
    assert table.verified[:3].tolist() == [1, -1, 1]
    fork, elsewhere = PageTable(), PageTable()
    fork.append(PageEntry(1, 0, 16, Kind.NONE, -1, Kind.EXACT, 64, 5))
    elsewhere.append(PageEntry(1, 0, 16, Kind.NONE, -1, Kind.EXACT, 640, 5))
    for other in (fork, elsewhere):
        other.trust(table)
        other.cold(16, verify)
    assert seen[3:] == [(1, 640)], "only what lies elsewhere is read again"
