"""Labels go wrong as they are told to, the same way each time, and a policy sees only the wrong ones."""

from __future__ import annotations

import io

import numpy as np
from rich.console import Console

from tests.study.memdecay.test_ablate import pair_of
from tierkv.regions import Region
from tierkv.study.memdecay import labels
from tierkv.study.memdecay.survival import survival

S, L, U, I, O, R, P = Region  # noqa: E741
MANY = pair_of([(Region(i % 7), 4) for i in range(400)], [(U, 8, 9)])[0]


def blocks_of(regions: np.ndarray) -> np.ndarray:
    each = regions.reshape(-1, 4)
    assert (each == each[:, :1]).all()  # a block stays in one piece
    return each[:, 0]


def test_the_told_share_of_blocks_goes_wrong_and_stays_so_as_it_grows() -> None:
    true = np.arange(400) % 7
    wrong = {share: blocks_of(labels.noisy(MANY, share)) != true for share in (0.0, 0.1, 0.4, 1.0)}
    assert wrong[0.0].sum() == 0 and wrong[1.0].all()
    assert 20 <= wrong[0.1].sum() <= 60  # 40 expected, standard deviation 6
    assert 120 <= wrong[0.4].sum() <= 200  # 160, 9.8
    assert not (wrong[0.1] & ~wrong[0.4]).any()
    assert np.array_equal(
        labels.noisy(MANY, 0.4)[np.repeat(wrong[0.1], 4)], labels.noisy(MANY, 0.1)[np.repeat(wrong[0.1], 4)]
    )


def test_a_wrong_label_is_each_other_region_about_as_often() -> None:
    moved = (blocks_of(labels.noisy(MANY, 1.0)) - np.arange(400)) % 7
    assert moved.min() == 1
    counts = np.bincount(moved)[1:]
    assert counts.min() >= 36 and counts.max() <= 98  # 67 of 400 expected, standard deviation 7.5


def test_noise_is_the_same_again_and_another_in_another_episode_or_with_another_seed() -> None:
    twin = MANY._replace(variant=1)
    assert np.array_equal(labels.noisy(MANY, 0.5), labels.noisy(MANY, 0.5))
    assert not np.array_equal(labels.noisy(MANY, 0.5), labels.noisy(twin, 0.5))
    assert not np.array_equal(labels.noisy(MANY, 0.5), labels.noisy(MANY, 0.5, seed=1))


def test_roles_tell_system_user_and_tool_from_the_assistant() -> None:
    episode, _ = pair_of([(region, 1) for region in Region], [(U, 2, 3)])
    assert labels.from_roles(episode).tolist() == [S, P, U, P, O, O, P]
    assert labels.all_user(episode).tolist() == [U] * 7


def test_without_labels_nothing_is_pinned_and_the_oldest_leave() -> None:
    # A burst of 8 and even attention, room for one page of three. By true labels the system is pinned; by none it is as
    # old as the page before it, and both leave before the scratchpad, which is younger.
    pair = pair_of([(U, 16), (S, 16), (P, 16)], [(S, 20, 22), (P, 44, 46)])
    (arm,) = (arm for arm in labels.compared() if arm.name == "memdecay")
    rows = {row.label: row.at("long", 0.5).by_region for row in survival([pair], labels.cases(arm)).rows}
    assert rows["true labels"] == {"system": 1, "scratchpad": 0}
    assert rows["all user"] == {"system": 0, "scratchpad": 1}


def test_the_table_has_a_row_for_each_labelling() -> None:
    report = labels.run([pair_of([(S, 16), (U, 16), (P, 16)], [(U, 20, 22)])])
    assert [row.label for row in report.rows] == 2 * [
        "true labels", "wrong 10%", "wrong 20%", "wrong 40%", "from roles", "all user",
    ]  # fmt: skip
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(labels.render(report))
    text = console.export_text()
    assert "…" not in text and text.count("wrong 20%") == 2 and "mean over 5 seeds" in text
