"""The rotated family in plain torch: the readable form of its format, which the kernels match bit for bit.

Sums over channels are taken one channel after the other (`_sum_channels`), because float32 sums depend on their order.
"""

from __future__ import annotations

import numpy as np
import torch

from tierkv.geometry import Geometry
from tierkv.quant.contract import Bytes, Floats, NonFiniteValues
from tierkv.quant.lloyd import BOUNDARIES_4, BOUNDARIES_8, GAIN_FLOORS, GAINS, LEVELS_4, LEVELS_8, NO_GAIN
from tierkv.quant.rotation import block_sizes
from tierkv.quant.rotation import signs as channel_signs

MAX_EXPONENT = 126

KEY_TABLES = {3: (LEVELS_8, BOUNDARIES_8), 2: (LEVELS_4, BOUNDARIES_4)}
"""Levels and boundaries by the bits of a key."""


def read_exact(geometry: Geometry, exact: Bytes) -> torch.Tensor:
    """An exact page as float32 `[layers, 2, heads, page_tokens, head_dim]`."""
    dtype = getattr(torch, geometry.dtype)
    return torch.from_numpy(exact[: geometry.page_bytes].copy()).view(dtype).reshape(geometry.shape).float()


def rotate(x: torch.Tensor) -> torch.Tensor:
    """H diag(signs) x over the last axis."""
    return hadamard(x * torch.from_numpy(channel_signs(x.shape[-1])))


def unrotate(x: torch.Tensor) -> torch.Tensor:
    return hadamard(x) * torch.from_numpy(channel_signs(x.shape[-1]))


def hadamard(x: torch.Tensor) -> torch.Tensor:
    blocks = []
    for block in torch.split(x, block_sizes(x.shape[-1]), dim=-1):
        size, stride = block.shape[-1], 1
        while stride < size:
            pairs = block.reshape(*x.shape[:-1], size // (2 * stride), 2, stride)
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            block = torch.stack((a + b, a - b), dim=-2).reshape(*x.shape[:-1], size)
            stride *= 2
        blocks.append(block * torch.tensor(1.0 / np.sqrt(size), dtype=torch.float32))
    return torch.cat(blocks, dim=-1)


def _sum_channels(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(x.shape[:-1])
    for channel in x.unbind(-1):
        total = total + channel
    return total


def _magnitudes(x: torch.Tensor, gain: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
    return (x.abs().unsqueeze(-1) > boundaries * gain[..., None, None]).sum(-1)


def _encode_side(x: torch.Tensor, levels: Floats, boundaries: Floats) -> tuple[torch.Tensor, ...]:
    """Largest gains `[layers, heads]`, gain codes `[..., tokens]`, magnitudes and signs `[..., tokens, head_dim]`."""
    level, boundary = torch.from_numpy(levels), torch.from_numpy(boundaries)
    exponent = x.abs().amax((-1, -2)).frexp().exponent - 1
    exponent = torch.where(x.abs().amax((-1, -2)) == 0, -MAX_EXPONENT, exponent).clamp(
        -MAX_EXPONENT, MAX_EXPONENT
    )
    x = rotate(torch.ldexp(x, -exponent[..., None, None]))
    gain = (_sum_channels(x * x) / torch.tensor(float(x.shape[-1]))).sqrt()
    chosen = level[_magnitudes(x, gain, boundary)]
    gain = _sum_channels(x.abs() * chosen) / _sum_channels(chosen * chosen)
    top = gain.amax(-1)
    fraction = gain / top.unsqueeze(-1)
    codes = (torch.from_numpy(GAIN_FLOORS) > fraction.unsqueeze(-1)).sum(-1)
    codes = torch.where(top.unsqueeze(-1) > 0, codes, NO_GAIN)
    gain = top.unsqueeze(-1) * torch.from_numpy(GAINS)[codes]
    live = (gain > 0).unsqueeze(-1)
    index = torch.where(live, _magnitudes(x, gain, boundary), 0)
    negative = torch.where(live, (x < 0).long(), 0)
    largest = torch.finfo(torch.float32).max
    return torch.ldexp(top, exponent).clamp(max=largest), codes, index, negative


def pack_bits(parts: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes from small integers along the last axis, low bits first."""
    shifts = bits * torch.arange(parts.shape[-1])
    return (parts << shifts).sum(-1).to(torch.uint8)


def _plane(codes: torch.Tensor, tokens: int, bits: int) -> torch.Tensor:
    """Bytes `[layers, heads, dim * bits / 8 * tokens]`, tokens next to each other, of codes `[.., count, dim]`."""
    layers, heads, count, dim = codes.shape
    each = 8 // bits
    plane = torch.zeros(layers, heads, dim // each, tokens, dtype=torch.uint8)
    by_channel = codes.transpose(-1, -2).reshape(layers, heads, dim // each, each, count)
    plane[..., :count] = pack_bits(by_channel.transpose(-1, -2), bits)
    return plane.flatten(2)


def encode(geometry: Geometry, exact: Bytes, count: int, mean: Floats, key_bits: int) -> Bytes:
    """The packed page; `mean` is `[layers, heads, head_dim]`."""
    layers, _, heads, tokens, dim = geometry.shape
    written = read_exact(geometry, exact)[:, :, :, :count]
    keys = written[:, 0] - torch.from_numpy(mean)[:, :, None, :]
    values = written[:, 1]
    if not (torch.isfinite(keys).all() and torch.isfinite(values).all()):
        raise NonFiniteValues("the page holds NaN, infinity or values at the end of float32's range")
    key_top, key_gain, key_index, key_negative = _encode_side(keys, *KEY_TABLES[key_bits])
    value_top, value_gain, value_index, value_negative = _encode_side(values, LEVELS_4, BOUNDARIES_4)

    gains = torch.zeros(2, layers, heads, tokens, dtype=torch.uint8)
    gains[0, ..., :count], gains[1, ..., :count] = key_gain, value_gain
    if key_bits == 3:
        planes = [_plane(key_index, tokens, 2), _plane(key_negative, tokens, 1)]
    else:
        planes = [_plane(key_index + 2 * key_negative, tokens, 2)]
    codes = torch.zeros(layers, heads, tokens, dim // 4, dtype=torch.uint8)
    quarters = (value_index + 2 * value_negative).reshape(layers, heads, count, 4, dim // 4)
    codes[:, :, :count] = pack_bits(quarters.transpose(-1, -2), 2)

    key_blocks = torch.cat((gains[0], *planes), -1).flatten(1)
    value_blocks = torch.cat((gains[1], codes.flatten(2)), -1).flatten(1)
    header = torch.stack((key_top, value_top), 1).contiguous().view(torch.uint8).flatten()
    body = torch.cat((key_blocks, value_blocks), 1).flatten()
    return torch.cat((header, body)).numpy()


def unpack_bits(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Small integers of each byte on a new last axis."""
    shifts = bits * torch.arange(8 // bits)
    return packed.long().unsqueeze(-1) >> shifts & (1 << bits) - 1


def _from_plane(plane: torch.Tensor, tokens: int, bits: int) -> torch.Tensor:
    """Codes `[layers, heads, tokens, dim]`."""
    layers, heads, size = plane.shape
    codes = unpack_bits(plane.reshape(layers, heads, size // tokens, tokens), bits).transpose(-1, -2)
    return codes.reshape(layers, heads, -1, tokens).transpose(-1, -2)


def _two_bit_levels(codes: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(LEVELS_4)[codes & 1] * (1 - 2 * (codes >> 1))


def decode(geometry: Geometry, packed: Bytes, count: int, mean: Floats, key_bits: int) -> Floats:
    """`[layers, 2, heads, page_tokens, head_dim]` float32 within the range of the page dtype."""
    layers, _, heads, tokens, dim = geometry.shape
    data = torch.from_numpy(packed.copy())
    header = 4 * layers * 2 * heads
    tops = data[:header].view(torch.float32).reshape(layers, 2, heads)
    body = data[header:].reshape(layers, -1)
    key_bytes = tokens + tokens * dim * key_bits // 8
    key_blocks = body[:, : heads * key_bytes].reshape(layers, heads, key_bytes)
    value_blocks = body[:, heads * key_bytes :].reshape(layers, heads, -1)
    gain_codes = torch.stack((key_blocks[..., :tokens], value_blocks[..., :tokens]), 1).long()
    gains = tops.unsqueeze(-1) * torch.from_numpy(GAINS)[gain_codes]

    planes = key_blocks[..., tokens:]
    if key_bits == 3:
        magnitudes, signs = torch.split(planes, [tokens * dim // 4, tokens * dim // 8], dim=-1)
        keys = torch.from_numpy(LEVELS_8)[_from_plane(magnitudes, tokens, 2)]
        keys = keys * (1 - 2 * _from_plane(signs, tokens, 1))
    else:
        keys = _two_bit_levels(_from_plane(planes, tokens, 2))
    codes = unpack_bits(value_blocks[..., tokens:].reshape(layers, heads, tokens, dim // 4), 2)
    values = _two_bit_levels(codes.transpose(-1, -2).reshape(layers, heads, tokens, dim))

    levels = torch.stack((keys, values), 1)
    exact = unrotate(levels) * gains.unsqueeze(-1)
    exact[:, 0] += torch.from_numpy(mean)[:, :, None, :]
    limit = torch.finfo(getattr(torch, geometry.dtype)).max
    exact = exact.clamp(-limit, limit)
    exact[:, :, :, count:] = 0
    return exact.numpy()
