"""Moves between two pools that the CPU addresses: one after the other, in numpy and the codecs' own kernels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xxhash
from numpy.typing import NDArray

from tierkv.daemon.carriers import Carried, Landed, Move, verify
from tierkv.daemon.events import Copy, FitCodec, MoveDone, Quantize, Summarize
from tierkv.daemon.forms import Forms
from tierkv.daemon.pools import BytePool, Bytes
from tierkv.geometry import Geometry
from tierkv.pool import KEY_MASK, checksum
from tierkv.table import Kind

NOTHING = np.zeros(0, np.float32)
"""The state of a form that has none."""

BLOCK_BYTES = 1 << 19
"""A copy into host memory is written and hashed in blocks of this size: the hash then reads what the copy has just
brought into the core's cache, where it runs several times faster than memory."""


class CpuCarrier:
    """`Carrier` of this machine's memory. `pools` maps `hbm` and `host`; an adopted pool may join it later."""

    def __init__(self, pools: Mapping[str, BytePool], forms: Forms) -> None:
        self._pools = pools
        self._forms = forms

    def warm_up(self) -> None:
        self._forms.warm_up()

    def carry(self, move: Move) -> Carried:
        yield from ()  # nothing to wait for
        return self._landed(move)

    def _landed(self, move: Move) -> Landed:
        if isinstance(move, Copy):
            return self._copy(move)
        if isinstance(move, Quantize):
            return self._quantize(move)
        if isinstance(move, Summarize):
            return self._summarize(move)
        return self._fit(move)

    def _copy(self, move: Copy) -> Landed:
        source = self._source(move.src_pool, move.src, move.size, move.src_checksum, move.key)
        pool = self._pool(move.dst_pool)
        if move.dst_pool != "host":
            pool.write(move.dst, source)
            return Landed(MoveDone(move.move), move.src_pool, move.dst_pool, move.size)
        digest = xxhash.xxh3_64(seed=move.key & KEY_MASK)
        for start in range(0, move.size, BLOCK_BYTES):
            block = np.ascontiguousarray(source[start : start + BLOCK_BYTES])
            pool.write(move.dst + start, block)
            digest.update(block.data)
        return Landed(MoveDone(move.move, digest.intdigest()), move.src_pool, move.dst_pool, move.size)

    def _quantize(self, move: Quantize) -> Landed:
        source = self._source(move.src_pool, move.src, move.geometry.page_bytes, move.src_checksum, move.key)
        codec, state = self._forms.of(move.form), self._state(move.form, move.geometry, move.codec_state)
        out = self._pool(move.dst_pool).read(move.dst, codec.page_bytes(move.geometry))
        codec.encode(move.geometry, source, move.count, state, out)
        done = MoveDone(move.move, checksum(out, move.key) if move.dst_pool == "host" else 0)
        if self._forms.measures(move):
            done = done._replace(errors=self._forms.loss(move, source, out, state))
        return Landed(done, move.src_pool, encoded_into(move), len(out))

    def _summarize(self, move: Summarize) -> Landed:
        size = self._forms.source_bytes(move)
        source = self._source("host", move.src, size, move.src_checksum, move.key)
        state = self._state(move.src_kind, move.geometry, move.codec_state)
        place = self._forms.digest_state(move)
        digest_state = self._pool("hbm").read(*place).view(np.float32) if place else NOTHING
        digest = self._forms.digest(move, source, state, digest_state)
        self._pool("hbm").write(move.dst, digest)
        return Landed(MoveDone(move.move), "host", "digest", len(digest))

    def _fit(self, move: FitCodec) -> Landed:
        hbm = self._pool("hbm")
        state = self._forms.calibrated(move)
        if state is None:
            pages = [hbm.read(offset, move.geometry.page_bytes) for offset in move.pages]
            state = self._forms.fitted(move.geometry, pages, move.counts)
        raw = self._forms.as_bytes(move, state)
        hbm.write(move.dst, raw)
        return Landed(MoveDone(move.move), "hbm", "codec", len(raw))

    def _state(self, form: int, geometry: Geometry, offset: int) -> NDArray[np.float32]:
        """The form's per-model state, in HBM; empty where it has none."""
        floats = self._forms.state_floats(form, geometry)
        if not floats:
            return NOTHING
        return self._pool("hbm").read(offset, 4 * floats).view(np.float32)

    def _pool(self, name: str) -> BytePool:
        return pool_of(self._pools, name)

    def _source(self, pool: str, offset: int, size: int, expected: int, key: int) -> Bytes:
        """The source's bytes; a host replica is verified first."""
        data = self._pool(pool).read(offset, size)
        if pool == "host":
            verify(data, expected, key)
        return data


def encoded_into(move: Quantize) -> str:
    """The pool of a packed replica as metrics name it."""
    if move.form == Kind.MIDDLE:
        return "middle"
    return "quantized" if move.dst_pool == "hbm" else move.dst_pool


def pool_of(pools: Mapping[str, BytePool], name: str) -> BytePool:
    """Raises `KeyError`: there is none (yet)."""
    pool = pools.get(name)
    if pool is None:
        raise KeyError(f"there is no {name} pool")
    return pool
