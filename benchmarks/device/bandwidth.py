"""Bytes a second of encode, decode and attention, beside a device copy of the same device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from tierkv.attention.triton_decode import DevicePages, decode, plan_pages
from tierkv.benchmarks.device.kernels import make_batch, pages_of
from tierkv.benchmarks.device.machine import Machine
from tierkv.benchmarks.device.table import Row
from tierkv.quant.klt_triton import KltPages
from tierkv.quant.rotated_triton import RotatedPages
from tierkv.table import Kind

CODECS = ("k3v2", "klt2")


def run(machine: Machine) -> Iterator[Row]:
    copy = copied(machine)
    yield Row("device copy, read and written", f"{copy / 1e9:.0f} GB/s")
    for name in CODECS:
        for tokens in machine.sizes.lengths:
            yield from measure(machine, tokens, name, copy)
            if machine.device.type == "cuda":
                torch.cuda.empty_cache()


def copied(machine: Machine) -> float:
    """Bytes read and written a second by a device copy."""
    source = torch.empty(machine.sizes.copied, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * len(source) / machine.seconds(lambda: target.copy_(source))


def measure(machine: Machine, tokens: int, name: str, copy: float) -> Iterator[Row]:
    """Encode, decode and attention of `tokens` tokens, full pages in shuffled places."""
    geometry, device = machine.sizes.geometry, machine.device
    pages = tokens // geometry.page_tokens
    batch = make_batch(geometry, pages, name, device, full=True)
    codec, pool = batch.codec, batch.pool
    exact_bytes, packed_bytes = pages * geometry.page_bytes, pages * codec.page_bytes

    def row(step: str, moved: float, took: float) -> Row:
        layer = took / geometry.num_layers * 1e6
        return Row(
            f"{name} {tokens:,} tokens, {step}",
            f"{layer:9.1f} us a layer  {moved / took / 1e9:7.0f} GB/s  {moved / took / copy:5.0%} of a copy",
        )

    encode = partial(codec.encode, pool, batch.exact, batch.counts, pool, batch.packed, batch.flags)
    yield row("encode", exact_bytes + packed_bytes, machine.seconds(encode))
    unpack = partial(codec.decode, pool, batch.packed, batch.counts, pool, batch.decoded)
    yield row("decode", exact_bytes + packed_bytes, machine.seconds(unpack))
    heads, dtype = geometry.num_kv_heads * machine.sizes.share, getattr(torch, geometry.dtype)
    query = torch.randn(1, heads, geometry.head_dim, device=device, dtype=dtype)
    mass = torch.zeros(pages, device=device)
    kinds = {
        "all exact": np.full(pages, Kind.EXACT, np.int8),
        "none exact": np.full(pages, Kind.QUANTIZED, np.int8),
        "10% exact": np.where(np.arange(pages) % 10 == 0, Kind.EXACT, Kind.QUANTIZED).astype(np.int8),
    }
    for share, form in kinds.items():
        plan = plan_pages(pages_of(batch, form), geometry.num_kv_heads, device)
        exact_share = float((form == Kind.EXACT).mean())
        moved = exact_bytes * exact_share + packed_bytes * (1 - exact_share)
        for suffix, page_mass in (("", None), (" with masses", mass)):
            step = partial(attend_layers, query, pool, plan, codec, page_mass)
            yield row(f"attend, {share}{suffix}", moved, machine.seconds(step))


def attend_layers(
    query: torch.Tensor, pool: torch.Tensor, plan: DevicePages, codec: RotatedPages | KltPages,
    mass: torch.Tensor | None,
) -> None:  # fmt: skip
    for layer in range(codec.geometry.num_layers):
        decode(query, pool, plan, codec, layer, codec.geometry.head_dim**-0.5, mass)
