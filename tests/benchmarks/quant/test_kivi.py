"""KIVI-G32, by hand."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.quant.through import kept
from tierkv.benchmarks.quant.peers import Kivi, pack, unpack


def test_a_group_takes_its_minimum_a_third_of_its_range_and_the_nearest_step() -> None:
    packed = pack(torch.tensor([[5.0, 5.4, 6.6, 8.0]]), -1)
    assert (packed.zero.item(), packed.scale.item()) == (5.0, 1.0)
    assert packed.codes.tolist() == [[0 | 0 << 2 | 2 << 4 | 3 << 6]]
    assert unpack(packed).tolist() == [[5.0, 5.0, 7.0, 8.0]]


def test_a_group_without_range_comes_back_as_its_value() -> None:
    assert unpack(pack(torch.full((1, 4), -2.5), -1)).tolist() == [[-2.5] * 4]


def test_scale_and_zero_are_rounded_to_float16_and_codes_are_taken_for_those() -> None:
    packed = pack(torch.tensor([[2049.0, 2049.0, 2050.0, 2061.0]]), -1)
    assert packed.zero.item() == 2048.0  # float16 counts in twos there, ties to even
    assert packed.scale.item() == 4.0  # (2061 - 2049) / 3
    assert unpack(packed).tolist() == [[2048.0, 2048.0, 2048.0, 2060.0]]  # steps .25, .25, .5 (to even), 3.25


def test_kivis_keys_are_grouped_over_32_tokens_and_values_over_32_channels() -> None:
    token, channel = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    # four levels in a channel and others after 32 tokens; of values the same the other way round
    keys = 8 * channel + token % 4 + 512 * (token // 32)
    values = 8 * token + channel % 4 + 512 * (channel // 32)
    kv = torch.stack((keys, values))[None, :, None]
    held = Kivi(kv)
    assert torch.equal(kept(held), kv)
    assert held.bits_per_value == 2 + (16 + 16) / 32
    swapped = Kivi(kv.flip(1))
    assert (kept(swapped) - kv.flip(1)).abs().max() > 30  # half a step of 8 * 31 / 3


def test_kivi_refuses_tokens_that_are_no_whole_groups() -> None:
    with pytest.raises(ValueError, match="48 tokens"):
        Kivi(torch.zeros(1, 2, 1, 48, 32))
