"""What every estimator must do, and that a bound is one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.prefetch.estimators import pack, unpack
from tierkv.prefetch.summaries import Box, Centroid, Deviation
from tierkv.prefetch.transform import Sample, Transform, fit

TOKENS, DIM, SCALE = 16, 8, 0.5


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


STATE = fit(
    [
        Sample(
            random(1, 2, 50, 1, DIM, seed=7) + random(1, 2, 50, TOKENS, DIM, seed=8),
            np.full(50, TOKENS),
            random(1, 2, 99, DIM, seed=9),
        )
    ]
)
SUMMARIES = (
    Centroid(8), Centroid(4), Box("max", 8), Box("max", 4), Box("mean", 8), Box("mean", 4), Deviation(8, 8),
    Deviation(8, 4), Deviation(4, 4), Deviation(4, 4, parts=2),
)  # fmt: skip
ESTIMATORS = (*SUMMARIES, Transform(STATE, 20), Transform(STATE, 60))
"""All are asked about one layer of two heads."""
each = pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: estimator.name)


def true(query, keys, counts, scale=SCALE):
    """Log-masses `[..., queries, pages]` in float64."""
    logits = np.einsum("...nd,...ptd->...npt", query.astype(np.float64), keys.astype(np.float64)) * scale
    logits = np.where(np.arange(keys.shape[-2]) < counts[:, None], logits, -np.inf)
    return np.logaddexp.reduce(logits, -1)


@each
def test_a_record_is_as_long_as_it_says(estimator):
    keys, counts = random(1, 2, 5, TOKENS, DIM), np.array([16, 1, 7, 8, 9])
    records = estimator.summarize(keys, counts)
    assert records.shape == (1, 2, 5, estimator.nbytes(DIM)) and records.dtype == np.uint8
    found = estimator.log_mass(random(1, 2, 4, DIM), records, counts, SCALE)
    assert found.shape == (1, 2, 4, 5) and found.dtype == np.float32 and np.isfinite(found).all()


@each
def test_pages_do_not_mix(estimator):
    keys, counts, query = random(1, 2, 3, TOKENS, DIM), np.array([16, 3, 11]), random(1, 2, 4, DIM, seed=1)
    whole = estimator.log_mass(query, estimator.summarize(keys, counts), counts, SCALE)
    for page in range(3):
        one, count = keys[:, :, page : page + 1], counts[page : page + 1]
        alone = estimator.log_mass(query, estimator.summarize(one, count), count, SCALE)
        assert np.allclose(alone[..., 0], whole[..., page], atol=1e-5)


@each
def test_what_lies_behind_the_last_token_counts_for_nothing(estimator):
    keys, counts = random(1, 2, 1, TOKENS, DIM), np.array([5])
    before = estimator.summarize(keys, counts)
    keys[..., 5:, :] = np.nan
    assert (estimator.summarize(keys, counts) == before).all()


@pytest.mark.parametrize("estimator", SUMMARIES, ids=lambda estimator: estimator.name)
def test_identical_keys_are_estimated_closely(estimator):
    key = np.array([7.0, -3.0, 0.0, 4.0, 1.0, -7.0, 2.0, 5.0], np.float32)  # multiples of the largest over 7
    keys, query = np.broadcast_to(key, (1, TOKENS, DIM)).copy(), random(3, DIM)
    counts = np.array([TOKENS])
    found = estimator.log_mass(query, estimator.summarize(keys, counts), counts, SCALE)
    assert np.allclose(found[:, 0], math.log(TOKENS) + SCALE * (query @ key), atol=0.1)


@each
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_keys_that_are_not_finite_tell_nothing(estimator, bad):
    keys, counts = random(1, 2, 2, TOKENS, DIM), np.array([16, 16])
    keys[:, :, 1, 3, 2] = bad
    found = estimator.log_mass(random(1, 2, 3, DIM), estimator.summarize(keys, counts), counts, SCALE)
    assert np.isfinite(found[..., 0]).all() and np.isneginf(found[..., 1]).all()


@each
def test_an_estimate_tells_pages_apart(estimator):
    """Pages whose keys point somewhere: the one along the query has by far the largest mass."""
    along = 3 * np.eye(DIM, dtype=np.float32)
    keys = along[:, None, :] + 0.1 * random(1, 2, DIM, TOKENS, DIM)
    counts, query = np.full(DIM, TOKENS), np.broadcast_to(along, (1, 2, DIM, DIM))
    found = estimator.log_mass(query, estimator.summarize(keys, counts), counts, SCALE)
    assert (found.argmax(-1) == np.arange(DIM)).all()


@pytest.mark.parametrize("bits", [8, 4])
@given(st.data())
def test_quests_bound_is_never_violated(bits, data):
    number = st.floats(-1e4, 1e4, width=32)
    count = data.draw(st.integers(1, 6))
    keys = np.array(
        data.draw(st.lists(st.lists(number, min_size=4, max_size=4), min_size=6, max_size=6)), np.float32
    )[None]
    query = np.array([data.draw(st.lists(number, min_size=4, max_size=4))], np.float32)
    scale, counts = data.draw(st.floats(-2, 2)), np.array([count])
    estimator = Box("max", bits)
    middle, half = (part.astype(np.float64) for part in estimator.box(estimator.summarize(keys, counts), 4))
    inside = keys[0, :count].astype(np.float64)
    assert (middle - half <= inside).all() and (inside <= middle + half).all()
    corner = (query @ middle.T) * scale + (np.abs(query) @ half.T) * abs(scale)
    size = np.abs(query) @ (np.abs(middle) + half).T * abs(scale)  # what rounding of float64 is relative to
    assert (
        true(query, keys, counts, scale)[0, 0] <= corner[0, 0] + math.log(count) + 1e-12 * size[0, 0] + 1e-12
    )


def test_a_normal_page_has_the_mass_of_its_mean_and_deviation():
    keys = 0.4 * random(400, TOKENS, DIM)
    counts, query = np.full(400, TOKENS), random(6, DIM, seed=2)
    found = Deviation(8, 8).log_mass(query, Deviation(8, 8).summarize(keys, counts), counts, SCALE)
    assert np.abs((found - true(query, keys, counts)).mean(-1)).max() < 0.02


@given(st.sampled_from([4, 5, 6, 8]), st.lists(st.integers(0, 15), min_size=1, max_size=20))
def test_codes_come_back(bits, codes):
    packed = pack(np.array(codes), bits)
    assert len(packed) == -(-len(codes) * bits // 8) and unpack(packed, bits, len(codes)).tolist() == codes
