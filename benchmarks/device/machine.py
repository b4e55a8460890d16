"""On what the parts run: a GPU at full size, or in tests a fake one at tiny sizes."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tierkv.benchmarks.device.kernels import CASES, Case
from tierkv.daemon.gpu import Gpu, open_gpu
from tierkv.geometry import Geometry

REPEATS = 20
MIB = 1 << 20


LAYERS_8B = Geometry(32, 8, 128, "bfloat16")
"""An 8B model's pages, of 2 MiB."""

SOME_LAYERS = Geometry(8, 8, 128, "bfloat16")
"""Layers enough to outrun the device's cache."""


@dataclass(frozen=True)
class Sizes:
    kernel_cases: tuple[Case, ...] = CASES
    geometry: Geometry = SOME_LAYERS  # of kernels
    share: int = 4  # query heads of a KV head
    lengths: tuple[int, ...] = (32_768, 131_072)  # tokens that kernels attend
    copied: int = 1 << 30  # bytes of a device copy
    page: Geometry = LAYERS_8B  # of pages that move, and but for its layers of the model
    pages: int = 128
    shared: int = 64 * MIB
    model_layers: int = 4
    contexts: tuple[int, ...] = (2_048, 16_384)
    decode_steps: int = 32
    host: int = 4 << 30  # bytes, of the daemon
    contract: tuple[str, ...] = ("-k", "triton")  # what pytest is told of the attention's contract


@dataclass(frozen=True)
class Machine:
    """`command` runs this check again in another process, with other arguments."""

    name: str
    device: torch.device
    gpu: Callable[[], Gpu]
    seconds: Callable[[Callable[[], object]], float]
    """Median time of what a call launches."""
    synchronize: Callable[[], None]
    sizes: Sizes
    command: tuple[str, ...]


def memory_folder(size: int) -> tempfile.TemporaryDirectory[str]:
    """For a host pool: in memory where that has room for it."""
    room = os.statvfs("/dev/shm")
    return tempfile.TemporaryDirectory(dir="/dev/shm" if room.f_bavail * room.f_frsize > size else None)


def cuda_machine(command: tuple[str, ...]) -> Machine:
    """The first GPU. Raises `ConfigError`."""

    def gpu() -> Gpu:
        found = open_gpu("cuda:0")
        assert found is not None
        return found

    name = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    device = torch.device("cuda:0")
    return Machine(name, device, gpu, graph_seconds, lambda: torch.cuda.synchronize(device), Sizes(), command)


def graph_seconds(call: Callable[[], object]) -> float:
    """Of the call's kernels, launched as a CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    graph.replay()
    times: list[float] = []
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    for _ in range(REPEATS):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)
