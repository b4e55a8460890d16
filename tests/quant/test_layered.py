"""Layered codecs: each layer's block is what its own codec makes of that layer alone."""

from __future__ import annotations

import numpy as np
import pytest

from tests.quant.pages import exact_page, gaussian_page, gaussian_state, page_values
from tierkv.errors import ConfigError
from tierkv.geometry import DTypeName, Geometry
from tierkv.quant import NonFiniteValues, get
from tierkv.quant.contract import Bytes, Floats
from tierkv.quant.layered import spell

FOUR = Geometry(4, 3, 64, "bfloat16", 16)
ONE = Geometry(1, 3, 64, "bfloat16", 16)
NAME = "k3v2,1=kivi2,-1=kivi2"
CODECS = ("k3v2", "kivi2", "k3v2", "kivi2")
# k3v2, a head: 4 + 16 + 16*64*3/8 and 4 + 16 + 16*64*2/8. kivi2, a head: a scale and a zero byte a channel and
# 16*64/4; a scale and a zero byte for each 32 of 16*64 and 16*64/4; and a float32 for each 64 of those bytes.
K3V2_BYTES = 3 * ((4 + 16 + 384) + (4 + 16 + 256))
KIVI2_BYTES = 3 * (2 * 64 + 256 + 2 * 32 + 256) + 4 * (2 * 3 + 2 * 2)
K3V2_BLOCK, KIVI2_BLOCK = 2048, 2176  # up to the next 64


def test_a_page_is_its_layers_blocks_each_padded_to_64_bytes() -> None:
    assert (get("k3v2").page_bytes(ONE), get("kivi2").page_bytes(ONE)) == (K3V2_BYTES, KIVI2_BYTES)
    assert 0 <= K3V2_BLOCK - K3V2_BYTES < 64
    assert 0 <= KIVI2_BLOCK - KIVI2_BYTES < 64
    codec = get(NAME)
    assert codec.page_bytes(FOUR) == 2 * (K3V2_BLOCK + KIVI2_BLOCK)
    starts = [codec.layer_block(FOUR, layer).start for layer in range(4)]
    assert starts == [0, K3V2_BLOCK, K3V2_BLOCK + KIVI2_BLOCK, 2 * K3V2_BLOCK + KIVI2_BLOCK]
    codes = [codec.layer_block(FOUR, layer).code for layer in range(4)]
    assert codes == [get(name).code for name in CODECS]
    assert codec.state_floats(FOUR) == 2 * 3 * 64, "mean keys of the two k3v2 layers"


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def geometry(request: pytest.FixtureRequest) -> Geometry:
    dtype: DTypeName = request.param
    return Geometry(4, 3, 64, dtype, 16)


def alone(geometry: Geometry, page: Bytes, layer: int) -> tuple[Geometry, Bytes]:
    """One layer of a page as a page."""
    single = Geometry(1, geometry.num_kv_heads, geometry.head_dim, geometry.dtype, geometry.page_tokens)
    return single, exact_page(single, page_values(geometry, page)[layer])


def states(state: Floats) -> list[Floats]:
    return [state[:192], state[:0], state[192:], state[:0]]


@pytest.mark.parametrize("count", [1, 15, 16])
def test_each_block_is_its_codecs_page_of_that_layer(geometry: Geometry, count: int) -> None:
    page, codec = gaussian_page(geometry), get(NAME)
    state = gaussian_state(codec.state_floats(geometry))
    packed = np.full(codec.page_bytes(geometry), 0xA5, np.uint8)
    codec.encode(geometry, page, count, state, packed)
    decoded = np.full(geometry.page_bytes, 0xA5, np.uint8)
    codec.decode(geometry, packed, count, state, decoded)
    for layer, (name, own) in enumerate(zip(CODECS, states(state), strict=True)):
        single, part = alone(geometry, page, layer)
        expected = np.zeros(get(name).page_bytes(single), np.uint8)
        get(name).encode(single, part, count, own, expected)
        start = codec.layer_block(geometry, layer).start
        assert np.array_equal(packed[start : start + len(expected)], expected)
        stop = [*(codec.layer_block(geometry, later).start for later in range(1, 4)), len(packed)][layer]
        assert not packed[start + len(expected) : stop].any(), "padding is zero"
        back = np.empty(single.page_bytes, np.uint8)
        get(name).decode(single, expected, count, own, back)
        assert np.array_equal(page_values(geometry, decoded)[layer], page_values(single, back)[0])
    assert np.array_equal(codec.reference_encode(geometry, page, count, state), packed)
    read = codec.reference_decode(geometry, packed, count, state)
    assert read.shape == geometry.shape
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[geometry.dtype]
    assert np.allclose(page_values(geometry, decoded), read, rtol=tolerance, atol=tolerance)


def test_the_state_is_the_layers_states_in_order() -> None:
    pages = [gaussian_page(FOUR, seed) for seed in range(3)]
    state = get(NAME).fit_state(FOUR, pages, [16, 16, 16])
    whole = get("k3v2").fit_state(FOUR, pages, [16, 16, 16]).reshape(4, -1)
    assert np.array_equal(state, np.concatenate([whole[0], whole[2]]))


@pytest.mark.parametrize("layer", range(4))
def test_a_value_that_is_not_finite_in_any_layer_refuses_the_page(layer: int) -> None:
    values = np.ones(FOUR.shape)
    values[layer, 1, 2, 3, 4] = np.inf
    codec = get(NAME)
    out = np.zeros(codec.page_bytes(FOUR), np.uint8)
    with pytest.raises(NonFiniteValues):
        codec.encode(FOUR, exact_page(FOUR, values), 16, gaussian_state(codec.state_floats(FOUR)), out)


def test_a_name_says_the_same_wherever_it_is_read() -> None:
    assert get(NAME) is get(NAME)
    assert get("k3v2,-1=kivi2,1=kivi2").name == NAME == spell("k3v2", {-1: "kivi2", 1: "kivi2"})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("k3v2,zero=kivi2", "'zero=kivi2'"), ("k3v2,0", "'0'"), ("k3v2,", "''"),
        ("k3v2,0=kivi2,0=k3v2", "second one"), ("k3v2,0=k9", "k9"), ("k9,0=k3v2", "k9"),
    ],
)  # fmt: skip
def test_a_name_that_cannot_be_read_is_refused(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        get(name)


@pytest.mark.parametrize(("name", "told"), [("k3v2,4=kivi2", "layer 4"), ("k3v2,-5=kivi2", "layer -5"),
                                            ("k3v2,3=kivi2,-1=kivi2", "layer 3 twice")])  # fmt: skip
def test_layers_that_a_model_lacks_or_that_are_one_are_refused_with_its_geometry(
    name: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        get(name).page_bytes(FOUR)


def test_a_buffer_that_is_too_short_is_refused() -> None:
    codec = get(NAME)
    with pytest.raises(ConfigError, match="and the buffer has 100"):
        codec.decode(
            FOUR, np.zeros(100, np.uint8), 16, gaussian_state(384), np.zeros(FOUR.page_bytes, np.uint8)
        )


def test_an_exact_layer_is_there_byte_for_byte_in_a_low_bit_page(geometry: Geometry) -> None:
    page, codec = gaussian_page(geometry), get("k3v2,2=exact")
    state = gaussian_state(codec.state_floats(geometry))
    packed, decoded = np.empty(codec.page_bytes(geometry), np.uint8), np.empty(geometry.page_bytes, np.uint8)
    codec.encode(geometry, page, 16, state, packed)
    codec.decode(geometry, packed, 16, state, decoded)
    size = geometry.page_bytes // 4
    exact = page[2 * size : 3 * size]
    start = codec.layer_block(geometry, 2).start
    assert start == 2 * K3V2_BLOCK
    assert np.array_equal(packed[start : start + size], exact)
    assert np.array_equal(decoded[2 * size : 3 * size], exact)
    assert not np.array_equal(decoded[:size], page[:size])
