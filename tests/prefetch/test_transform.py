"""The transform of keys against what theory says of Gaussians, and its bytes against a scalar quantizer."""

from __future__ import annotations

import numpy as np

from tierkv.prefetch.transform import Sample, Transform, coefficients, cosines, fit, shared_bits
from tierkv.quant.klt_levels import DISTORTIONS

TOKENS, DIM, SCALE = 16, 8, 0.3
COUNTS = np.full(400, TOKENS)


def sample(seed: int = 0) -> Sample:
    """Keys of a page have a part in common; some dimensions are large, others are asked for."""
    random = np.random.default_rng(seed)
    size = np.geomspace(4, 0.25, DIM)
    keys = (
        random.standard_normal((1, 2, 400, 1, DIM)) + random.standard_normal((1, 2, 400, TOKENS, DIM))
    ) * size + 3
    queries = random.standard_normal((1, 2, 300, DIM)) * np.geomspace(0.5, 2, DIM)
    return Sample(keys.astype(np.float32), COUNTS, queries.astype(np.float32))


STATE = fit([sample()])


def true(one: Sample) -> np.ndarray:
    logits = np.einsum("lhnd,lhptd->lhnpt", one.queries, one.keys, dtype=np.float64) * SCALE
    return np.logaddexp.reduce(logits, -1)


def test_cosines_are_orthonormal_and_the_first_is_the_mean():
    assert np.allclose(cosines(16) @ cosines(16).T, np.eye(16))
    assert np.allclose(cosines(16)[0], 1 / 4)


def test_queries_take_coefficients_as_keys():
    one = sample(1)
    turned = cosines(TOKENS).T @ coefficients(STATE, one.keys, COUNTS)
    found = np.einsum("lhnd,lhptd->lhnpt", one.queries @ STATE.axes, turned)
    common = np.einsum("lhnd,lhd->lhn", one.queries, STATE.mean)
    exact = np.einsum("lhnd,lhptd->lhnpt", one.queries, one.keys)
    assert np.allclose(found + common[..., None, None], exact, atol=1e-3)


def test_coefficients_are_uncorrelated_and_their_variance_is_known():
    found = coefficients(STATE, sample().keys, COUNTS)[0, 0]
    tokens = found.reshape(-1, DIM)
    correlation = np.corrcoef(tokens.T)
    assert np.abs(correlation - np.eye(DIM)).max() < 0.05
    assert np.allclose((found**2).mean(0), STATE.variance[0, 0], rtol=1e-4)


def test_bits_go_where_they_reduce_the_error_most():
    variance = np.array([16.0, 1.0, 1.0, 0.0]).reshape(1, 1, 1, 4)
    assert shared_bits(variance, 4).ravel().tolist() == [
        3,
        1,
        0,
        0,
    ]  # 10.2, 3.9, 1.3 gained; the fourth: .37 < .64
    assert shared_bits(variance, 99).ravel().tolist() == [5, 5, 5, 5]


def test_the_error_of_logits_is_what_gaussians_lose():
    """Of pages whose gain is 1: distortions of Lloyd's and Max's codes, weighted by what is asked."""
    one, codec = sample(2), Transform(STATE, 40)
    records = codec.summarize(one.keys, COUNTS)
    bits = shared_bits(STATE.variance, 8 * 39)
    turned = np.swapaxes(cosines(TOKENS), 0, 1) @ coefficients(STATE, one.keys, COUNTS)[0, 0]
    error = ((codec._decode((0, 0), records[0, 0]) - turned) ** 2).mean((0, 1))
    lost = (np.array(DISTORTIONS)[bits] * STATE.variance)[0, 0].mean(0)
    assert np.allclose(error.sum(), lost.sum(), rtol=0.1)


def test_more_bytes_tell_more_and_the_total_is_right():
    one = sample(3)
    exact, errors = true(one), []
    for size in (8, 20, 40, 80):
        codec = Transform(STATE, size)
        found = codec.log_mass(one.queries, codec.summarize(one.keys, COUNTS), COUNTS, SCALE)
        errors.append(float(((found - exact) ** 2).mean()))
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0] / 20
    assert abs(float((found - exact).mean())) < 0.02


def test_a_page_far_wider_than_others_keeps_its_shape():
    """Its gain carries it: codes alone end at three deviations."""
    one = sample(4)
    mean = one.keys.mean(3, keepdims=True)
    wide = one._replace(keys=mean + 6 * (one.keys - mean))
    codec = Transform(STATE, 80)
    keys = codec._decode((0, 0), codec.summarize(wide.keys, COUNTS)[0, 0])
    exact = np.swapaxes(cosines(TOKENS), 0, 1) @ coefficients(STATE, wide.keys, COUNTS)[0, 0]
    off, spread = keys - exact, exact - exact.mean(1, keepdims=True)
    assert (off**2).sum() < 0.05 * (spread**2).sum()
