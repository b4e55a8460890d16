"""Digests of means and deviations: what is written, what is read back, and the estimate's formula."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierkv.geometry import DTypeName, Geometry
from tierkv.prefetch.deviation import DEVIATION, DeviationDigests, log_mass

DTYPES: tuple[DTypeName, ...] = ("float32", "float16", "bfloat16")


def page_bytes(dtype: DTypeName, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """A page's exact bytes; bfloat16 by cutting off the low bits."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
    with np.errstate(over="ignore"):
        return values.astype(dtype).view(np.uint8).reshape(-1)


def random_page(geometry: Geometry, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(geometry.shape, np.float32)


def both_writes(digests: DeviationDigests, exact: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """The digest, after checking that the kernel and the reference agree on every byte."""
    ours, theirs = (np.full(digests.shape.nbytes, byte, np.uint8) for byte in (0xAA, 0x55))
    digests.write(exact, count, ours)
    digests.reference_write(exact, count, theirs)
    np.testing.assert_array_equal(ours, theirs)
    return ours


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    layers=st.integers(0, 4),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([5, 64, 80]),
    count=st.integers(0, 16),
    exponent=st.integers(-50, 38),
)
def test_the_kernel_writes_the_references_bytes(
    seed: int, dtype: DTypeName, layers: int, heads: int, head_dim: int, count: int, exponent: int
) -> None:
    geometry = Geometry(3, heads, head_dim, dtype)
    with np.errstate(over="ignore", under="ignore"):
        values = (random_page(geometry, seed).astype(np.float64) * 10.0**exponent).astype(np.float32)
    both_writes(DEVIATION.of(geometry, layers), page_bytes(dtype, values), count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_holds_mean_and_deviation_of_the_first_tokens_keys(dtype: DTypeName) -> None:
    geometry = Geometry(3, 2, 64, dtype)
    values = random_page(geometry, 1)
    digests = DEVIATION.of(geometry, 2)
    digest = digests.read(both_writes(digests, page_bytes(dtype, values), 11))
    keys = values[1:, 0, :, :11].astype(np.float64)
    # Half a step of the code, and what rounding the keys to the page's dtype moves them (2**-8 for bfloat16, cut off).
    for got, expected, codes in ((digest.mean, keys.mean(2), 127), (digest.deviation, keys.std(2), 255)):
        step = np.abs(expected).max(-1, keepdims=True) / codes
        assert (np.abs(got - expected) <= 0.51 * step + 0.02).all()


def test_records_follow_each_other_and_zeros_fill_the_rest() -> None:
    geometry = Geometry(4, 3, 20, "float32")
    digests = DEVIATION.of(geometry, 2)
    assert (digests.shape.record_bytes, digests.shape.nbytes) == (48, 320)  # 2 * 3 * 48 = 288
    values = np.zeros(geometry.shape, np.float32)
    values[3, 0, 1, :, 4] = [2.0, 4.0] * 8  # mean 3, deviation 1
    values[3, 0, 1, :, 5] = -1.5
    out = both_writes(digests, page_bytes("float32", values), 16)
    record = out[(1 * 3 + 1) * 48 :][:48]
    assert record[:8].view(np.float32) == pytest.approx([3 / 127, 1 / 255])
    assert record[8:28].view(np.int8).tolist() == [0] * 4 + [127, -64] + [0] * 14  # -1.5 / 3 * 127 = -63.5
    assert record[28:].tolist() == [0] * 4 + [255] + [0] * 15
    assert not out[:192].any() and not out[240:].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_are_not_finite_spoil_their_own_record_only(dtype: DTypeName, bad: float) -> None:
    geometry = Geometry(2, 2, 64, dtype)
    values = random_page(geometry, 2)
    values[1, 0, 0, 3, 7] = bad
    values[0, 1, 1, 0, 0] = bad  # a value, not a key
    values[1, 0, 1, 9, 0] = bad  # behind the tokens that are written
    digests = DEVIATION.of(geometry, 0)
    digest = digests.read(both_writes(digests, page_bytes(dtype, values), 9))
    assert np.isnan(digest.mean[1, 0]).all() and np.isnan(digest.deviation[1, 0]).all()
    assert np.isfinite(digest.mean[[0, 0, 1], [0, 1, 1]]).all()


def test_a_page_without_tokens_tells_nothing() -> None:
    digests = DEVIATION.of(Geometry(1, 1, 8, "float32"), 1)
    assert np.isnan(digests.read(both_writes(digests, np.zeros(1024, np.uint8), 0)).mean).all()


def test_the_largest_float32_keys_are_summarized() -> None:
    geometry = Geometry(1, 1, 8, "float32")
    values = np.full(geometry.shape, np.finfo(np.float32).max)
    values[0, 0, 0, ::2] *= -1
    digests = DEVIATION.of(geometry, 1)
    digest = digests.read(both_writes(digests, page_bytes("float32", values), 16))
    np.testing.assert_allclose(digest.deviation, np.finfo(np.float32).max, rtol=1e-5)
    assert not digest.mean.any()


@pytest.mark.parametrize(("asked", "layers"), [(-1, 5), (0, 5), (2, 2), (5, 5), (9, 5)])
def test_no_layers_or_too_many_mean_all(asked: int, layers: int) -> None:
    assert DEVIATION.shape(Geometry(5, 1, 64, "float32"), asked).layers == layers


@pytest.mark.parametrize(
    ("page", "digest", "count"), [(8191, 192, 16), (8192, 191, 16), (8192, 192, 17), (8192, 192, -1)]
)
def test_what_does_not_fit_is_refused(page: int, digest: int, count: int) -> None:
    digests = DEVIATION.of(Geometry(1, 1, 64, "float32"), 1)
    assert digests.shape.nbytes == 192
    with pytest.raises(ValueError, match="page"):
        digests.write(np.zeros(page, np.uint8), count, np.zeros(digest, np.uint8))


def test_the_estimate_of_normal_logits_is_the_log_of_their_mean_exponential() -> None:
    # E exp(x) = exp(mean + sigma**2 / 2) for a normal x; 1.5 < sqrt(2 ln 1000) = 3.7
    assert log_mass(0.7, 1.5, 1000) == pytest.approx(math.log(1000 * math.exp(0.7 + 1.125)))


def test_the_estimate_of_wide_logits_is_the_largest_of_them() -> None:
    """sqrt(2 ln n) sigma above the mean is where the largest of n normal numbers lies."""
    assert log_mass(0.0, 100.0, 16) == pytest.approx(100.0 * math.sqrt(2 * math.log(16)))


@given(st.integers(1, 4096))
def test_the_estimate_and_its_slope_are_continuous(count: int) -> None:
    a, step = math.sqrt(2 * math.log(count)), 1e-4
    below, at, above = (log_mass(0.0, max(0.0, a + by), count) for by in (-step, 0.0, step))
    assert above - at == pytest.approx(at - below, abs=1e-7) and above - at == pytest.approx(
        a * step, abs=1e-7
    )


def test_one_token_gives_its_own_logit_and_none_give_nothing() -> None:
    assert log_mass(3.25, 0.0, 1) == 3.25
    assert log_mass(3.25, 0.0, 0) == -math.inf


def test_capped_logits_have_the_capped_mean_the_slope_there_and_no_more_than_the_cap() -> None:
    """tanh has the slope 1 at 0 and 1 - tanh(x)**2 at x."""
    assert log_mass(0.0, 1.5, 1000, 40.0) == log_mass(0.0, 1.5, 1000)
    bent = math.tanh(0.5)
    assert log_mass(10.0, 1.0, 16, 20.0) == pytest.approx(
        math.log(16) + 20 * bent + 0.5 * (1 - bent * bent) ** 2
    )
    assert log_mass(0.0, 100.0, 16, 20.0) == pytest.approx(math.log(16) + 20)
    assert log_mass(1e6, 1.0, 16, 20.0) == pytest.approx(math.log(16) + 20)
    assert log_mass(-1e6, 1.0, 16, 20.0) == pytest.approx(math.log(16) - 20)


def test_the_daemon_can_write_digests_without_torch() -> None:
    code = "import sys, tierkv.prefetch.digest_forms; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd="/", check=True)
