"""int8 and nf4 in plain torch, head by head: bitsandbytes' own calls, and levels times scales back."""

from __future__ import annotations

import numpy as np
import torch

from tierkv.geometry import Geometry
from tierkv.quant.blocks import BLOCK, SMALLEST, bitsandbytes, block_count
from tierkv.quant.contract import Bytes, Floats, NonFiniteValues
from tierkv.quant.dynamic_map import DYNAMIC_MAP
from tierkv.quant.normal_float import NORMAL_FLOAT_MAP
from tierkv.quant.rotated_reference import read_exact


def _pack(run: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and block magnitudes of a run of values, a multiple of 64."""
    blocks = run.reshape(-1, BLOCK)
    subnormal = blocks.abs().amax(-1, keepdim=True) < float(SMALLEST)
    run = blocks.masked_fill(subnormal, 0.0).flatten()
    if bits == 8:
        levels = torch.from_numpy(DYNAMIC_MAP)
        packed, state = bitsandbytes().quantize_blockwise(run, code=levels, blocksize=BLOCK)
    else:
        packed, state = bitsandbytes().quantize_4bit(run, blocksize=BLOCK, quant_type="nf4")
    return packed.flatten(), state.absmax


def encode(geometry: Geometry, exact: Bytes, count: int, bits: int) -> Bytes:
    """The packed page."""
    layers, sides, heads, tokens, dim = geometry.shape
    written = read_exact(geometry, exact)[:, :, :, :count]
    if not torch.isfinite(written).all():
        raise NonFiniteValues("the page holds NaN or infinity")
    runs = torch.zeros(layers * sides * heads, block_count(tokens * dim) * BLOCK)
    runs[:, : count * dim] = written.reshape(len(runs), -1)
    codes, largest = zip(*(_pack(run, bits) for run in runs), strict=True)
    body = torch.stack(codes)[:, : tokens * dim * bits // 8].clone()
    body[:, count * dim * bits // 8 :] = 0
    return torch.cat((torch.cat(largest).view(torch.uint8), body.flatten())).numpy()


def decode(geometry: Geometry, packed: Bytes, count: int, bits: int) -> Floats:
    """`[layers, 2, heads, page_tokens, head_dim]` float32 within the range of the page dtype."""
    layers, sides, heads, tokens, dim = geometry.shape
    planes, blocks = layers * sides * heads, block_count(tokens * dim)
    data = torch.from_numpy(packed.copy())
    largest = data[: 4 * planes * blocks].view(torch.float32).reshape(planes, blocks)
    codes = data[4 * planes * blocks :].reshape(planes, -1).long()
    if bits == 8:
        values = torch.from_numpy(DYNAMIC_MAP)[codes]
    else:
        values = torch.from_numpy(NORMAL_FLOAT_MAP)[torch.stack((codes >> 4, codes & 15), -1).flatten(1)]
    values = values * largest.repeat_interleave(BLOCK, 1)[:, : tokens * dim]
    values = values.reshape(geometry.shape)
    values[:, :, :, count:] = 0
    found: Floats = values.numpy().astype(np.float32)
    return found
