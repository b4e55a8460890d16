"""Captured mass, aggregates and placements, by arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tierkv.benchmarks.recall import arms, measure, picture, placement
from tierkv.benchmarks.recall.inputs import Input
from tierkv.benchmarks.recall.placement import Room
from tierkv.benchmarks.recall.recorded import Recorded
from tierkv.benchmarks.recall.records import Record
from tierkv.benchmarks.recall.table import render
from tierkv.geometry import Geometry
from tierkv.prefetch.summaries import Centroid
from tierkv.quant import get
from tierkv.regions import Region, Run
from tierkv.study.estimators import Layout


def recorded(page_shares: list[list[float]], asks: list[int] | None = None, tokens: int = 16) -> Recorded:
    """One layer of one head; what pages `[N, P]` get of each query, the rest is on what came after the context."""
    given = torch.tensor(page_shares, dtype=torch.float32)
    queries, pages = given.shape
    return Recorded(
        torch.zeros(1, 1, pages * tokens, 2, dtype=torch.float16),
        torch.ones(1, 1, queries, 2),
        given.log()[None, None],
        (1 - given.sum(-1)).log()[None, None],
        torch.zeros(1, 1, pages),
        torch.tensor(asks or [0] * queries),
        Layout(np.full(pages, tokens)),
        1.0,
    )


def test_shares_are_what_was_recorded():
    assert torch.allclose(recorded([[0.1, 0.2, 0.3]]).shares, torch.tensor([[[[0.1, 0.2, 0.3]]]]))


def test_true_masses_give_the_true_shares():
    one = recorded([[0.1, 0.2, 0.3, 0.1]])
    cold = torch.tensor([False, True, True, False])
    assert torch.allclose(measure.shares(one.masses, one, cold), one.shares[..., cold])


def test_captured_mass_is_of_the_best_tenth():
    true = torch.tensor([0.05, 0.3, 0.1, 0.02, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # 11 pages: two of them
    assert measure.captured(true, true) == 1.0
    scores = torch.tensor([0.9, 0.1, 0.8, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert measure.captured(scores, true) == pytest.approx(0.15 / 0.4)


def test_aggregates_put_heads_together():
    shares = torch.tensor([[0.1, 0.4], [0.3, 0.2]]).reshape(2, 1, 1, 2)  # two layers of one head
    assert torch.allclose(measure.mean(shares), torch.tensor([[0.2, 0.3]]))
    assert torch.allclose(measure.largest(shares), torch.tensor([[0.3, 0.4]]))
    assert torch.allclose(measure.top(shares), torch.tensor([[0.3, 0.4]]))  # a twentieth of two heads is one
    weights = torch.tensor([[1.0], [3.0]])
    assert torch.allclose(measure.weighted(weights)(shares), torch.tensor([[1.0, 1.0]]))


def test_weights_are_learned_from_what_heads_get_wrong():
    """Of two heads with a record one tells nothing; the third has none. The true mean is half of the first's shares."""
    random = torch.Generator().manual_seed(0)
    told = torch.rand(3, 1, 20, 30, generator=random)
    told[2] = 0
    true = told[:1].repeat(3, 1, 1, 1) / 2
    weights = measure.learned([(told, true)])
    assert weights.shape == (3, 1) and weights[0, 0] == pytest.approx(0.5, abs=0.01)
    assert weights[1, 0] == pytest.approx(0, abs=0.01)


def test_offsets_take_away_what_resident_pages_show():
    one = recorded([[0.1, 0.2, 0.3, 0.1]])
    cold = torch.tensor([False, True, True, False])
    assert torch.allclose(measure.with_offsets(one.masses + 5, one, cold), one.masses, atol=1e-5)


def test_layers_without_records_tell_nothing():
    told = measure.of_last_layers(torch.zeros(3, 1, 1, 2), 2)
    assert torch.isneginf(told[0]).all() and (told[1:] == 0).all()


def test_a_head_whose_query_moved_chooses_anew():
    one = recorded([[0.2, 0.1] + [0.0] * 8, [0.1, 0.3] + [0.0] * 8])
    one.queries[0, 0, 1] = torch.tensor([1.0, -1.0])  # at a right angle to the first
    found = measure.a_step_late(one.shares, one.shares, one)
    assert (
        found.late == pytest.approx(0.1 / 0.3) and found.corrected == pytest.approx(1) and found.redone == 1
    )
    one.queries[0, 0, 1] = torch.tensor([1.0, 0.9])
    assert measure.a_step_late(one.shares, one.shares, one).corrected == pytest.approx(0.1 / 0.3)


def test_pages_that_share_a_record_share_its_mass_by_their_tokens():
    keys = torch.randn(2, 1, 60, 8, generator=torch.Generator().manual_seed(1))
    counts = np.array([16, 16, 4, 8, 16])
    queries = torch.randn(2, 1, 3, 8, generator=torch.Generator().manual_seed(2))
    one = Recorded(
        keys.half(), queries, torch.zeros(2, 1, 3, 5), torch.zeros(2, 1, 3), torch.zeros(2, 1, 5),
        torch.zeros(3, dtype=torch.int64), Layout(counts), 0.5,
    )  # fmt: skip
    assert measure.group_of(5, 2).tolist() == [0, 1, 1, 2, 2]
    found = measure.estimates(measure.Records(Centroid(8), 2), one)
    spans = [(0, 16), (16, 36), (16, 36), (36, 60), (36, 60)]
    for page, (start, stop) in enumerate(spans):
        mean = keys.half().float()[:, :, start:stop].mean(2)
        expected = (queries * mean[:, :, None]).sum(-1) * 0.5 + math.log(counts[page])
        assert torch.allclose(found[..., page], expected, atol=0.1)


# Placement

GEOMETRY = Geometry(2, 1, 16, "bfloat16")
LOW = get("k3v2").page_bytes(GEOMETRY)


def room(pages: int, share: float, system: int = 0) -> Room:
    runs = [
        Run(Region.USER, 16),
        Run(Region.SYSTEM, 16 * system),
        Run(Region.USER, 16 * (pages - system - 1)),
    ]
    given = Input("demo", "x", [run for run in runs if run.tokens], [], [])
    return Room.of(given, Layout(np.full(pages, 16)), share, GEOMETRY, get("k3v2"))


def test_budgets_count_exact_pages_digests_and_low_bit_pages():
    one = room(20, 0.5)
    budget = 10 * GEOMETRY.page_bytes
    assert one.budget == budget and one.exact.nonzero().flatten().tolist() == [0, 19]
    assert one.pages(0) == min(18, (budget - 2 * GEOMETRY.page_bytes) // LOW)
    tight = room(20, 0.2)  # four pages' bytes, of which two are exact
    for digest in (0, 40):
        count = tight.pages(digest)
        used = [2 * GEOMETRY.page_bytes + n * LOW + (18 - n) * digest for n in (count, count + 1)]
        assert used[0] <= tight.budget < used[1]


def test_pinned_pages_stay_and_the_best_fill_the_rest():
    one = room(20, 0.2, system=2)
    count = one.pages(0)
    scores = torch.arange(20.0).expand(3, 20)
    found = one.attendable(scores, 0)
    best = [18 - i for i in range(count - 2)]
    assert found.shape == (3, 20) and found[0].nonzero().flatten().tolist() == sorted([0, 1, 2, 19, *best])


def test_pins_end_at_their_quota():
    assert int(room(20, 0.2, system=12).pinned.sum()) == min(12, int(0.5 * 4 * GEOMETRY.page_bytes) // LOW)


def test_recall_is_what_attendable_pages_and_new_tokens_get():
    one = recorded([[0.1, 0.2, 0.3], [0.4, 0.1, 0.1]])
    attendable = torch.tensor([[True, False, True], [True, True, False]])
    assert torch.allclose(placement.recall(attendable, measure.mean(one.shares)), torch.tensor([0.8, 0.9]))


def test_a_kv_head_reads_the_pages_that_it_wants_most_in_place():
    shares = torch.tensor([[[0.4, 0.3, 0.2, 0.1]], [[0.1, 0.2, 0.3, 0.4]]]).unsqueeze(
        0
    )  # two query heads, one KV head
    attendable = torch.tensor([[True, False, False, False]])
    wanted = measure.by_kv_head(
        torch.tensor([[[0.9, 0.0, 0.1, 0.0]], [[0.9, 0.0, 0.0, 0.2]]]).unsqueeze(0), 1
    )
    found = placement.recall_in_place(attendable, wanted, shares, 1)  # reads the last page
    assert found == pytest.approx((0.4 + 0.1 + 0.1 + 0.4) / 2)
    assert placement.recall_in_place(attendable, wanted, shares, 9) == pytest.approx(1.0)


def test_direct_reads_hear_a_group_or_a_layer():
    shares = torch.tensor([[0.1, 0.4], [0.3, 0.2], [0.2, 0.0], [0.0, 0.1]]).reshape(1, 4, 1, 2)
    assert torch.allclose(
        measure.largest_of_group(shares, 2)[0, :, 0], torch.tensor([[0.3, 0.4], [0.2, 0.1]])
    )
    assert torch.allclose(measure.of_layer(shares, 2)[0, :, 0], torch.tensor([[0.6, 0.7], [0.6, 0.7]]))


def test_a_step_late_each_question_begins_with_what_was_known():
    scores, known = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([9.0])
    assert placement.a_step_late(scores, torch.tensor([0, 0, 1, 1]), known).tolist() == [
        [9.0],
        [1.0],
        [9.0],
        [3.0],
    ]


def test_pages_brought_in_for_nothing_are_wasted():
    one = recorded([[0.9, 0.01, 0.02, 0.02], [0.8, 0.01, 0.02, 0.02]], asks=[0, 0])
    attendable = torch.tensor([[True, True, False, False]] * 2)
    before = torch.tensor([False, False, True, False])
    assert (
        placement.wasted(attendable, before, measure.mean(one.shares), one, 2.0) == 0.5
    )  # twice a quarter is .5: the first got it
    assert placement.wasted(attendable, attendable[0], measure.mean(one.shares), one, 2.0) == 0.0


def test_long_records_describe_fewer_layers():
    assert arms.layers_within(0.008, 132, 30, 3, 368_640) == 7
    assert arms.layers_within(0.008, 32, 30, 3, 368_640) == 30


def test_tables_are_drawn_from_records():
    from rich.console import Console

    console = Console(record=True, width=160)
    console.print(
        render(
            [
                Record(
                    "demo: a", None, "one", captured_mass=0.5, captured_direct=0.4, mass_ratio=1.1,
                    digest_bytes_ratio=0.01, by_aggregate={"mean": 0.5}, with_offsets=0.6,
                    direct_late={"late": 0.1, "corrected": 0.2, "redone": 0.3},
                ),
                Record("demo: a", 0.05, "one", 0.6, 0.8, 0.25, 0.5, digest_bytes_ratio=0.01, wasted_ratio=0.1),
                Record("demo: a", 1.0, "full", 1.0, 1.0, 0.75),
            ]
        )
    )  # fmt: skip
    text = console.export_text()
    assert "0.750" in text and "5% of the context" in text and "Answers over the exact context: 0.750" in text


def test_the_picture_has_a_point_an_estimator(tmp_path):
    records = [
        Record(name, None, arm, captured_mass=captured, digest_bytes_ratio=ratio)
        for name, arm, captured, ratio in (
            ("a", "box-8", 0.5, 0.02), ("b", "box-8", 0.7, 0.02), ("a", "transform-12", 0.9, 0.004),
        )
    ]  # fmt: skip
    assert picture.points(records) == {
        "box": [(2.0, pytest.approx(0.6), "box-8")], "transform": [(pytest.approx(0.4), 0.9, "transform-12")],
    }  # fmt: skip
    picture.draw(records, tmp_path / "new" / "recall.png")
    assert (tmp_path / "new" / "recall.png").read_bytes().startswith(b"\x89PNG")
