"""klt2: the transform is the one that the theory asks for, bits go where they count, and errors are as predicted."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from tests.quant.pages import exact_page, example_moments, gaussian_page, page_values
from tierkv.geometry import Geometry
from tierkv.quant import get, klt_fit, klt_kernels, klt_reference
from tierkv.quant.floats import KIND, page_words
from tierkv.quant.klt_layout import GROUP, block_bytes, record_floats
from tierkv.quant.klt_levels import DISTORTIONS, LEVELS
from tierkv.quant.moments import Moments, standard

CODEC = get("klt2")
GEOMETRY = Geometry(2, 3, 64, "float32")

Floats = NDArray[np.float32]


def through(codec_name: str, geometry: Geometry, state: Floats, values: NDArray[np.float64]) -> Floats:
    """What a page decodes to."""
    codec = get(codec_name)
    packed, out = np.empty(codec.page_bytes(geometry), np.uint8), np.empty(geometry.page_bytes, np.uint8)
    codec.encode(geometry, exact_page(geometry, values), geometry.page_tokens, state, packed)
    codec.decode(geometry, packed, geometry.page_tokens, state, out)
    return page_values(geometry, out)


def gaussian(second: NDArray[np.float64], tokens: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """`[tokens, dim]` of that second moment."""
    return rng.standard_normal((tokens, len(second))) @ np.linalg.cholesky(second).T


@pytest.mark.parametrize("bits", range(6))
def test_the_distortion_of_a_code_is_its_error_on_a_unit_gaussian(bits: int) -> None:
    x = np.linspace(0, 9, 900_001)
    density = 2 * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    nearest = np.abs(x[:, None] - LEVELS[bits].astype(np.float64)).min(1)
    assert np.trapezoid(nearest**2 * density, x) == pytest.approx(DISTORTIONS[bits], rel=2e-3)


def test_more_bits_cost_less_and_each_bit_brings_less_than_the_one_before() -> None:
    gains = -np.diff(DISTORTIONS)
    assert (gains > 0).all() and (np.diff(gains) < 0).all()  # so that giving them one by one is optimal


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_the_way_into_the_space_of_codes_leads_back(dim: int) -> None:
    moments = example_moments(Geometry(1, 2, dim, "float32"))
    _, analysis, synthesis = klt_fit.transform(moments.key_covariance, moments.query_second)
    np.testing.assert_allclose(
        synthesis @ analysis, np.broadcast_to(np.eye(dim), (1, 2, dim, dim)), atol=1e-8
    )


def test_channels_of_a_group_are_of_unit_variance_and_errors_cost_what_the_metric_says() -> None:
    moments = example_moments(GEOMETRY)
    second, metric = (part.astype(np.float64) for part in (moments.key_covariance, moments.query_second))
    groups, analysis, synthesis = klt_fit.transform(moments.key_covariance, moments.query_second)
    coded = analysis @ second @ analysis.swapaxes(-1, -2)
    variances = np.diagonal(coded, axis1=-2, axis2=-1).reshape(*groups.shape, GROUP)
    np.testing.assert_allclose(
        variances, 1, rtol=1e-6
    )  # all channels, because the rotation of a group mixes them
    cost = synthesis.swapaxes(-1, -2) @ metric @ synthesis
    expected = np.repeat(groups, GROUP, -1)[..., None] * np.eye(64)
    np.testing.assert_allclose(cost, expected, atol=1e-8 * groups.max())
    assert (np.diff(groups, axis=-1) <= 0).all()


def test_bits_are_given_so_that_no_other_way_costs_less() -> None:
    rng = np.random.default_rng(5)
    for _ in range(5):
        costs = rng.lognormal(0, 3, (2, 2))
        bits = klt_fit.allocate(costs, 8)
        assert bits.sum() == 8

        def cost(way: tuple[int, ...], costs: NDArray[np.float64] = costs) -> float:
            return float(sum(c * DISTORTIONS[b] for c, b in zip(costs.ravel(), way, strict=True)))

        best = min(cost(way) for way in product(range(6), repeat=4) if sum(way) == 8)
        assert cost(tuple(bits.ravel())) == pytest.approx(best)


def fisher_of(moments: Moments, layer: int, side: int, scale: float) -> Moments:
    """The moments where errors of one layer's keys or values cost `scale` times as much."""
    name = ("key_fisher", "value_fisher")[side]
    fisher = getattr(moments, name).copy()
    fisher[layer] *= scale
    return moments._replace(**{name: fisher})


def bits_of(geometry: Geometry, state: Floats) -> NDArray[np.int64]:
    """`[layers, 2, heads, groups]`."""
    bits = [record.bits for *_, record in klt_reference.records(geometry, state)]
    return np.array(bits).reshape(geometry.num_layers, 2, geometry.num_kv_heads, -1)


def test_like_channels_get_like_bits() -> None:
    state = CODEC.fit_moments(GEOMETRY, standard(GEOMETRY))
    assert (bits_of(GEOMETRY, state) == 2).all()


@pytest.mark.parametrize("side", [0, 1])
def test_a_layer_and_side_whose_errors_cost_the_answer_more_takes_bits_of_all_others(side: int) -> None:
    """4 groups x 2 bits x 4 are 32. Where errors cost 100 times as much, the fifth bit is worth 100 x (.0115 - .0035) =
    .81; elsewhere the first is worth 1 - .36 = .64 and the second .36 - .12 = .25. So 4 x 5 go there, 12 x 1 elsewhere.
    """
    geometry = Geometry(2, 1, 64, "float32")
    bits = bits_of(geometry, CODEC.fit_moments(geometry, fisher_of(standard(geometry), 1, side, 100)))
    expected = np.ones((2, 2, 1, 4))
    expected[1, side] = 5
    np.testing.assert_array_equal(bits, expected)


def test_where_errors_cost_the_answer_nothing_others_get_the_bits_first() -> None:
    unread = fisher_of(example_moments(GEOMETRY), 1, 0, 0)
    state = CODEC.fit_moments(GEOMETRY, unread)
    bits = bits_of(GEOMETRY, state)
    assert (bits[1, 0] == 0).all() and bits.sum() == 2 * 2 * 2 * 3 * 4
    values = np.random.default_rng(2).standard_normal(GEOMETRY.shape)
    decoded = through("klt2", GEOMETRY, state, values)[1, 0]
    np.testing.assert_allclose(decoded, np.tile(unread.key_mean[1][:, None], (1, 16, 1)), rtol=1e-6)


def test_where_no_error_costs_anything_all_get_the_same_bits() -> None:
    moments = example_moments(GEOMETRY)
    nothing = np.zeros_like(moments.key_fisher)
    state = CODEC.fit_moments(GEOMETRY, moments._replace(key_fisher=nothing, value_fisher=nothing))
    assert (bits_of(GEOMETRY, state) == 2).all()


@pytest.mark.parametrize(
    "tokens", [8, 16, 12]
)  # of 12 tokens a bit of keys takes more bytes than one of values
@pytest.mark.parametrize("name", ["klt2", "klt25"])
def test_a_page_is_full_and_of_one_size_whatever_the_moments_are(name: str, tokens: int) -> None:
    geometry = Geometry(3, 2, 64, "float32", tokens)
    codec = get(name)
    full = round({"klt2": 2.0, "klt25": 2.5}[name] * 3 * 2 * 4)
    planes = (16 * -(-tokens // 8), 2 * tokens)  # bytes of a group's bit in keys, in values
    size = 4 * 3 * 2 * 2 + 3 * 2 * 2 * tokens + full * sum(planes)
    assert codec.page_bytes(geometry) == size
    for seed in range(3):
        moments = fisher_of(example_moments(geometry, seed), seed, 0, 30)
        keys, values = bits_of(geometry, codec.fit_moments(geometry, moments)).sum((0, 2, 3))
        assert keys * planes[0] + values * planes[1] == full * sum(planes)
        assert 0 < values < keys or tokens == 12


@settings(max_examples=100, deadline=None)
@given(
    costs=arrays(np.float64, (3, 2, 4), elements=st.floats(0, 1e6, allow_subnormal=False)),
    total=st.integers(0, 120),
)
def test_no_bit_is_worth_more_elsewhere(costs: NDArray[np.float64], total: int) -> None:
    bits = klt_fit.allocate(costs, total)
    assert bits.sum() == total and bits.min() >= 0 and bits.max() <= 5
    worth = -np.diff(DISTORTIONS)
    last = [cost * worth[b - 1] for cost, b in zip(costs.flat, bits.flat, strict=True) if b > 0]
    more = [cost * worth[b] for cost, b in zip(costs.flat, bits.flat, strict=True) if b < 5]
    assert min(last, default=np.inf) >= max(more, default=0.0)


def test_errors_are_the_predicted_ones_and_far_below_those_of_equal_bits() -> None:
    """In the Fisher metric: the variance of a group's codes, times its code's distortion, times its cost."""
    geometry, rng = Geometry(1, 1, 64, "float32", 2048), np.random.default_rng(7)
    moments = example_moments(geometry)
    fisher = moments.key_fisher[0, 0].astype(np.float64)
    values = np.zeros(geometry.shape)
    values[0, 0, 0] = moments.key_mean[0, 0] + gaussian(
        moments.key_covariance[0, 0].astype(np.float64), 2048, rng
    )

    def loss(name: str, state: Floats) -> float:
        error = (through(name, geometry, state, values) - values)[0, 0, 0]
        return float(np.einsum("td,de,te->t", error, fisher, error).mean())

    state = CODEC.fit_moments(geometry, moments)
    record = klt_reference.records(geometry, state)[0][-1]
    distortion = np.repeat(np.array(DISTORTIONS)[record.bits], GROUP)
    synthesis = record.synthesis.numpy().astype(np.float64)
    predicted = np.trace(synthesis * distortion @ synthesis.T @ fisher)
    measured = loss("klt2", state)
    # A gain a token makes up for a part, and costs a part.
    assert 0.75 * predicted < measured < 1.25 * predicted
    assert measured < 0.25 * loss("rotated2", moments.key_mean.ravel())


def test_without_moments_it_is_as_good_as_rotated2() -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal(GEOMETRY.shape)
    neutral = CODEC.fit_state(GEOMETRY, [], [])
    mine = through("klt2", GEOMETRY, neutral, values)
    theirs = through("rotated2", GEOMETRY, np.zeros(2 * 3 * 64, np.float32), values)
    assert ((mine - values) ** 2).mean() == pytest.approx(((theirs - values) ** 2).mean(), rel=1e-3)


def test_a_head_that_nobody_attends_may_get_no_bits_and_decodes_to_its_mean() -> None:
    moments = example_moments(GEOMETRY)
    weak = moments.key_covariance.copy()
    weak[0, 1] *= 1e-9
    state = CODEC.fit_moments(GEOMETRY, moments._replace(key_covariance=weak))
    values = np.random.default_rng(2).standard_normal(GEOMETRY.shape)
    decoded = through("klt2", GEOMETRY, state, values)
    np.testing.assert_allclose(decoded[0, 0, 1], np.tile(moments.key_mean[0, 1], (16, 1)), rtol=1e-6)
    packed = np.empty(CODEC.page_bytes(GEOMETRY), np.uint8)
    CODEC.encode(GEOMETRY, exact_page(GEOMETRY, values), 16, state, packed)
    reference = CODEC.reference_encode(GEOMETRY, exact_page(GEOMETRY, values), 16, state)
    np.testing.assert_array_equal(packed, reference)


@pytest.mark.parametrize("dead", Moments._fields)
def test_moments_of_nothing_give_a_state_that_works(dead: str) -> None:
    moments = example_moments(GEOMETRY)
    moments = moments._replace(**{dead: np.zeros_like(getattr(moments, dead))})
    state = CODEC.fit_moments(GEOMETRY, moments)
    assert np.isfinite(state).all()
    values = np.random.default_rng(2).standard_normal(GEOMETRY.shape)
    assert np.isfinite(through("klt2", GEOMETRY, state, values)).all()


@pytest.mark.parametrize(
    ("name", "dim", "bits"), [("klt2", 64, 2.15625), ("klt2", 128, 2.078125), ("klt25", 64, 2.65625)]
)
def test_all_in_a_value_takes_a_gains_share_more_than_its_bits(name: str, dim: int, bits: float) -> None:
    assert get(name).bits_per_value(Geometry(4, 2, dim, "bfloat16")) == bits


@pytest.mark.parametrize(("dim", "tokens", "count"), [(64, 16, 16), (128, 8, 5), (48, 32, 19)])
def test_groups_may_have_any_bits_in_any_order(dim: int, tokens: int, count: int) -> None:
    """Also groups without any in front of others, between them, or behind all that a head has."""
    geometry = Geometry(1, 2, dim, "float32", tokens)
    state, groups = CODEC.fit_moments(geometry, example_moments(geometry)), dim // GROUP
    records = state.reshape(4, record_floats(dim))
    bits = np.resize([[0, 5, 4, 0], [3, 0, 1, 0], [0, 0, 5, 0]], (4, groups))
    bits[3] = 0
    at = 4 * 4
    for side, record, of_groups in zip((0, 0, 1, 1), records, bits, strict=True):
        record[0], record[1 : 1 + groups] = at, of_groups
        at += block_bytes(side, int(of_groups.sum()), tokens)
    page = gaussian_page(geometry, seed=dim)
    packed, decoded = np.full(at, 0x11, np.uint8), np.empty(geometry.page_bytes, np.uint8)
    words = page_words(geometry, page)
    assert klt_kernels.encode_page(words, KIND["float32"], count, state, packed)
    np.testing.assert_array_equal(packed, klt_reference.encode(geometry, page, count, state, at))
    klt_kernels.decode_page(packed, count, state, page_words(geometry, decoded), KIND["float32"])
    expected = klt_reference.decode(geometry, packed, count, state)
    np.testing.assert_allclose(
        page_values(geometry, decoded), expected, rtol=1e-5, atol=1e-5 * abs(expected).max()
    )


def test_a_state_of_another_model_is_refused() -> None:
    from tierkv.errors import ConfigError

    other = CODEC.fit_state(Geometry(1, 3, 64, "float32"), [], [])
    with pytest.raises(ConfigError, match="fit_moments"):
        through("klt2", GEOMETRY, other, np.zeros(GEOMETRY.shape))


def test_moments_are_taken_layer_by_layer_where_layers_have_codecs_of_their_own() -> None:
    moments = example_moments(GEOMETRY)
    layered = get("klt2,1=k3v2")
    state = layered.fit_moments(GEOMETRY, moments)
    single = Geometry(1, 3, 64, "float32")
    first = Moments(*(field[:1] for field in moments))
    mine = CODEC.fit_moments(single, first)
    np.testing.assert_array_equal(state[: mine.size], mine)
    np.testing.assert_array_equal(state[mine.size :], moments.key_mean[1].ravel())
