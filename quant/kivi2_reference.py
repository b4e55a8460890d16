"""kivi2 in plain torch: the readable form of `kivi2.py`'s format, which the kernels must match bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from tierkv.geometry import Geometry
from tierkv.quant.blocks import block_count
from tierkv.quant.contract import Bytes, Floats, NonFiniteValues
from tierkv.quant.dynamic_map import dequantize, quantize
from tierkv.quant.kivi2_kernels import CHANNELS, RANGE, group_count
from tierkv.quant.rotated_reference import pack_bits, read_exact, unpack_bits


def _measure(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero of each group along `axis`."""
    low, high = x.amin(axis), x.amax(axis)
    if ((high - low) >= RANGE).any():
        raise NonFiniteValues("a group reaches the end of float32's range")
    return high / 3 - low / 3, low


def _store(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """8-bit codes, block magnitudes, and the numbers as stored."""
    codes, largest = quantize(numbers.numpy())
    return torch.from_numpy(codes), torch.from_numpy(largest), torch.from_numpy(dequantize(codes, largest))


def _code(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    steps = (x - zero) / scale
    code = sum((steps > bound).long() for bound in (0.5, 1.5, 2.5))
    return torch.where(scale > 0, torch.as_tensor(code), 0)


def _by_channel(numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """Numbers of value groups (last axis), repeated for each of their `dim` channels."""
    return numbers.repeat_interleave(CHANNELS, -1)[..., :dim]


def encode(geometry: Geometry, exact: Bytes, count: int) -> Bytes:
    """The packed page."""
    layers, _, heads, tokens, dim = geometry.shape
    groups = group_count(dim)
    written = read_exact(geometry, exact)[:, :, :, :count]
    if not torch.isfinite(written).all():
        raise NonFiniteValues("the page holds NaN or infinity")
    keys, values = written[:, 0], written[:, 1]

    key_scale, key_zero = _measure(keys, -2)
    value_scale, value_zero = (torch.zeros(layers, heads, tokens, groups) for _ in range(2))
    for group, part in enumerate(torch.split(values, CHANNELS, -1)):
        value_scale[:, :, :count, group], value_zero[:, :, :count, group] = _measure(part, -1)
    parts = [_store(numbers) for numbers in (key_scale, key_zero, value_scale, value_zero)]
    codes, largest, stored = zip(*parts, strict=True)
    for part in codes[2:]:
        part[:, :, count:] = 0

    key_codes = torch.zeros(layers, heads, tokens, dim, dtype=torch.long)
    key_codes[:, :, :count] = _code(keys, stored[0].unsqueeze(-2), stored[1].unsqueeze(-2))
    padded = -(-tokens // 4) * 4
    value_codes = torch.zeros(layers, heads, padded, dim, dtype=torch.long)
    scale, zero = (_by_channel(part[:, :, :count], dim) for part in stored[2:])
    value_codes[:, :, :count] = _code(values, scale, zero)

    by_channel = key_codes.transpose(-1, -2).reshape(layers, heads, dim // 4, 4, tokens).transpose(-1, -2)
    key_plane = pack_bits(by_channel, 2)  # [layers, heads, dim/4, tokens]
    value_plane = pack_bits(value_codes.reshape(layers, heads, padded // 4, 4, dim).transpose(-1, -2), 2)
    key_blocks = torch.cat((codes[0], codes[1], key_plane.flatten(2)), -1).flatten(1)
    value_blocks = torch.cat([part.flatten(2) for part in (codes[2], codes[3], value_plane)], -1).flatten(1)
    header = torch.cat(largest).view(torch.uint8)
    return torch.cat((header, torch.cat((key_blocks, value_blocks), 1).flatten())).numpy()


def decode(geometry: Geometry, packed: Bytes, count: int) -> Floats:
    """`[layers, 2, heads, page_tokens, head_dim]` float32 within the range of the page dtype."""
    layers, _, heads, tokens, dim = geometry.shape
    groups = group_count(dim)
    padded = -(-tokens // 4) * 4
    sizes = [layers * heads * dim] * 2 + [layers * heads * tokens * groups] * 2
    blocks = [block_count(size) for size in sizes]
    header = 4 * sum(blocks)
    largest = np.split(packed[:header].view(np.float32), np.cumsum(blocks)[:-1])
    body = torch.from_numpy(packed[header:].copy()).reshape(layers, -1)
    key_bytes = 2 * dim + tokens * dim // 4
    key_blocks = body[:, : heads * key_bytes].reshape(layers, heads, key_bytes)
    value_blocks = body[:, heads * key_bytes :].reshape(layers, heads, -1)

    plane = key_blocks[..., 2 * dim :].reshape(layers, heads, dim // 4, tokens)
    codes = unpack_bits(plane, 2).transpose(-1, -2).reshape(layers, heads, dim, tokens).transpose(-1, -2)
    scale, zero = (
        torch.from_numpy(dequantize(part.contiguous().numpy(), top))
        for part, top in zip(
            (key_blocks[..., :dim], key_blocks[..., dim : 2 * dim]), largest[:2], strict=True
        )
    )
    keys = zero.unsqueeze(-2) + scale.unsqueeze(-2) * codes

    size = tokens * groups
    plane = value_blocks[..., 2 * size :].reshape(layers, heads, padded // 4, dim)
    codes = unpack_bits(plane, 2).transpose(-1, -2).reshape(layers, heads, padded, dim)
    scale, zero = (
        _by_channel(
            torch.from_numpy(dequantize(part.contiguous().numpy(), top)).reshape(
                layers, heads, tokens, groups
            ),
            dim,
        )
        for part, top in zip(
            (value_blocks[..., :size], value_blocks[..., size : 2 * size]), largest[2:], strict=True
        )
    )
    values = zero + scale * codes[:, :, :tokens]

    limit = torch.finfo(getattr(torch, geometry.dtype)).max
    exact = torch.stack((keys, values), 1).clamp(-limit, limit)
    exact[:, :, :, count:] = 0
    return exact.numpy()
