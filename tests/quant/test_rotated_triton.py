"""Encode and decode on a device, in triton's interpreter where there is none: against the format in float64.

The rotation sums in another order than the reference, so a code may differ where a value lies within rounding of a
boundary, and only there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.quant.pages import exact_page, example_state, gaussian_page, page_values
from tests.triton_device import DEVICE  # skips the module where kernels cannot run
from tierkv import quant
from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.quant.lloyd import BOUNDARIES_4, BOUNDARIES_8, LEVELS_4, LEVELS_8
from tierkv.quant.rotated_triton import RotatedPages
from tierkv.quant.rotation import block_sizes, signs

LAYERS, HEADS, TOKENS = 2, 3, 16
CLOSE = 2e-5
"""Relative rounding of a rotated value: 128 terms of 2**-22 each."""


class Unpacked(NamedTuple):
    """A packed page taken apart as the format's docstring says; arrays are `[layers, 2, heads, tokens, ...]`."""

    gains: NDArray[np.float64]  # as stored
    codes: NDArray[np.int64]  # gain codes
    index: NDArray[np.int64]  # [..., head_dim]
    negative: NDArray[np.int64]


def bits_of(data: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """The small integers of each byte on a new last axis, low first."""
    return data[..., None].astype(np.int64) >> bits * np.arange(8 // bits) & (1 << bits) - 1


def unpack(geometry: Geometry, packed: NDArray[np.uint8], key_bits: int) -> Unpacked:
    layers, _, heads, tokens, dim = geometry.shape
    tops = packed[: 8 * layers * heads].view(np.float32).reshape(layers, 2, heads)
    key_bytes, value_bytes = tokens + tokens * dim * key_bits // 8, tokens + tokens * dim // 4
    codes = np.empty(geometry.shape[:4], np.int64)
    index, negative = np.empty(geometry.shape, np.int64), np.empty(geometry.shape, np.int64)
    body = packed[8 * layers * heads :].reshape(layers, heads * (key_bytes + value_bytes))
    for layer in range(layers):
        for head in range(heads):
            block = body[layer, head * key_bytes :][:key_bytes]
            here = layer, 0, head
            codes[here] = block[:tokens]
            plane = bits_of(block[tokens:][: tokens * dim // 4].reshape(dim // 4, tokens), 2)
            parts = plane.transpose(1, 0, 2).reshape(tokens, dim)
            if key_bits == 3:
                plane = bits_of(block[tokens + tokens * dim // 4 :].reshape(dim // 8, tokens), 1)
                index[here], negative[here] = parts, plane.transpose(1, 0, 2).reshape(tokens, dim)
            else:
                index[here], negative[here] = parts & 1, parts >> 1
            block = body[layer, heads * key_bytes + head * value_bytes :][:value_bytes]
            here = layer, 1, head
            codes[here] = block[:tokens]
            parts = (
                bits_of(block[tokens:].reshape(tokens, dim // 4), 2).transpose(0, 2, 1).reshape(tokens, dim)
            )
            index[here], negative[here] = parts & 1, parts >> 1
    fractions = np.where(codes == 255, 0.0, 2.0 ** (-codes / 16))
    return Unpacked(tops[..., None] * fractions, codes, index, negative)


def rotation(dim: int) -> NDArray[np.float64]:
    """H diag(signs) as a matrix, H by Kronecker products."""
    matrix = np.zeros((dim, dim))
    start = 0
    for size in block_sizes(dim):
        block = np.ones((1, 1))
        while len(block) < size:
            block = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), block)
        matrix[start : start + size, start : start + size] = block / np.sqrt(size)
        start += size
    return matrix * signs(dim)


def quantizer(side: int, key_bits: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Levels and boundaries of keys (side 0) or values."""
    eight = side == 0 and key_bits == 3
    levels, boundaries = (LEVELS_8, BOUNDARIES_8) if eight else (LEVELS_4, BOUNDARIES_4)
    return levels.astype(np.float64), boundaries.astype(np.float64)


def check_codes(
    geometry: Geometry, page: NDArray[np.uint8], count: int, state: NDArray[np.float32], got: Unpacked, key_bits: int
) -> None:  # fmt: skip
    """Codes are the definition's, in float64, but within rounding of a boundary; unwritten tokens are zero bytes."""
    layers, _, heads, _, dim = geometry.shape
    x = page_values(geometry, page).astype(np.float64)
    x[:, 0] -= state.reshape(layers, heads, 1, dim)
    y = (x @ rotation(dim).T)[..., :count, :]
    size, gains = np.abs(y), got.gains[..., :count]
    for side in range(2):
        levels, boundaries = quantizer(side, key_bits)
        magnitudes = (size[:, side, ..., None] > boundaries * rms(y[:, side])[..., None, None]).sum(-1)
        chosen = levels[magnitudes]
        best = (size[:, side] * chosen).sum(-1) / (chosen**2).sum(-1)
        # 2.2% is half a step of the stored gain; a value on a boundary moves the fit a little more
        np.testing.assert_allclose(gains[:, side], best, rtol=0.023)
        ratio = size[:, side] / gains[:, side, ..., None]
        expected = (ratio[..., None] > boundaries).sum(-1)
        margin = np.abs(ratio[..., None] / boundaries - 1).min(-1)
        differs = got.index[:, side, :, :count] != expected
        assert (margin[differs] < CLOSE).all()
        assert differs.mean() < 1e-3
        negative = got.negative[:, side, :, :count] != (y[:, side] < 0)
        assert (size[:, side][negative] < CLOSE * rms(y[:, side])[..., None].repeat(dim, -1)[negative]).all()
    assert not got.codes[..., count:].any()
    assert not got.index[..., count:, :].any() and not got.negative[..., count:, :].any()


def rms(y: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sqrt((y**2).mean(-1))


def on_device(array: NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(array.copy()).to(DEVICE)


def encode(
    codec: RotatedPages, pages: list[NDArray[np.uint8]], counts: list[int]
) -> tuple[list[NDArray[np.uint8]], list[int]]:
    """Packed bytes and flags; packed pages lie among the exact ones, in places of a shuffled order."""
    frame = -(-codec.geometry.page_bytes // 64) * 64
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


def decode(codec: RotatedPages, packed: list[NDArray[np.uint8]], counts: list[int]) -> NDArray[np.float32]:
    """`[pages, *geometry.shape]`."""
    stride = -(-codec.page_bytes // 64) * 64
    pool = np.zeros(len(packed) * stride, np.uint8)
    for index, page in enumerate(packed):
        pool[index * stride : index * stride + len(page)] = page
    frame = -(-codec.geometry.page_bytes // 64) * 64
    out = torch.full((len(packed) * frame,), 0x11, dtype=torch.uint8, device=DEVICE)
    at = np.arange(len(packed), dtype=np.int64)
    written = on_device(np.array(counts, np.int32))
    codec.decode(on_device(pool), on_device(at * stride), written, out, on_device(at * frame))
    pages = out.cpu().numpy().reshape(len(packed), frame)[:, : codec.geometry.page_bytes]
    return np.stack([page_values(codec.geometry, page) for page in pages])


def expected_values(
    geometry: Geometry, got: Unpacked, count: int, state: NDArray[np.float32], key_bits: int
) -> NDArray[np.float64]:
    layers, _, heads, _, dim = geometry.shape
    values = np.empty(geometry.shape)
    for side in range(2):
        levels, _ = quantizer(side, key_bits)
        values[:, side] = levels[got.index[:, side]] * (1 - 2 * got.negative[:, side])
    values = (
        values @ rotation(dim) * got.gains[..., None]
    )  # the inverse of an orthonormal matrix is its transpose
    values[:, 0] += state.reshape(layers, heads, 1, dim)
    values[..., count:, :] = 0
    return values


STEP = {"float32": 2**-20, "float16": 2**-10, "bfloat16": 2**-7}
"""A relative rounding step of the page dtype; the interpreter cuts bfloat16 off instead of rounding it."""

CASES = [
    (3, "float32", 64, 16),
    (3, "float32", 96, 15),
    (3, "float16", 80, 1),
    (3, "bfloat16", 128, 16),
    (3, "bfloat16", 256, 15),
    (3, "float32", 8, 16),
    (2, "float32", 80, 16),
    (2, "float16", 64, 15),
    (2, "bfloat16", 64, 1),
]


@pytest.mark.parametrize(("key_bits", "dtype", "dim", "count"), CASES)
def test_pages_pack_and_unpack_as_the_format_says(key_bits: int, dtype: str, dim: int, count: int) -> None:
    geometry = Geometry(LAYERS, HEADS, dim, dtype, TOKENS)  # type: ignore[arg-type]
    state = example_state(quant.get("k3v2"), geometry)
    codec = RotatedPages(geometry, state, DEVICE, key_bits)
    pages, counts = [gaussian_page(geometry, seed=dim + count), gaussian_page(geometry, seed=7)], [count, 16]
    packed, flags = encode(codec, pages, counts)
    assert flags == [0, 0]
    decoded = decode(codec, packed, counts)
    for index, page in enumerate(pages):
        got = unpack(geometry, packed[index], key_bits)
        check_codes(geometry, page, counts[index], state, got, key_bits)
        expected = expected_values(geometry, got, counts[index], state, key_bits)
        np.testing.assert_allclose(decoded[index], expected, rtol=STEP[dtype], atol=4e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_those_of_the_cpu_codec_but_near_a_boundary(dtype: str) -> None:
    geometry = Geometry(LAYERS, HEADS, 64, dtype, TOKENS)  # type: ignore[arg-type]
    cpu = quant.get("k3v2")
    state = example_state(cpu, geometry)
    codec = RotatedPages(geometry, state, DEVICE)
    assert codec.page_bytes == cpu.page_bytes(geometry)
    page = gaussian_page(geometry, seed=2)
    (packed,), _ = encode(codec, [page], [13])
    reference = cpu.reference_encode(geometry, page, 13, state)
    header = 8 * LAYERS * HEADS
    np.testing.assert_allclose(
        packed[:header].view(np.float32), reference[:header].view(np.float32), rtol=1e-5
    )
    # One value in a million lies within 1e-6 of a boundary; where a gain's code differs, a token's bytes do.
    assert (packed[header:] != reference[header:]).mean() < 0.002


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_ends_of_the_range_pack_like_the_middle(scale: float) -> None:
    geometry = Geometry(1, 2, 64, "bfloat16")
    page = exact_page(geometry, gaussian_values(geometry) * scale)
    codec = RotatedPages(geometry, np.zeros(0, np.float32), DEVICE)
    (packed,), flags = encode(codec, [page], [16])
    assert flags == [0]
    check_codes(geometry, page, 16, np.zeros(2 * 64, np.float32), unpack(geometry, packed, 3), 3)


def gaussian_values(geometry: Geometry) -> NDArray[np.float64]:
    return np.random.default_rng(0).standard_normal(geometry.shape)


def test_a_zero_page_has_no_gains_and_decodes_to_zero() -> None:
    geometry = Geometry(1, 2, 64, "float16")
    codec = RotatedPages(geometry, np.zeros(0, np.float32), DEVICE)
    (packed,), flags = encode(codec, [np.zeros(geometry.page_bytes, np.uint8)], [16])
    assert flags == [0]
    assert (unpack(geometry, packed, 3).codes == 255).all()
    assert (decode(codec, [packed], [16]) == 0).all()


def test_a_token_far_below_the_others_decodes_to_zero() -> None:
    geometry = Geometry(1, 1, 64, "float32")
    values = gaussian_values(geometry)
    values[:, :, :, 2] *= 2.0**-20  # gains reach down to 2**-15.9 of the largest
    codec = RotatedPages(geometry, np.zeros(0, np.float32), DEVICE)
    (packed,), _ = encode(codec, [exact_page(geometry, values)], [16])
    decoded = decode(codec, [packed], [16])[0]
    assert (decoded[:, :, :, 2] == 0).all() and (decoded[:, :, :, 3] != 0).any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_only_pages_with_nan_or_infinity_in_a_written_token_are_flagged(side: int, bad: float) -> None:
    geometry = Geometry(LAYERS, HEADS, 64, "bfloat16")
    codec = RotatedPages(geometry, np.zeros(0, np.float32), DEVICE)
    values = gaussian_values(geometry)
    good = exact_page(geometry, values)
    values[1, side, 2, 15, 63] = bad
    _, flags = encode(codec, [good, exact_page(geometry, values), exact_page(geometry, values)], [16, 16, 15])
    assert flags == [0, 1, 0]


def test_values_saturate_at_the_end_of_the_page_dtype() -> None:
    geometry = Geometry(1, 1, 64, "float16")
    codec = RotatedPages(geometry, np.zeros(0, np.float32), DEVICE)
    (packed,), _ = encode(codec, [exact_page(geometry, np.full(geometry.shape, 65504.0))], [16])
    packed[:8].view(np.float32)[:] *= 2.0
    assert (decode(codec, [packed], [16]) == 65504.0).all()


def test_offsets_beyond_four_gib_are_reached() -> None:
    geometry = Geometry(1, 1, 16, "float32")
    codec = RotatedPages(geometry, np.zeros(0, np.float32), DEVICE)
    page = torch.from_numpy(gaussian_page(geometry)).to(DEVICE)
    pool = torch.empty(
        5 << 30, dtype=torch.uint8, device=DEVICE
    )  # on the CPU only touched pages become memory
    far = (4 << 30) + 64
    pool[far : far + len(page)] = page
    counts, flags = on_device(np.array([16], np.int32)), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    codec.encode(pool, on_device(np.array([far])), counts, pool, on_device(np.array([far + 8192])), flags)
    codec.decode(pool, on_device(np.array([far + 8192])), counts, pool, on_device(np.array([64])))
    near = pool[64 : 64 + len(page)].view(torch.float32)
    error = ((near - page.view(torch.float32)) ** 2).mean() / (page.view(torch.float32) ** 2).mean()
    assert 0.01 < error < 0.1  # the mean of DISTORTION_8 and DISTORTION_4, in sixteen channels


class TestRefusals:
    def test_shapes_that_kernels_cannot_take(self) -> None:
        nothing = np.zeros(0, np.float32)
        with pytest.raises(ConfigError, match="68"):
            RotatedPages(Geometry(1, 1, 68, "float32"), nothing, DEVICE)
        with pytest.raises(ConfigError, match="power of two, not 64 and 12"):
            RotatedPages(Geometry(1, 1, 64, "float32", 12), nothing, DEVICE)
        with pytest.raises(ConfigError, match="not 4"):
            RotatedPages(Geometry(1, 1, 64, "float32"), nothing, DEVICE, key_bits=4)

    def test_a_state_of_another_geometry(self) -> None:
        with pytest.raises(ConfigError, match="7 floats and this geometry needs 64"):
            RotatedPages(Geometry(1, 1, 64, "float32"), np.zeros(7, np.float32), DEVICE)
