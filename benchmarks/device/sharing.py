"""Is memory that one process creates the same memory in another? The daemon's pool and the worker's mapping of it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from tierkv import device_pool
from tierkv.benchmarks.device.machine import Machine
from tierkv.benchmarks.device.table import Row

CHILD = "mapping"
CHILD_SECONDS = 40.0
DIGEST_BYTES = 16
"""In hexadecimal digits."""


def pattern(seed: int, size: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def digest(data: NDArray[np.uint8]) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(data).data)


def run(machine: Machine) -> Iterator[Row]:
    """The child reads what was written here, writes by a kernel what is read here, and outlives the creator."""
    gpu, size = machine.gpu(), machine.sizes.shared
    pool = gpu.pools.create(size)
    first, second = pattern(1, size), pattern(2, size)
    pool.write(0, first)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    child = subprocess.Popen(
        [*machine.command, "--child", CHILD, str(theirs.fileno()), str(size), gpu.uuid],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    try:
        ours.settimeout(CHILD_SECONDS)
        socket.send_fds(ours, [b"\0"], [pool.descriptor()])
        yield Row("a second process reads the pool", "checksum", hear(ours)[0] == digest(first))
        _, (handed_back,) = hear(ours)
        seen = pool.read(0, size)
        yield Row("this process reads what its kernel wrote", "checksum", digest(seen) == digest(second))
        stranger = gpu.pools.create(size)
        known = pool.same(handed_back) and not stranger.same(handed_back)
        yield Row("the descriptor that it hands back is known", "as this pool's, and no other's", known)
        stranger.close()
        pool.close()
        adopted = gpu.pools.adopt(handed_back, size)
        os.close(handed_back)
        seen = adopted.read(0, size)
        yield Row("an owner that comes later adopts it", "checksum", digest(seen) == digest(second))
        adopted.close()
        ours.sendall(b"\0")
        alive = hear(ours)[0] == digest(second)
        yield Row("the memory outlives its creator's mapping", "checksum", alive)
    finally:
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)
        ours.close()
        child.wait(CHILD_SECONDS)
    yield Row("the second process ended well", f"exit status {child.returncode}", child.returncode == 0)


def child(descriptor: str, size: str, uuid: str) -> int:
    """The worker's side."""
    line = socket.socket(fileno=int(descriptor))
    _, (memory,), _, _ = socket.recv_fds(line, 1, 1)
    mapping = device_pool.map_device(memory, int(size), uuid)
    tensor = mapping.tensor
    assert tensor is not None

    line.sendall(digest(tensor.cpu().numpy()).encode())
    tensor.copy_(torch.from_numpy(pattern(2, int(size))).to(tensor.device))
    mapping.fence().synchronize()
    socket.send_fds(line, [digest(tensor.cpu().numpy()).encode()], [mapping.descriptor])
    line.recv(1)
    line.sendall(digest(tensor.cpu().numpy()).encode())
    return 0


def hear(line: socket.socket) -> tuple[str, list[int]]:
    """A digest, and descriptors that came with it."""
    text, descriptors, _, _ = socket.recv_fds(line, DIGEST_BYTES, 1)
    while 0 < len(text) < DIGEST_BYTES:
        text += line.recv(DIGEST_BYTES - len(text))
    return text.decode(), list(descriptors)
