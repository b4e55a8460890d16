"""Algorithm 1 and pages, on numbers worked out by hand; what is observed when."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.daemon import policy
from tierkv.daemon.policy import Policy, Seen, TokenState
from tierkv.regions import Region
from tierkv.study.memdecay.arms import Arm, compared
from tierkv.study.memdecay.evict import Pages, budget_tokens, evict, pages_of, straddling_share
from tierkv.study.memdecay.protocol import FIT, PAPER, Protocol, run
from tierkv.study.memdecay.traces import Trace

S, U, T = Region.SYSTEM, Region.USER, Region.TOOL_OUT


def trace_of(regions: list[int], stages: list[int], window: int = 48) -> Trace:
    """Every query of the window spreads its attention evenly."""
    begins = [0, *stages[:-1]]
    queries = [q for a, b in zip(begins, stages, strict=True) for q in range(max(a, b - window), b)]
    mass = np.concatenate([np.full(q + 1, 1 / (q + 1)) for q in queries]).astype(np.float16)
    whole = np.arange(len(regions), dtype=np.int32)
    return Trace("t", "m", whole, np.array(regions, np.int8), np.array([0], np.int32), np.array(stages, np.int32),
                 np.array(queries, np.int32), mass)  # fmt: skip


def test_straddling_pages_ignore_regions_and_aligned_ones_end_with_them() -> None:
    trace = trace_of([S] * 20 + [U] * 3 + [T] * 17, [40])
    assert pages_of(trace, "straddling").starts.tolist() == [0, 16, 32]
    aligned = pages_of(trace, "aligned")
    assert aligned.starts.tolist() == [0, 16, 20, 23, 39]
    assert aligned.counts.tolist() == [16, 4, 3, 16, 1]
    assert pages_of(trace, "tokens").counts.tolist() == [1] * 40
    assert straddling_share(trace) == pytest.approx(1 / 3)  # tokens 16 to 31 are of three regions
    assert (
        straddling_share(trace_of([S] * 16 + [U] * 16, [32])) == 0
    )  # a border between pages is not inside one


def test_the_lowest_pages_leave_until_the_rest_fits() -> None:
    pages = Pages(np.array([0, 4, 8, 12]), np.array([4, 4, 4, 2], np.int32))
    scores = np.array([3, 1, 2, 4], np.float32)
    free = np.zeros(4, bool)
    assert np.flatnonzero(evict(pages, scores, free, 10)).tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 12, 13]
    # 9 tokens: page 4.. leaves (10 left), then page 8.. (6 left); no page is split
    assert evict(pages, scores, free, 9).sum() == 6
    assert evict(pages, scores, free, 14).all()


def test_pinned_pages_leave_last_and_the_last_of_them_first() -> None:
    pages = Pages(np.array([0, 4, 8]), np.array([4, 4, 4], np.int32))
    scores, pinned = np.array([0, 0, 9], np.float32), np.array([True, True, False])
    assert np.flatnonzero(evict(pages, scores, pinned, 8)).tolist() == list(range(8))
    assert np.flatnonzero(evict(pages, scores, pinned, 5)).tolist() == list(range(4))


@given(st.lists(st.integers(1, 16), min_size=1, max_size=40), st.integers(0, 10**6), st.floats(0, 1))
def test_a_budget_is_never_exceeded_and_no_better_page_leaves_before_a_worse(
    counts: list[int], seed: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.array(counts, np.int32)
    pages = Pages(np.cumsum(sizes) - sizes, sizes)
    scores, pinned = rng.random(len(counts)).astype(np.float32), rng.random(len(counts)) < 0.3
    budget = int(share * sizes.sum())
    kept = evict(pages, scores, pinned, budget)
    assert kept.sum() <= budget
    stays = np.array([kept[a : a + n].all() for a, n in zip(pages.starts, sizes, strict=True)])
    gone = np.array([not kept[a : a + n].any() for a, n in zip(pages.starts, sizes, strict=True)])
    assert (stays | gone).all()
    value = scores + 10 * pinned
    if stays.any() and gone.any():
        assert value[stays].min() > value[gone].max()


def test_budgets_are_rounded_down() -> None:
    assert [budget_tokens(trace_of([U] * 11, [11]), share) for share in (0.25, 0.5)] == [2, 5]


NO_THRESHOLDS = policy.get("full").thresholds


class Diary(Policy):
    """Notes when it observes what."""

    name = "diary"
    noted: list[tuple[float, int]] = []  # noqa: RUF012 - shared on purpose, cleared by the test

    def observe(self, tokens: TokenState, seen: Seen, step: float) -> None:
        self.noted.append((step, seen.attended))

    def scores(self, tokens: TokenState, step: float, span: slice) -> np.ndarray:
        return np.zeros(span.stop - span.start, np.float32)


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        (PAPER, [(s, 92 + s) for s in range(1, 9)] + [(s, 184 + s) for s in range(9, 17)]),
        (FIT, [(s, 92 + s) for s in range(1, 9)] + [(s, 144 + s) for s in range(9, 57)]),
        (Protocol(burst=2, final_burst=3, every=2), [(2, 100), (4, 199)]),
        (
            Protocol(burst=1, final_burst=1, prompt_window=2),
            [(0, 98), (0, 99), (1, 100), (1, 198), (1, 199), (2, 200)],
        ),
    ],
)  # fmt: skip
def test_what_is_observed_and_at_which_decode_step(protocol: Protocol, expected: list[object]) -> None:
    Diary.noted.clear()
    scored = run(trace_of([U] * 200, [100, 200]), Diary(thresholds=NO_THRESHOLDS), protocol)
    assert Diary.noted == expected
    assert len(scored.state) == 200 and scored.step == protocol.burst + protocol.final_burst


def test_tokens_are_inserted_at_the_step_at_which_they_came() -> None:
    state, step = run(trace_of([U] * 60, [30, 60]), policy.get("memdecay"), Protocol(burst=4, final_burst=4))
    # Even attention never reaches twice the uniform level: clocks stay where tokens came.
    assert step == 8
    ages = [state.explain(i, 1, step)["age"] for i in (0, 25, 26, 29, 30, 59)]
    assert ages == [8, 8, 7, 4, 4, 0]


def test_an_arm_with_system_pinned_keeps_the_system() -> None:
    trace = trace_of([S] * 32 + [U] * 160, [192])
    for arm in compared():
        kept = arm.kept(trace, 0.25)
        assert kept.sum() <= 48
        if arm.pinned:
            assert kept[:32].all()
    streaming = Arm("streaming", policy.get("streaming")).kept(trace, 0.25)
    assert np.flatnonzero(streaming).tolist() == [0, 1, 2, 3, *range(192 - 44, 192)]


def test_other_settings_are_another_arm() -> None:
    arms = compared()
    assert len({arm.settings for arm in arms}) == len(arms)
    assert arms[0].settings != arms[0]._replace(protocol=FIT).settings
