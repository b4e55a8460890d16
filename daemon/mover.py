"""Carries out the brain's moves on the two pools, one after the other, in one thread.

A move ends in exactly one `MoveDone` or `MoveFailed`; whatever goes wrong keeps the source and never leaves the
thread. Host replicas carry an xxh3-64 checksum seeded with their key (the page id), so bytes that were damaged, or
that belong to another page, are refused and never reach attention.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from tierkv.daemon import scoring
from tierkv.daemon.calibrations import Calibrations
from tierkv.daemon.events import Copy, FitCodec, MoveDone, MoveFailed, Quantize, Summarize
from tierkv.daemon.pools import BytePool, Bytes
from tierkv.geometry import DTypeName, Geometry
from tierkv.pool import KEY_MASK, checksum
from tierkv.prefetch.digests import digest_shape
from tierkv.prefetch.digests import write as write_digest
from tierkv.quant.contract import Codec, NonFiniteValues
from tierkv.quant.quality import ErrorRatios, error_ratios
from tierkv.table import Kind

log = logging.getLogger(__name__)

Move = Quantize | Copy | Summarize | FitCodec

WARM_UP_HEAD_DIM = 64
"""A head size that every codec packs."""

BLOCK_BYTES = 1 << 19
"""A copy into host memory is written and hashed in blocks of this size: the hash then reads what the copy has just
brought into the core's cache, where it runs several times faster than memory."""


class OnMove(Protocol):
    def __call__(self, src: str, dst: str, seconds: float, size: int) -> None:
        """A move is done: pools `src` and `dst` (`quantized` for a low-bit replica in HBM), bytes written."""


class _Damaged(Exception):
    """A host replica's bytes are not what was stored."""


class Mover:
    """One thread, one queue. `pools` maps `hbm` and `host`; an adopted pool may join it later.

    Args:
        post: gets every result; called from the mover's thread.
        measure_every: of so many pages that become low-bit, the first one is decoded again and compared with its exact
            bytes; 0 measures none.
        middle: the codec of the middle form, if there is one.
    """

    def __init__(
        self,
        pools: Mapping[str, BytePool],
        codec: Codec,
        post: Callable[[MoveDone | MoveFailed], None],
        on_move: OnMove | None = None,
        measure_every: int = 0,
        calibrations: Calibrations | None = None,
        middle: Codec | None = None,
    ) -> None:
        self._pools = pools
        self._codec = codec
        self._middle = middle
        self._post = post
        self._on_move = on_move
        self._measure_every = measure_every
        self._calibrations = calibrations or Calibrations(None)
        self._encoded = 0
        self._queue: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._unfinished = 0
        self._lock = threading.Lock()
        self._started_at: float | None = None
        self._stopping = False
        self.restarts = 0
        self.warmed = threading.Event()
        """The codec's kernels and those of scores are compiled: seconds on a machine that has not run them, less from
        numba's cache."""

    def start(self) -> None:
        thread = threading.Thread(target=self._run, name="tierkv-mover", daemon=True)
        thread.start()
        self._thread = thread  # only now: `revive` would take one that has not started for a dead one

    def submit(self, move: Move) -> None:
        """Queue a move; revives a dead thread."""
        with self._lock:
            self._unfinished += 1
        self._queue.put(move)
        self.revive()

    def revive(self) -> None:
        """Start a new thread where the old one died, and count it."""
        if not self._stopping and self._thread is not None and not self._thread.is_alive():
            self.restarts += 1
            log.error("the mover's thread had died; restart %d", self.restarts)
            self.start()

    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def pending(self) -> int:
        """Moves submitted and not answered."""
        return self._unfinished

    def busy_seconds(self) -> float:
        """How long the current move has been running; 0 when idle."""
        started = self._started_at
        return 0.0 if started is None else time.monotonic() - started

    def stop(self, timeout: float = 5.0) -> None:
        """Finish what is queued, then end the thread."""
        self._stopping = True
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout)

    def _warm_up(self) -> None:
        """Encode one small page of each element type, so that the first demotion need not wait for a compiler; nor need
        the loop when it scores pages first.
        """
        scoring.warm_up()
        dtypes: tuple[DTypeName, ...] = ("bfloat16", "float16", "float32")
        codecs = self._codec.members() if self._middle is None else (*self._codec.members(), self._middle)
        for codec, dtype in itertools.product(codecs, dtypes):
            geometry = Geometry(1, 1, WARM_UP_HEAD_DIM, dtype)
            page = np.zeros(geometry.page_bytes, np.uint8)
            state = codec.fit_state(geometry, [page], [1])
            packed = np.empty(codec.page_bytes(geometry), np.uint8)
            codec.encode(geometry, page, geometry.page_tokens, state, packed)
            if self._measure_every:
                codec.decode(geometry, packed, geometry.page_tokens, state, page)
                error_ratios(geometry, page, page, geometry.page_tokens)
            shape = digest_shape(geometry, 0)
            write_digest(shape, page, geometry.page_tokens, np.empty(shape.nbytes, np.uint8))

    def _run(self) -> None:
        if not self.warmed.is_set():
            try:
                self._warm_up()
            except Exception:
                log.exception("the kernels could not be warmed up")
            self.warmed.set()
        while (move := self._queue.get()) is not None:
            self._started_at = time.monotonic()
            result: MoveDone | MoveFailed = MoveFailed(move.move, "io")
            try:
                result = self._attempt(move)
            finally:  # even when this thread is dying, the brain gets its answer
                self._started_at = None
                with self._lock:
                    self._unfinished -= 1
                self._post(result)

    def _attempt(self, move: Move) -> MoveDone | MoveFailed:
        start = time.perf_counter()
        try:
            done, src, dst, size = self._carry_out(move)
        except NonFiniteValues:
            return MoveFailed(move.move, "non-finite")
        except _Damaged as error:
            log.warning("move %d: %s", move.move, error)
            return MoveFailed(move.move, "checksum")
        except Exception as error:
            reason = (
                "io"
                if isinstance(move, Copy) or isinstance(error, (OSError, KeyError, IndexError))
                else "codec"
            )
            log.exception("move %d failed (%s)", move.move, reason)
            return MoveFailed(move.move, reason)
        if self._on_move is not None:
            try:
                self._on_move(src, dst, time.perf_counter() - start, size)
            except Exception:
                log.exception("the metrics hook failed")
        return done

    def _carry_out(self, move: Move) -> tuple[MoveDone, str, str, int]:
        if isinstance(move, Copy):
            return self._copy(move)
        if isinstance(move, Quantize):
            return self._quantize(move)
        if isinstance(move, Summarize):
            return self._summarize(move)
        return self._fit(move)

    def _copy(self, move: Copy) -> tuple[MoveDone, str, str, int]:
        source = self._source(move.src_pool, move.src, move.size, move.src_checksum, move.key)
        pool = self._pool(move.dst_pool)
        if move.dst_pool != "host":
            pool.write(move.dst, source)
            return MoveDone(move.move), move.src_pool, move.dst_pool, move.size
        digest = xxhash.xxh3_64(seed=move.key & KEY_MASK)
        for start in range(0, move.size, BLOCK_BYTES):
            block = np.ascontiguousarray(source[start : start + BLOCK_BYTES])
            pool.write(move.dst + start, block)
            digest.update(block.data)
        return MoveDone(move.move, digest.intdigest()), move.src_pool, move.dst_pool, move.size

    def _quantize(self, move: Quantize) -> tuple[MoveDone, str, str, int]:
        source = self._source(move.src_pool, move.src, move.geometry.page_bytes, move.src_checksum, move.key)
        codec, state = self._form(move.form, move.geometry, move.codec_state)
        pool = self._pool(move.dst_pool)
        size = codec.page_bytes(move.geometry)
        in_place = pool.data is not None
        out = pool.read(move.dst, size) if in_place else np.empty(size, np.uint8)
        codec.encode(move.geometry, source, move.count, state, out)
        if not in_place:
            pool.write(move.dst, out)
        done = self._published(move.move, move.dst_pool, out, move.key)
        if move.form == Kind.MIDDLE:
            return done, move.src_pool, "middle", size
        done = done._replace(errors=self._measured(move, source, out, state))
        return done, move.src_pool, "quantized" if move.dst_pool == "hbm" else move.dst_pool, size

    def _form(self, form: int, geometry: Geometry, codec_state: int) -> tuple[Codec, NDArray[np.float32]]:
        """A packed form's codec and its state."""
        if form != Kind.MIDDLE:
            return self._codec, self._state(geometry, codec_state)
        if self._middle is None:
            raise ValueError("there is no middle form")
        return self._middle, np.zeros(0, np.float32)

    def _measured(
        self, move: Quantize, exact: Bytes, packed: Bytes, state: NDArray[np.float32]
    ) -> ErrorRatios | None:
        """What the low-bit form loses of this page, if it is one of those that are measured."""
        number, self._encoded = self._encoded, self._encoded + 1
        if not self._measure_every or number % self._measure_every:
            return None
        decoded = np.empty(move.geometry.page_bytes, np.uint8)
        self._codec.decode(move.geometry, packed, move.count, state, decoded)
        return error_ratios(move.geometry, exact, decoded, move.count)

    def _summarize(self, move: Summarize) -> tuple[MoveDone, str, str, int]:
        geometry = move.geometry
        if move.src_kind == Kind.EXACT:
            source = self._source("host", move.src, geometry.page_bytes, move.src_checksum, move.key)
        else:
            codec, state = self._form(move.src_kind, geometry, move.codec_state)
            size = codec.page_bytes(geometry)
            packed = self._source("host", move.src, size, move.src_checksum, move.key)
            source = np.empty(geometry.page_bytes, np.uint8)
            codec.decode(geometry, packed, move.count, state, source)
        shape = digest_shape(geometry, move.layers)
        digest = np.empty(shape.nbytes, np.uint8)
        write_digest(shape, source, move.count, digest)
        self._pool("hbm").write(move.dst, digest)
        return MoveDone(move.move), "host", "digest", shape.nbytes

    def _state(self, geometry: Geometry, offset: int) -> NDArray[np.float32]:
        """The codec's per-model state, in HBM."""
        floats = self._codec.state_floats(geometry)
        if not floats:
            return np.zeros(0, np.float32)
        return self._pool("hbm").read(offset, 4 * floats).view(np.float32)

    def _fit(self, move: FitCodec) -> tuple[MoveDone, str, str, int]:
        hbm = self._pool("hbm")
        state = None
        if self._codec.takes_moments:
            state = self._calibrations.fit(self._codec, move.model_id, move.geometry)
        if state is None:
            pages = [hbm.read(offset, move.geometry.page_bytes) for offset in move.pages]
            state = self._fitted(move.geometry, pages, move.counts)
        floats = self._codec.state_floats(move.geometry)
        if state.dtype != np.float32 or state.size != floats:
            raise ValueError(
                f"the codec's state has {state.size} values of {state.dtype}; {floats} were announced"
            )
        if not np.isfinite(state).all():
            raise NonFiniteValues("the codec's state is not finite")
        hbm.write(move.dst, np.ascontiguousarray(state).reshape(-1).view(np.uint8))
        return MoveDone(move.move), "hbm", "codec", 4 * floats

    def _fitted(self, geometry: Geometry, pages: list[Bytes], counts: Sequence[int]) -> NDArray[np.float32]:
        """The state from the pages that the codec takes. Raises `NonFiniteValues` when it takes none."""
        try:
            return self._codec.fit_state(geometry, pages, counts)
        except NonFiniteValues:
            sound = [pair for pair in zip(pages, counts, strict=True) if self._can_fit(geometry, *pair)]
            if not sound:
                raise
            return self._codec.fit_state(geometry, [page for page, _ in sound], [count for _, count in sound])

    def _can_fit(self, geometry: Geometry, page: Bytes, count: int) -> bool:
        try:
            self._codec.fit_state(geometry, [page], [count])
        except NonFiniteValues:
            return False
        return True

    def _pool(self, name: str) -> BytePool:
        pool = self._pools.get(name)
        if pool is None:
            raise KeyError(f"there is no {name} pool")
        return pool

    def _source(self, pool: str, offset: int, size: int, expected: int, key: int) -> Bytes:
        """The source's bytes; a host replica is verified first."""
        data = self._pool(pool).read(offset, size)
        if pool == "host" and checksum(data, key) != expected:
            raise _Damaged(f"{size} host bytes at {offset} of page {key} do not match their checksum")
        return data

    @staticmethod
    def _published(move: int, pool: str, data: Bytes, key: int) -> MoveDone:
        return MoveDone(move, checksum(data, key) if pool == "host" else 0)
