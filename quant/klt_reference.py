"""klt2 in plain torch: the readable form of `klt.py`'s format, which the kernels must match bit for bit.

Sums over channels are taken one channel after the other, because float32 sums depend on their order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from tierkv.geometry import Geometry
from tierkv.quant.contract import Bytes, Floats, NonFiniteValues
from tierkv.quant.klt_layout import GROUP
from tierkv.quant.klt_levels import BOUNDARIES, LEVELS, STEPS
from tierkv.quant.lloyd import GAIN_FLOORS, GAINS, NO_GAIN
from tierkv.quant.rotated_reference import MAX_EXPONENT, pack_bits, read_exact, unpack_bits


class Record(NamedTuple):
    """The state of one layer, side and head."""

    start: int  # byte offset of its block in a packed page
    bits: list[int]  # of each group of channels
    spread: torch.Tensor  # [head_dim]
    mean: torch.Tensor  # [head_dim]
    analysis: torch.Tensor  # [head_dim, head_dim]
    synthesis: torch.Tensor  # [head_dim, head_dim]


def records(geometry: Geometry, state: Floats) -> list[tuple[int, int, int, Record]]:
    """`(layer, side, head, record)` for each."""
    dim, groups = geometry.head_dim, geometry.head_dim // GROUP
    parts = torch.from_numpy(state.copy()).reshape(-1, 1 + 2 * groups + dim + 2 * dim * dim)
    places = [
        (layer, side, head)
        for layer in range(geometry.num_layers)
        for side in range(2)
        for head in range(geometry.num_kv_heads)
    ]
    found = []
    for place, part in zip(places, parts, strict=True):
        start, bits, spread, mean, analysis, synthesis = part.split(
            [1, groups, groups, dim, dim * dim, dim * dim]
        )
        record = Record(
            int(start), [int(b) for b in bits], spread.repeat_interleave(GROUP), mean,
            analysis.reshape(dim, dim), synthesis.reshape(dim, dim),
        )  # fmt: skip
        found.append((*place, record))
    return found


def product(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`rows @ matrix.T`, products added in order."""
    total = torch.zeros(rows.shape[0], matrix.shape[0])
    for channel in range(matrix.shape[1]):
        total = total + matrix[:, channel] * rows[:, channel : channel + 1]
    return total


def _indices(size: torch.Tensor, gain: torch.Tensor, bits: int) -> torch.Tensor:
    """Magnitude indices of `size` `[tokens, channels]` in units of `gain` `[tokens, 1]`."""
    if bits not in STEPS:
        return (size.unsqueeze(-1) > torch.from_numpy(BOUNDARIES[bits]) * gain.unsqueeze(-1)).sum(-1)
    top = torch.tensor(float(len(LEVELS[bits]) - 1))
    place = size * (torch.tensor(1.0) / (torch.tensor(STEPS[bits]) * gain))
    return torch.where(place < top, place, top).long()


def _groups(bits: list[int]) -> list[tuple[int, slice]]:
    """Those that have bits."""
    return [(b, slice(GROUP * i, GROUP * (i + 1))) for i, b in enumerate(bits) if b]


def _gains(u: torch.Tensor, record: Record) -> torch.Tensor:
    """Least-squares gains `[tokens]`."""
    groups, energy = _groups(record.bits), torch.zeros(len(u))
    for _, channels in groups:
        for x in u[:, channels].unbind(-1):
            energy = energy + x * x
    rms = (energy / torch.tensor(float(max(1, GROUP * len(groups))))).sqrt().unsqueeze(-1)
    along, energy = torch.zeros(len(u)), torch.zeros(len(u))
    for bits, channels in groups:
        size = u[:, channels].abs()
        level = torch.from_numpy(LEVELS[bits])[_indices(size, rms, bits)]
        for x, y, cost in zip(size.unbind(-1), level.unbind(-1), record.spread[channels], strict=True):
            along, energy = along + x * y * cost, energy + y * y * cost
    return torch.where(energy > 0, along / energy, 0.0)


def _planes(u: torch.Tensor, gain: torch.Tensor, bits: int) -> torch.Tensor:
    """`[bits, tokens, channels]` of 0 and 1: signs, then the magnitude's bits, the lowest first."""
    live = (gain > 0).unsqueeze(-1)
    index = _indices(u.abs(), torch.where(live, gain.unsqueeze(-1), 1.0), bits)
    planes = [(u < 0).long()] + [index >> bit & 1 for bit in range(bits - 1)]
    return torch.stack([torch.where(live, plane, 0) for plane in planes])


def _bytes(planes: torch.Tensor) -> torch.Tensor:
    """The last axis as bits of bytes."""
    missing = -planes.shape[-1] % 8
    whole = torch.nn.functional.pad(planes, (0, missing))
    return pack_bits(whole.reshape(*whole.shape[:-1], -1, 8), 1)


def encode(geometry: Geometry, exact: Bytes, count: int, state: Floats, size: int) -> Bytes:
    """The packed page of `size` bytes."""
    layers, _, heads, tokens, _ = geometry.shape
    page, out = read_exact(geometry, exact), np.zeros(size, np.uint8)
    tops = torch.zeros(layers, 2, heads)
    for layer, side, head, record in records(geometry, state):
        x = page[layer, side, head, :count] - record.mean
        if not torch.isfinite(x).all():
            raise NonFiniteValues("the page holds NaN, infinity or values at the end of float32's range")
        largest = x.abs().amax()
        exponent = torch.where(largest == 0, -MAX_EXPONENT, largest.frexp().exponent - 1)
        exponent = exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT)
        u = product(record.analysis, torch.ldexp(x, -exponent))
        gain = _gains(u, record)
        top = gain.amax()
        codes = (torch.from_numpy(GAIN_FLOORS) > (gain / top).unsqueeze(-1)).sum(-1)
        codes = torch.where(top > 0, codes, NO_GAIN)
        gain = top * torch.from_numpy(GAINS)[codes]
        tops[layer, side, head] = torch.ldexp(top, exponent).clamp(max=torch.finfo(torch.float32).max)
        parts = [codes.to(torch.uint8).new_zeros(tokens)]
        parts[0][:count] = codes
        by_group = []
        for bits, channels in _groups(record.bits):
            planes = torch.zeros(bits, tokens, GROUP, dtype=torch.long)
            planes[:, :count] = _planes(u[:, channels], gain, bits)
            by_group.append(planes)
        if side == 0:  # channel by channel, each plane over tokens
            parts += [_bytes(planes.permute(2, 0, 1)).flatten() for planes in by_group]
        elif by_group:  # token by token, each plane over a group's channels
            parts.append(
                torch.cat([_bytes(planes.permute(1, 0, 2)).flatten(1) for planes in by_group], 1).flatten()
            )
        block = torch.cat(parts).numpy()
        out[record.start : record.start + len(block)] = block
    out[: 4 * tops.numel()] = tops.numpy().ravel().view(np.uint8)
    return out


def decode(geometry: Geometry, packed: Bytes, count: int, state: Floats) -> Floats:
    """`[layers, 2, heads, page_tokens, head_dim]` float32 within the range of the page dtype."""
    layers, _, heads, tokens, dim = geometry.shape
    data, exact = torch.from_numpy(packed.copy()), torch.zeros(geometry.shape)
    tops = data[: 8 * layers * heads].view(torch.float32).reshape(layers, 2, heads)
    for layer, side, head, record in records(geometry, state):
        gain = tops[layer, side, head] * torch.from_numpy(GAINS)[data[record.start :][:tokens].long()]
        rest = data[record.start + tokens :]
        levels, width = torch.zeros(tokens, dim), -(-tokens // 8)
        token_bytes, before = 2 * sum(record.bits), 0
        for bits, channels in _groups(record.bits):
            if side == 0:
                planes = rest[before : before + GROUP * bits * width].reshape(GROUP, bits, width)
                planes = unpack_bits(planes, 1).flatten(2)[..., :tokens].permute(1, 2, 0)
                before += GROUP * bits * width
            else:
                planes = rest[: tokens * token_bytes].reshape(tokens, token_bytes)[
                    :, before : before + 2 * bits
                ]
                planes = unpack_bits(planes.reshape(tokens, bits, 2), 1).flatten(2).permute(1, 0, 2)
                before += 2 * bits
            index = sum((plane << bit for bit, plane in enumerate(planes[1:])), torch.zeros_like(planes[0]))
            levels[:, channels] = torch.from_numpy(LEVELS[bits])[index] * (1 - 2 * planes[0])
        exact[layer, side, head] = product(record.synthesis, levels) * gain.unsqueeze(-1) + record.mean
    limit = torch.finfo(getattr(torch, geometry.dtype)).max
    exact = exact.clamp(-limit, limit)
    exact[:, :, :, count:] = 0
    return exact.numpy()
