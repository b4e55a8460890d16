"""Moves between HBM of a GPU and pinned host memory. Nothing here waits: copies out, copies in and kernels have a
stream each, and a move yields a fence where it needs their outcome.

Bytes of the host pool are verified before they are copied in, and their checksum is taken after they were copied out,
by the CPU. Digests, the fit of a codec and measuring what a form loses are the CPU's too, over host bytes.

A worker's kernels have written a page before its tokens are committed (`Client`), and may read what a move wrote when
they are told of it, which is after the move's fence.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.daemon.carriers import Carried, Landed, Move, verify
from tierkv.daemon.cpu_carrier import encoded_into, pool_of
from tierkv.daemon.cuda_pool import CudaPool
from tierkv.daemon.desk import Desk, Desks
from tierkv.daemon.events import Copy, FitCodec, MoveDone, Quantize, Summarize
from tierkv.daemon.forms import Forms
from tierkv.daemon.pools import BytePool
from tierkv.device import Device, Stream
from tierkv.fence import Fence
from tierkv.geometry import Geometry
from tierkv.pool import checksum
from tierkv.quant.contract import Floats, NonFiniteValues
from tierkv.quant.on_device import device_pages

if TYPE_CHECKING:
    from tierkv.quant.klt_triton import KltPages
    from tierkv.quant.rotated_triton import RotatedPages


MODELS = 8
"""Codecs kept on the device, of a state's size each; one that was dropped is fetched again."""


class _Model(NamedTuple):
    state: Floats
    codec: RotatedPages | KltPages


class DeviceCarrier:
    """`Carrier` of a GPU. `pools` maps `hbm`, a `CudaPool`, and `host`; an adopted pool may join it later."""

    def __init__(self, pools: Mapping[str, BytePool], forms: Forms, device: Device) -> None:
        self._pools = pools
        self._forms = forms
        self._device = device
        self._out, self._in, self._kernels = device.stream(), device.stream(), device.stream()
        self._desks = Desks(device)
        self._tensors: dict[str, tuple[BytePool, torch.Tensor]] = {}
        self._models: dict[
            tuple[Geometry, int], _Model
        ] = {}  # by where their state lies in HBM, oldest first

    def warm_up(self) -> None:
        """The CPU's kernels. Those of the device depend on a model's shape: its first page waits for them."""
        self._forms.warm_up()

    def carry(self, move: Move) -> Carried:
        if not isinstance(move, Quantize):
            return (yield from self._ended(self._carry(move)))
        desk = yield from self._desks.take()
        try:
            return (yield from self._ended(self._quantize(move, desk)))
        finally:
            self._desks.give_back(desk)

    def _carry(self, move: Copy | Summarize | FitCodec) -> Carried:
        if isinstance(move, Copy):
            return self._copy(move)
        return self._summarize(move) if isinstance(move, Summarize) else self._fit(move)

    def _ended(self, carried: Carried) -> Carried:
        """The same; when it fails, only after what it launched is done: its memory is about to be somebody else's."""
        try:
            return (yield from carried)
        except Exception:
            for stream in (self._out, self._in, self._kernels):
                yield stream.fence()
            raise

    # Copies ------------------------------------------------------------------------------------------------------

    def _copy(self, move: Copy) -> Carried:
        source = self._source(move.src_pool, move.src, move.size, move.src_checksum, move.key)
        target = self._bytes(move.dst_pool, move.dst, move.size)
        stream = self._between(move.src_pool, move.dst_pool)
        stream.copy(target, source)
        yield stream.fence()
        done = MoveDone(move.move, checksum(target.numpy(), move.key) if move.dst_pool == "host" else 0)
        return Landed(done, move.src_pool, move.dst_pool, move.size)

    def _between(self, src_pool: str, dst_pool: str) -> Stream:
        if src_pool == dst_pool:
            return self._kernels
        return self._out if dst_pool == "host" else self._in

    # Low-bit pages -----------------------------------------------------------------------------------------------

    def _quantize(self, move: Quantize, desk: Desk) -> Carried:
        geometry = move.geometry
        if not 1 <= move.count <= geometry.page_tokens:
            raise ValueError(f"a page of {geometry.page_tokens} tokens does not hold {move.count}")
        exact_bytes = geometry.page_bytes
        source = self._source(move.src_pool, move.src, exact_bytes, move.src_checksum, move.key)
        packed_bytes = self._forms.of(move.form).page_bytes(geometry)
        target = self._bytes(move.dst_pool, move.dst, packed_bytes)
        state, codec = yield from self._model(geometry, move.codec_state)
        exact, exact_at = self._pool("hbm"), move.src
        if move.src_pool == "host":
            exact, exact_at = desk.exact(exact_bytes), 0
            self._in.copy(exact[:exact_bytes], source)
            self._kernels.wait(self._in.fence())
        packed, packed_at = self._pool("hbm"), move.dst
        if move.dst_pool == "host":
            packed, packed_at = desk.packed(packed_bytes), 0
        desk.fill(self._kernels, exact_at, packed_at, move.count)
        with self._kernels.launching():
            codec.encode(exact, desk.source, desk.count, packed, desk.target, desk.flag)
        desk.return_flag(self._kernels)
        encoded = self._kernels.fence()
        if move.dst_pool == "host":
            self._out.wait(encoded)
            self._out.copy(target, packed[:packed_bytes])
        yield self._out.fence() if move.dst_pool == "host" else encoded
        if desk.flagged:
            raise NonFiniteValues("the page holds NaN or infinity")
        done = MoveDone(move.move, checksum(target.numpy(), move.key) if move.dst_pool == "host" else 0)
        if self._forms.measures(move):
            found = yield from self._on_host(desk, source, target)
            done = done._replace(errors=self._forms.loss(move, *found, state))
        return Landed(done, move.src_pool, encoded_into(move), packed_bytes)

    def _on_host(
        self, desk: Desk, exact: torch.Tensor, packed: torch.Tensor
    ) -> Generator[Fence, None, tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """A page's exact and packed bytes, which the kernels are done with, wherever they lie."""
        room = desk.host(len(exact) + len(packed))
        parts = room[: len(exact)], room[len(exact) :]
        for part, bytes_ in zip(parts, (exact, packed), strict=True):
            self._out.copy(part, bytes_)
        yield self._out.fence()
        return parts[0].numpy(), parts[1].numpy()

    # The codec's state -------------------------------------------------------------------------------------------

    def _fit(self, move: FitCodec) -> Carried:
        geometry, hbm = move.geometry, "hbm"
        state = self._forms.calibrated(move)
        if state is None:
            pages = []
            for offset in move.pages:
                pages.append((yield from self._read(hbm, offset, geometry.page_bytes)))
            state = self._forms.fitted(geometry, pages, move.counts)
        raw = torch.tensor(self._forms.as_bytes(move, state))
        for key in [key for key in self._models if key[1] == move.dst]:  # another model's, which is gone
            del self._models[key]
        self._in.copy(self._bytes(hbm, move.dst, len(raw)), raw)
        yield self._in.fence()
        return Landed(MoveDone(move.move), hbm, "codec", len(raw))

    def _model(self, geometry: Geometry, offset: int) -> Generator[Fence, None, _Model]:
        """The state at `offset` of HBM, fetched once, and the codec with it."""
        key = (geometry, offset)
        if key not in self._models:
            floats = self._forms.codec.state_floats(geometry)
            state = (yield from self._read("hbm", offset, 4 * floats)).view(np.float32)
            codec = device_pages(self._forms.codec.name, geometry, state, self._device.name)
            while len(self._models) >= MODELS:
                del self._models[next(iter(self._models))]
            self._models[key] = _Model(state, codec)
        return self._models[key]

    # Digests -----------------------------------------------------------------------------------------------------

    def _summarize(self, move: Summarize) -> Carried:
        size = self._forms.source_bytes(move)
        source = self._source("host", move.src, size, move.src_checksum, move.key)
        state = np.zeros(0, np.float32)
        if self._forms.state_floats(move.src_kind, move.geometry):
            state, _ = yield from self._model(move.geometry, move.codec_state)
        digest_state = np.zeros(0, np.float32)
        if place := self._forms.digest_state(move):
            digest_state = (yield from self._read("hbm", *place)).view(np.float32)
        digest = torch.from_numpy(self._forms.digest(move, source.numpy(), state, digest_state))
        self._in.copy(self._bytes("hbm", move.dst, len(digest)), digest)
        yield self._in.fence()
        return Landed(MoveDone(move.move), "host", "digest", len(digest))

    # Bytes -------------------------------------------------------------------------------------------------------

    def _read(self, pool: str, offset: int, size: int) -> Generator[Fence, None, NDArray[np.uint8]]:
        """A host copy of bytes of a pool; seldom, so the memory need not be pinned."""
        copy = torch.empty(size, dtype=torch.uint8)
        self._out.copy(copy, self._bytes(pool, offset, size))
        yield self._out.fence()
        return copy.numpy()

    def _source(self, pool: str, offset: int, size: int, expected: int, key: int) -> torch.Tensor:
        """The source's bytes; a host replica is verified first."""
        source = self._bytes(pool, offset, size)
        if pool == "host":
            verify(source.numpy(), expected, key)
        return source

    def _bytes(self, name: str, offset: int, size: int) -> torch.Tensor:
        pool = self._pool(name)
        if offset < 0 or size < 0 or offset + size > len(pool):
            raise ValueError(f"bytes [{offset}, {offset + size}) lie outside a pool of {len(pool)} bytes")
        return pool[offset : offset + size]

    def _pool(self, name: str) -> torch.Tensor:
        """A pool as a tensor, made when it is first used."""
        pool = pool_of(self._pools, name)
        known = self._tensors.get(name)
        if known is None or known[0] is not pool:
            known = self._tensors[name] = (pool, self._as_tensor(pool))
        return known[1]

    def _as_tensor(self, pool: BytePool) -> torch.Tensor:
        if isinstance(pool, CudaPool):
            return self._device.tensor(pool.address, pool.size, pool)
        assert pool.data is not None
        return torch.from_numpy(pool.data)
