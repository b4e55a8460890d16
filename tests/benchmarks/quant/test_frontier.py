"""The picture."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.quant.records import record_of
from tierkv.benchmarks.quant import frontier


def test_the_frontier_is_what_nothing_else_matches_in_bits_and_kl() -> None:
    found = [
        record_of(*point)
        for point in (("a", 2.0, 0.4), ("b", 2.5, 0.1), ("c", 2.5, 0.2), ("d", 3.0, 0.1), ("e", 4.0, 0.01))
    ]
    assert [one.codec for one in frontier.pareto(found)] == ["a", "b", "e"]


def test_labels_that_would_cover_each_other_move_up_and_others_stay() -> None:
    label, height = frontier.Label, frontier.LINE_HEIGHT
    heights = frontier.spread([label(0, 30, 10), label(20, 50, 12), label(60, 90, 11), label(5, 25, 9)])
    assert heights == [9 + height, 9 + 2 * height, 11, 9]


def test_the_picture_is_drawn_and_leaves_out_what_a_log_scale_cannot_show(tmp_path: Path) -> None:
    file = tmp_path / "new" / "quant.png"
    frontier.draw([record_of("a", 2.5, 0.1), record_of("exact", 32.0, 0.0)], file)
    assert file.read_bytes().startswith(b"\x89PNG")
