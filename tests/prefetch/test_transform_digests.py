"""Transform digests: bytes of the kernel against the reference, what a record is, and which models have them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierkv.errors import ConfigError
from tierkv.geometry import DTypeName, Geometry
from tierkv.prefetch import digest_forms
from tierkv.prefetch.deviation import DEVIATION
from tierkv.prefetch.transform import GAIN, NOTHING, KeySums, solve
from tierkv.prefetch.transform_digests import TransformDigests, TransformForm, flat_state
from tierkv.quant.moments import About, plain_keys

SHAPE = (3, 2, 40, 16, 24)
GEOMETRY = Geometry(3, 2, 24, "float32")
ABOUT = About("m@0123456789abcdef", 3, 2, 24, "float32", ("a text",), 100)
ROOM = 1 << 30


def keys_of(seed: int) -> NDArray[np.float32]:
    """`[layers, heads, pages, tokens, dim]`; tokens of a page have a part in common."""
    random = np.random.default_rng(seed)
    each = random.standard_normal((*SHAPE[:3], 1, SHAPE[4])) + random.standard_normal(SHAPE)
    return (each * np.geomspace(4, 0.1, SHAPE[4]) + 2).astype(np.float32)


def state() -> NDArray[np.float32]:
    sums = []
    for keys in keys_of(0):
        sums.append(KeySums(*np.array(SHAPE)[[1, 3, 4]].tolist()))
        sums[-1].add(keys, np.full(SHAPE[2], 16))
    half = np.random.default_rng(1).standard_normal((*SHAPE[:2], 24, 60))
    return flat_state(solve(sums, half @ half.swapaxes(-1, -2)))


STATE = state()


def page(keys: NDArray[np.float32], dtype: DTypeName = "float32") -> NDArray[np.uint8]:
    """Exact bytes of a page with these keys `[layers, heads, tokens, dim]`; bfloat16 by cutting off the low bits."""
    values = np.full(GEOMETRY.shape, 7, np.float32)
    values[:, 0] = keys
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
    return values.astype(dtype).view(np.uint8).reshape(-1)


def both_writes(digests: TransformDigests, exact: NDArray[np.uint8], count: int) -> list[NDArray[np.uint8]]:
    found = []
    for fill, write in ((0xAA, digests.write), (0x55, digests.reference_write)):
        found.append(np.full(digests.shape.nbytes, fill, np.uint8))
        write(exact, count, found[-1])
    return found


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    layers=st.integers(0, 3),
    size=st.sampled_from([4, 12, 33, 200]),
    count=st.integers(2, 16),
)
def test_the_kernel_writes_what_the_reference_does(
    seed: int, dtype: DTypeName, layers: int, size: int, count: int
) -> None:
    """But for codes at a boundary, and gains: one in some thousand, and by one."""
    digests = TransformForm(size).of(Geometry(3, 2, 24, dtype), layers, STATE)
    ours, theirs = both_writes(digests, page(keys_of(seed)[:, :, 0], dtype), count)
    assert (ours != theirs).sum() <= 1 + len(ours) // 100
    records = digests.shape.layers * 2 * size
    assert not ours[records:].any() and not theirs[records:].any()


@pytest.mark.parametrize("count", [0, 1, 5, 16])
def test_both_records_promise_the_same(count: int) -> None:
    digests = TransformForm(40).of(GEOMETRY, 2, STATE)
    query = np.random.default_rng(2).standard_normal((2, 5, 24))
    ours, theirs = both_writes(digests, page(keys_of(3)[:, :, 1]), count)
    for layer in (1, 2):
        mine, other = (
            digests.log_mass(digest, layer, query, count or 1, 0.2, 0.0) for digest in (ours, theirs)
        )
        np.testing.assert_allclose(mine, other, rtol=1e-3)
        assert np.isneginf(mine).all() == (count == 0)


def test_a_page_as_wide_as_usual_has_the_gain_one() -> None:
    digests = TransformForm(12).of(GEOMETRY, 0, STATE)
    gains = []
    for number in range(SHAPE[2]):
        ours, _ = both_writes(digests, page(keys_of(0)[:, :, number]), 16)
        gains.append(GAIN[ours[: 6 * 12 : 12]])
    assert np.mean(np.square(gains)) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_keys_that_are_not_finite_spoil_their_own_record_only(bad: float) -> None:
    digests = TransformForm(20).of(GEOMETRY, 0, STATE)
    keys = keys_of(4)[:, :, 0]
    keys[1, 0, 3, 7] = bad
    keys[1, 1, 9, 0] = bad  # behind the tokens that are written
    for digest in both_writes(digests, page(keys), 9):
        told = digest[: 6 * 20 : 20] != NOTHING
        assert told.tolist() == [True, True, False, True, True, True]


@pytest.mark.parametrize("size", [4, 12, 200])
def test_keys_far_above_the_models_take_the_largest_codes_and_no_others_bits(size: int) -> None:
    """Divided by the model's deviation they are infinite."""
    geometry = Geometry(1, 1, 24, "float32")
    plain = plain_keys(geometry)
    keys = plain._replace(variance=np.float32(1e-6) * plain.variance)
    digests = TransformForm(size).of(geometry, 0, flat_state(keys))
    values = np.zeros(geometry.shape, np.float32)
    values[0, 0] = 1e36 * np.random.default_rng(5).standard_normal(values[0, 0].shape)
    ours, theirs = both_writes(digests, values.view(np.uint8).reshape(-1), 16)
    assert theirs[0] not in (0, NOTHING)
    np.testing.assert_array_equal(ours, theirs)


def test_a_state_of_another_size_and_other_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="values"):
        TransformForm(12).of(GEOMETRY, 0, STATE[:-1])
    pages_of_8 = Geometry(3, 2, 24, "float32", 8)
    floats = TransformForm(12).state_floats(pages_of_8)
    with pytest.raises(ValueError, match="16 tokens"):
        TransformForm(12).of(pages_of_8, 0, np.ones(floats, np.float32))


def test_a_model_has_transform_digests_where_it_was_calibrated() -> None:
    def form(setting: str, geometry: Geometry = GEOMETRY, about: About = ABOUT, room: int = ROOM) -> str:
        known = (msgspec.structs.replace(ABOUT, model_id="other"), about)
        return digest_forms.form_of(setting, 12, "m@0123456789abcdef", geometry, known, room).name  # type: ignore[arg-type]

    assert form("auto") == form("transform") == "transform-12"
    assert form("deviation") == "deviation"
    pages_of_8 = Geometry(3, 2, 24, "float32", 8)
    uncalibrated = msgspec.structs.replace(ABOUT, model_id="m@fedcba9876543210")
    assert form("auto", pages_of_8) == form("auto", about=uncalibrated) == "deviation"
    assert form("auto", room=4 * len(STATE) - 1) == "deviation"
    assert form("auto", room=4 * len(STATE)) == form("transform", room=0) == "transform-12"
    with pytest.raises(ConfigError, match="run tierkv calibrate"):
        form("transform", pages_of_8)


def test_heads_that_nobody_asked_take_all_directions_alike() -> None:
    sums = KeySums(1, 16, 24)
    sums.add(keys_of(0)[0, :1], np.full(SHAPE[2], 16))
    none, even = solve([sums], np.zeros((1, 1, 24, 24))), solve([sums], np.eye(24)[None, None])
    np.testing.assert_array_equal(none.variance, even.variance)


@pytest.mark.parametrize(
    "name", ["", "transform", "transform-", "transform-3", "transform-257", "transform-+8", "box"]
)
def test_other_names_are_no_forms(name: str) -> None:
    with pytest.raises(ValueError, match="no digest form"):
        digest_forms.get(name)


def test_names_of_forms_are_those_of_forms() -> None:
    assert digest_forms.get("deviation") is DEVIATION
    assert digest_forms.get("transform-32").name == "transform-32"
