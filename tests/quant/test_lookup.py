"""Kernels for machines without AVX-512 look levels up by comparing bits: they give the same."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tierkv.quant import tiles

CODE = """
import numba
import numpy as np
from tierkv.quant.tiles import PERMUTES, unpack_levels_4, unpack_levels_8

@numba.njit
def unpack(data, four, eight):
    unpack_levels_4(data, 0, four, 0, 1)
    unpack_levels_8(data, 0, 16, 32, eight)

four, eight = np.zeros(64, np.float32), np.zeros(128, np.float32)
unpack(np.random.default_rng(0).integers(0, 256, 48).astype(np.uint8), four, eight)
print(PERMUTES, four.tobytes().hex(), eight.tobytes().hex())
"""


def unpacked(**environment: str) -> tuple[str, ...]:
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=os.environ | environment, capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    return tuple(done.stdout.split())


@pytest.mark.skipif(not tiles.PERMUTES, reason="this machine has no AVX-512")
def test_both_ways_give_the_same_levels(tmp_path: object) -> None:
    own, plain = unpacked(), unpacked(NUMBA_CPU_NAME="generic", NUMBA_CACHE_DIR=str(tmp_path))
    assert (own[0], plain[0]) == ("True", "False")
    assert own[1:] == plain[1:] and len(own[1]) == 2 * 4 * 64
