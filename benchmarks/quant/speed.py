"""How fast a form packs and unpacks, on one thread, beside a memcpy of the same exact bytes.

Clocks count this process's CPU time, so that other work of the machine, or a thread too many, changes little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numba
import numpy as np
import torch

from tierkv.benchmarks.pairs import Figures, interleave
from tierkv.benchmarks.quant.forms import Form
from tierkv.benchmarks.quant.pages import TORCH
from tierkv.geometry import Geometry
from tierkv.numba_setup import ensure_threading_layer

EIGHT_B = Geometry(1, 8, 128, "bfloat16")
"""One layer of a Llama-3-8B-like model."""

WINDOW_BYTES = 24 << 20
"""Packed by a sample: beyond a core's own caches."""

SECONDS = 4.0
"""What the samples of one figure may take."""

LEAST_PAIRS, MOST_PAIRS = 3, 21


class Speed(NamedTuple):
    """GB/s of exact bytes; the peer of each is memcpy."""

    encode: Figures
    decode: Figures


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch and kernels on one thread."""
    ensure_threading_layer()
    torch_threads, numba_threads = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(torch_threads)
        numba.set_num_threads(numba_threads)


def window(geometry: Geometry, quick: bool) -> torch.Tensor:
    """Gaussian K/V of `WINDOW_BYTES` or a little less; a multiple of 64 tokens, the longest group of a form."""
    layers, _, heads, page_tokens, dim = geometry.shape
    size = WINDOW_BYTES // 8 if quick else WINDOW_BYTES
    tokens = max(1, size // (4 * geometry.page_bytes)) * 4 * page_tokens
    generator = torch.Generator().manual_seed(0)
    return torch.randn(layers, 2, heads, tokens, dim, generator=generator).to(TORCH[geometry.dtype])


def measure(form: Form, kv: torch.Tensor, quick: bool) -> tuple[float, Speed]:
    """Bits a value and speed of `kv`, in `one_thread`."""
    held = form.hold(kv)
    source, target = np.ones(kv.nbytes, np.uint8), np.zeros(kv.nbytes, np.uint8)

    def copy() -> None:
        np.copyto(target, source)

    encode = _beside(held.encode, copy, kv.nbytes, quick)
    return held.bits_per_value, Speed(encode, _beside(held.decode, copy, kv.nbytes, quick))


def _beside(work: Callable[[], None], copy: Callable[[], None], nbytes: int, quick: bool) -> Figures:
    pairs = LEAST_PAIRS if quick else _pairs(seconds(work) + seconds(copy))
    return interleave(lambda: nbytes / seconds(work) / 1e9, lambda: nbytes / seconds(copy) / 1e9, pairs)


def _pairs(seconds: float) -> int:
    return min(MOST_PAIRS, max(LEAST_PAIRS, int(SECONDS / seconds)))


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
