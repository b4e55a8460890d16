"""klt2 on a device, in triton's interpreter where there is none: against the format's reference in torch.

Products sum in another order than the reference, so a code may differ where a value lies within rounding of a boundary.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.quant.pages import exact_page, example_state, gaussian_page, page_values
from tests.triton_device import DEVICE  # skips the module where kernels cannot run
from tierkv import quant
from tierkv.errors import ConfigError
from tierkv.geometry import DTypeName, Geometry
from tierkv.quant.klt_layout import record_floats
from tierkv.quant.klt_levels import LEVELS
from tierkv.quant.klt_triton import KltPages, quantizers

CPU = quant.get("klt2")
STEP = {"float32": 2**-18, "float16": 2**-10, "bfloat16": 2**-7}
"""A relative rounding step of the page dtype, or of a sum; the interpreter cuts bfloat16 off instead of rounding it."""


@cache
def state_of(geometry: Geometry) -> NDArray[np.float32]:
    return example_state(CPU, geometry)


def on_device(array: NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(array.copy()).to(DEVICE)


def encode(
    codec: KltPages, pages: list[NDArray[np.uint8]], counts: list[int]
) -> tuple[list[NDArray[np.uint8]], list[int]]:
    """Packed bytes and flags; packed pages lie among the exact ones, in places of a shuffled order."""
    frame = -(-max(codec.geometry.page_bytes, codec.page_bytes) // 64) * 64
    places = np.random.default_rng(1).permutation(2 * len(pages)).astype(np.int64) * frame
    pool = np.full(2 * len(pages) * frame, 0xA5, np.uint8)
    for place, page in zip(places, pages, strict=False):
        pool[place : place + len(page)] = page
    data, flags = on_device(pool), torch.zeros(len(pages), dtype=torch.int32, device=DEVICE)
    sources, targets = places[: len(pages)], places[len(pages) :]
    written = on_device(np.array(counts, np.int32))
    codec.encode(data, on_device(sources), written, data, on_device(targets), flags)
    after = data.cpu().numpy()
    for target in targets:
        assert (after[target + codec.page_bytes : target + frame] == 0xA5).all(), "no byte beyond a page"
    for source, page in zip(sources, pages, strict=True):
        np.testing.assert_array_equal(after[source : source + len(page)], page)
    return [after[target : target + codec.page_bytes] for target in targets], flags.tolist()


def decode(codec: KltPages, packed: list[NDArray[np.uint8]], counts: list[int]) -> NDArray[np.float32]:
    """`[pages, *geometry.shape]`."""
    stride, frame = (-(-size // 64) * 64 for size in (codec.page_bytes, codec.geometry.page_bytes))
    pool = np.zeros(len(packed) * stride, np.uint8)
    for index, page in enumerate(packed):
        pool[index * stride : index * stride + len(page)] = page
    out = torch.full((len(packed) * frame,), 0x11, dtype=torch.uint8, device=DEVICE)
    at = np.arange(len(packed), dtype=np.int64)
    written = on_device(np.array(counts, np.int32))
    codec.decode(on_device(pool), on_device(at * stride), written, out, on_device(at * frame))
    data = out.cpu().numpy().reshape(len(packed), frame)
    assert (data[:, codec.geometry.page_bytes :] == 0x11).all(), "no byte beyond a page"
    return np.stack([page_values(codec.geometry, page[: codec.geometry.page_bytes]) for page in data])


def bits_of(geometry: Geometry, state: NDArray[np.float32]) -> set[int]:
    """The numbers of bits that groups have in a state."""
    records = state.reshape(-1, record_floats(geometry.head_dim))
    return {int(bits) for bits in records[:, 1 : 1 + geometry.head_dim // 16].ravel()}


CASES: list[tuple[DTypeName, int, int, int, int]] = [
    ("float32", 2, 64, 16, 16),
    ("float32", 1, 96, 16, 15),
    ("float16", 2, 80, 32, 19),
    ("bfloat16", 1, 128, 16, 1),
    ("float32", 1, 16, 8, 5),
    ("float32", 2, 16, 4, 3),
    ("bfloat16", 2, 48, 128, 100),
]


@pytest.mark.parametrize(("dtype", "layers", "dim", "tokens", "count"), CASES)
def test_pages_pack_and_unpack_as_the_reference_does(
    dtype: DTypeName, layers: int, dim: int, tokens: int, count: int
) -> None:
    geometry = Geometry(layers, 2, dim, dtype, tokens)
    state = state_of(geometry)
    codec = KltPages(geometry, state, DEVICE)
    assert codec.page_bytes == CPU.page_bytes(geometry)
    pages, counts = (
        [gaussian_page(geometry, seed=dim + count), gaussian_page(geometry, seed=7)],
        [count, tokens],
    )
    packed, flags = encode(codec, pages, counts)
    assert flags == [0, 0]
    header = 8 * geometry.num_layers * geometry.num_kv_heads
    for page, mine, written in zip(pages, packed, counts, strict=True):
        theirs = CPU.reference_encode(geometry, page, written, state)
        np.testing.assert_allclose(
            mine[:header].view(np.float32), theirs[:header].view(np.float32), rtol=1e-5
        )
        # Few values lie within rounding of a boundary; where a gain's code differs, some of the token's bytes do.
        assert (mine[header:] != theirs[header:]).mean() < 0.002
    decoded = decode(codec, packed, counts)
    for mine, got, written in zip(packed, decoded, counts, strict=True):
        expected = CPU.reference_decode(geometry, mine, written, state)
        np.testing.assert_allclose(
            got, expected, rtol=STEP[dtype], atol=STEP["float32"] * abs(expected).max()
        )


def test_every_number_of_bits_is_packed_and_unpacked() -> None:
    """The case above of 128 channels has groups of 0 to 5 bits."""
    geometry = Geometry(1, 2, 128, "bfloat16", 16)
    assert bits_of(geometry, state_of(geometry)) == {0, 1, 2, 3, 4, 5}


def test_a_magnitude_is_a_cubic_through_the_levels() -> None:
    table = quantizers().astype(np.float64)
    for bits, levels in enumerate(LEVELS):
        index = np.arange(len(levels))
        values = sum(table[bits, power] * index**power for power in range(4))
        np.testing.assert_allclose(values, levels, rtol=1e-6)


def test_the_state_without_moments_packs_as_the_reference_does() -> None:
    geometry = Geometry(1, 1, 256, "float32", 8)
    page = gaussian_page(geometry)
    state = CPU.fit_state(geometry, [page], [8])
    codec = KltPages(geometry, state, DEVICE)
    (packed,), _ = encode(codec, [page], [8])
    assert (packed[8:] != CPU.reference_encode(geometry, page, 8, state)[8:]).mean() < 0.002
    expected = CPU.reference_decode(geometry, packed, 8, state)
    np.testing.assert_allclose(decode(codec, [packed], [8])[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_ends_of_the_range_pack_like_the_middle(scale: float) -> None:
    geometry = Geometry(1, 1, 64, "bfloat16")
    state = state_of(geometry)
    values = np.random.default_rng(0).standard_normal(geometry.shape) * scale
    page = exact_page(geometry, values)
    (packed,), flags = encode(KltPages(geometry, state, DEVICE), [page], [16])
    theirs = CPU.reference_encode(geometry, page, 16, state)
    assert flags == [0]
    np.testing.assert_allclose(packed[:8].view(np.float32), theirs[:8].view(np.float32), rtol=1e-5)
    assert (packed[8:] != theirs[8:]).mean() < 0.004


def test_a_zero_page_has_no_gains_and_decodes_to_the_mean() -> None:
    geometry = Geometry(1, 2, 64, "float32")
    state = CPU.fit_state(geometry, [], [])
    codec = KltPages(geometry, state, DEVICE)
    (packed,), flags = encode(codec, [np.zeros(geometry.page_bytes, np.uint8)], [16])
    assert flags == [0]
    np.testing.assert_array_equal(
        packed, CPU.reference_encode(geometry, np.zeros(geometry.page_bytes, np.uint8), 16, state)
    )
    assert (decode(codec, [packed], [16]) == 0).all()


def test_a_token_far_below_the_others_decodes_to_zero() -> None:
    geometry = Geometry(1, 1, 64, "float32")
    values = np.random.default_rng(0).standard_normal(geometry.shape)
    values[:, :, :, 2] *= 2.0**-20  # gains reach down to 2**-15.9 of the largest
    codec = KltPages(geometry, CPU.fit_state(geometry, [], []), DEVICE)
    (packed,), _ = encode(codec, [exact_page(geometry, values)], [16])
    decoded = decode(codec, [packed], [16])[0]
    assert (decoded[:, :, :, 2] == 0).all() and (decoded[:, :, :, 3] != 0).any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_only_pages_with_nan_or_infinity_in_a_written_token_are_flagged(side: int, bad: float) -> None:
    geometry = Geometry(2, 2, 16, "bfloat16")
    codec = KltPages(geometry, state_of(geometry), DEVICE)
    values = np.random.default_rng(0).standard_normal(geometry.shape)
    good = exact_page(geometry, values)
    values[1, side, 1, 15, 15] = bad
    worse = exact_page(geometry, values)
    _, flags = encode(codec, [good, worse, worse, good, good, worse], [16, 16, 15, 16, 1, 16])
    assert flags == [0, 1, 0, 0, 0, 1]


def test_values_saturate_at_the_end_of_the_page_dtype() -> None:
    geometry = Geometry(1, 1, 64, "float16")
    codec = KltPages(geometry, CPU.fit_state(geometry, [], []), DEVICE)
    (packed,), _ = encode(codec, [exact_page(geometry, np.full(geometry.shape, 65504.0))], [16])
    packed[:8].view(np.float32)[:] *= 1e4
    assert (abs(decode(codec, [packed], [16])) == 65504.0).all()


class TestRefusals:
    def test_shapes_that_kernels_cannot_take(self) -> None:
        nothing = np.zeros(0, np.float32)
        with pytest.raises(ConfigError, match="head_dim is 72"):
            KltPages(Geometry(1, 1, 72, "float32"), nothing, DEVICE)
        with pytest.raises(ConfigError, match="power of two, not 12"):
            KltPages(Geometry(1, 1, 64, "float32", 12), nothing, DEVICE)

    def test_a_state_of_another_geometry(self) -> None:
        with pytest.raises(ConfigError, match="7 floats and this geometry needs"):
            KltPages(Geometry(1, 1, 64, "float32"), np.zeros(7, np.float32), DEVICE)
