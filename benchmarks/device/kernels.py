"""Are the device's kernels right, beside the references on the CPU?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.attention.contract import Pages, PoolView
from tierkv.attention.reference import ReferenceAttention
from tierkv.attention.triton_decode import decode, plan_pages
from tierkv.benchmarks.device.table import Row
from tierkv.geometry import DTypeName, Geometry
from tierkv.quant import get
from tierkv.quant.klt_triton import KltPages
from tierkv.quant.moments import Moments
from tierkv.quant.on_device import device_pages
from tierkv.quant.rotated_triton import RotatedPages
from tierkv.table import Kind

if TYPE_CHECKING:
    from tierkv.benchmarks.device.machine import Machine

CHECKED_PAGES = 12

LIMITS = {"flags": 0.0, "bytes": 0.002, "decode": 0.0, "out": 2e-2, "lse": 2e-2, "mass": 2e-3}
"""Pages flagged, share of bytes unlike the reference's, excess over a rounding step, and largest differences."""


class Case(NamedTuple):
    dtype: DTypeName
    head_dim: int
    codec: str
    share: int  # query heads of a KV head


class Batch(NamedTuple):
    """Random pages in one pool: exact, packed, and room to decode, each a run of frames."""

    name: str  # of the codec, and its state
    state: NDArray[np.float32]
    codec: RotatedPages | KltPages
    pool: torch.Tensor
    exact: torch.Tensor  # [pages] int64 offsets
    packed: torch.Tensor
    decoded: torch.Tensor
    counts: torch.Tensor
    flags: torch.Tensor


@cache
def random_state(name: str, geometry: Geometry) -> NDArray[np.float32]:
    """Any state of a codec; klt2's is of channels whose variances fall by a factor of a thousand."""
    codec, rng, dim = get(name), np.random.default_rng(1), geometry.head_dim
    if not codec.takes_moments:
        return rng.standard_normal(codec.state_floats(geometry), np.float32)
    shape = (geometry.num_layers, geometry.num_kv_heads)

    def second() -> NDArray[np.float32]:
        axes = np.linalg.qr(rng.standard_normal((*shape, dim, dim)))[0]
        matrices: NDArray[np.float64] = (axes * np.logspace(0, -3, dim)) @ axes.swapaxes(-1, -2)
        return matrices.astype(np.float32)

    mean = rng.standard_normal((*shape, dim), np.float32)
    return codec.fit_moments(geometry, Moments(mean, *(second() for _ in Moments._fields[1:])))


def make_batch(geometry: Geometry, pages: int, name: str, device: torch.device, full: bool) -> Batch:
    """Pages in shuffled places; all of them full, or filled by chance."""
    generator = torch.Generator(device).manual_seed(pages)
    dtype = getattr(torch, geometry.dtype)
    values = torch.randn(pages * geometry.values, generator=generator, device=device, dtype=dtype)
    state = random_state(name, geometry)
    codec = device_pages(name, geometry, state, device)
    packed_frame = -(-codec.page_bytes // 64) * 64
    exact_bytes = values.numel() * geometry.item_bytes
    pool = torch.cat(
        [
            values.view(torch.uint8),
            torch.zeros(pages * packed_frame + exact_bytes, dtype=torch.uint8, device=device),
        ]
    )
    at = torch.randperm(pages, generator=generator, device=device)
    counts = torch.randint(
        1, geometry.page_tokens + 1, (pages,), generator=generator, device=device, dtype=torch.int32
    )
    if full:
        counts.fill_(geometry.page_tokens)
    packed = exact_bytes + at * packed_frame
    decoded = exact_bytes + pages * packed_frame + at * geometry.page_bytes
    flags = torch.zeros(pages, dtype=torch.int32, device=device)
    return Batch(name, state, codec, pool, at * geometry.page_bytes, packed, decoded, counts, flags)


def pages_of(batch: Batch, kinds: NDArray[np.int8]) -> Pages:
    """One row of the batch's pages, each exact or packed."""
    exact, packed, counts = (tensor.cpu().numpy() for tensor in (batch.exact, batch.packed, batch.counts))
    starts = np.cumsum(counts, dtype=np.int64) - counts
    offsets = np.where(kinds == Kind.EXACT, exact, packed)
    row = np.array([0, len(counts)], np.int64)
    return Pages(offsets, kinds, counts, starts, row, int(counts.sum()))


def check(case: Case, device: torch.device) -> Row:
    """Encode, decode and attend a few partly filled pages, beside the references on the CPU."""
    dtype, head_dim, name, share = case
    geometry = Geometry(2, 3, head_dim, dtype)
    batch = make_batch(geometry, CHECKED_PAGES, name, device, full=False)
    codec, pool = batch.codec, batch.pool
    codec.encode(pool, batch.exact, batch.counts, pool, batch.packed, batch.flags)
    codec.decode(pool, batch.packed, batch.counts, pool, batch.decoded)
    found = {"flags": float(batch.flags.sum())} | compare_codec(batch)
    kinds = np.where(np.arange(CHECKED_PAGES) % 3 == 0, Kind.EXACT, Kind.QUANTIZED).astype(np.int8)
    found |= compare_attention(batch, kinds, share)
    good = all(value <= LIMITS[key] for key, value in found.items())  # NaN is not good
    figures = ", ".join(f"{key} {value:.2g}" for key, value in found.items())
    return Row(f"{name} {dtype} head_dim {head_dim}, {share} queries a head", figures, good)


def compare_codec(batch: Batch) -> dict[str, float]:
    """Packed and decoded pages beside the CPU codec's references."""
    geometry, codec, reference = batch.codec.geometry, batch.codec, get(batch.name)
    data, state = batch.pool.cpu().numpy(), batch.state
    header = 8 * geometry.num_layers * geometry.num_kv_heads
    differing, excess = 0.0, -1.0
    for exact, packed, decoded, count in zip(
        batch.exact.tolist(), batch.packed.tolist(), batch.decoded.tolist(), batch.counts.tolist(), strict=True
    ):  # fmt: skip
        mine = data[packed : packed + codec.page_bytes]
        page = data[exact : exact + geometry.page_bytes]
        theirs = reference.reference_encode(geometry, page, count, state)
        differing = max(differing, float((mine[header:] != theirs[header:]).mean()))
        wanted = torch.from_numpy(reference.reference_decode(geometry, mine, count, state))
        got = torch.from_numpy(data[decoded : decoded + geometry.page_bytes].copy()).view(codec.dtype)
        error = (got.reshape(geometry.shape).float() - wanted).abs()
        rounding = 4e-6 * max(1.0, float(wanted.abs().max()))
        excess = max(excess, float((error - torch.finfo(codec.dtype).eps * wanted.abs() - rounding).max()))
    return {"bytes": differing, "decode": excess}


def compare_attention(batch: Batch, kinds: NDArray[np.int8], share: int) -> dict[str, float]:
    """Attention over mixed pages beside the float64 reference, over what the packed ones decode to."""
    geometry, device = batch.codec.geometry, batch.pool.device
    pages = pages_of(batch, kinds)
    offsets = np.where(kinds == Kind.EXACT, batch.exact.cpu().numpy(), batch.decoded.cpu().numpy())
    as_exact = pages._replace(offsets=offsets, kinds=np.full_like(kinds, Kind.EXACT))
    view = PoolView(batch.pool.cpu().numpy(), geometry, get(batch.name), batch.state)
    heads, scale = geometry.num_kv_heads, geometry.head_dim**-0.5
    query = torch.randn(1, heads * share, geometry.head_dim, device=device).to(batch.codec.dtype)
    mass, expected_mass = torch.zeros(len(kinds), device=device), np.zeros(len(kinds), np.float32)
    plan = plan_pages(pages, heads, device)
    got = decode(query, batch.pool, plan, batch.codec, 1, scale, mass)
    expected = ReferenceAttention().decode(query.float().cpu(), view, as_exact, 1, scale, expected_mass)
    return {
        "out": float((got.out.cpu() - expected.out).abs().max()),
        "lse": float((got.log_sum_exp.cpu() - expected.log_sum_exp).abs().max()),
        "mass": float(np.abs(mass.cpu().numpy() - expected_mass).max()),
    }


CASES: tuple[Case, ...] = (
    Case("float32", 64, "k3v2", 1), Case("float16", 64, "k3v2", 3), Case("bfloat16", 80, "k3v2", 3),
    Case("bfloat16", 96, "k3v2", 4), Case("bfloat16", 128, "k3v2", 4), Case("bfloat16", 256, "k3v2", 1),
    Case("bfloat16", 64, "rotated2", 3), Case("bfloat16", 128, "rotated2", 20),
    Case("float32", 64, "klt2", 1), Case("float16", 64, "klt2", 3), Case("bfloat16", 80, "klt2", 3),
    Case("bfloat16", 96, "klt2", 4), Case("bfloat16", 128, "klt2", 20), Case("bfloat16", 256, "klt2", 1),
)  # fmt: skip


def run(machine: Machine, codecs: tuple[str, ...]) -> Iterator[Row]:
    """Every case of these codecs."""
    for case in machine.sizes.kernel_cases:
        if case.codec in codecs:
            yield check(case, machine.device)
