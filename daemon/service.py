"""One owner, composed: pools, mover, loop and attach socket. What the Ray actor hosts and what tests run.

Adoption. Workers of a dead owner still map its HBM, so a starting owner asks `workers.json` who they are. While any
lives that has neither come back nor ended, memory that nobody has claimed is not free. The first descriptor that
comes back becomes the pool, with everything in it; later ones must be the same memory. A worker whose memory cannot be
adopted is refused with `pages-lost`: it gives its sessions up and attaches anew. With no survivors the pool is fresh.

`python -m tierkv.daemon.service --state-dir DIR --hbm BYTES --host BYTES` runs one without Ray, for tests.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from pathlib import Path

from tierkv.daemon import events, registry
from tierkv.daemon.attach import Admission, AttachServer, Peer
from tierkv.daemon.calibrations import Calibrations
from tierkv.daemon.carriers import Carrier
from tierkv.daemon.cpu_carrier import CpuCarrier
from tierkv.daemon.forms import Forms
from tierkv.daemon.gpu import CPU, Gpu, open_gpu
from tierkv.daemon.loop_contract import BrainLike, ServerMetrics
from tierkv.daemon.middle import middle_codec
from tierkv.daemon.mover import Mover, OnMove
from tierkv.daemon.pools import BytePool, DevicePool, DevicePools, HbmPool, HostPool, round_down
from tierkv.daemon.server import OwnerLoop
from tierkv.errors import ConfigError
from tierkv.handshake import socket_path
from tierkv.prefetch.digest_settings import DigestSetting
from tierkv.protocol import (
    DEFAULT_OBSERVING,
    PROTOCOL_VERSION,
    REQUEST_SOCKET,
    Attach,
    Attached,
    Observing,
    Refused,
)
from tierkv.quant import get as get_codec
from tierkv.quant.moments import About
from tierkv.quant.on_device import require_served

log = logging.getLogger(__name__)

ADMIT_SECONDS = 10.0
"""How long the loop may take to admit a worker; adoption of a few hundred thousand pages takes less."""

DRAIN_SECONDS = 30.0
ALL_LAYERS = 1 << 16
"""More layers than a page has."""

QUIET_TICKS = 3
"""Loop ticks without a move after which a drain counts as finished."""


@dataclass(frozen=True)
class ServiceConfig:
    """Sizes in bytes (rounded down to 4,096), times in seconds. `epoch` must be larger than any earlier owner's."""

    state_dir: Path
    hbm_bytes: int
    host_bytes: int
    epoch: int
    codec: str = "k3v2"
    page_tokens: int = 16
    straddle: bool = False
    observing: Observing = DEFAULT_OBSERVING
    lease_seconds: float = 10.0
    heartbeat_seconds: float = 2.0
    digest_layers: int = 0  # as workers are told: 0 for no digests
    measure_every: int = 0  # see `Forms`
    middle: str = ""  # codec of the middle form
    calibration: Path | None = None  # see `Calibrations`
    digest: DigestSetting = "auto"  # whether calibrations are looked at for digests
    digest_models: tuple[About, ...] = ()  # found when the service starts


BrainFactory = Callable[[ServiceConfig], BrainLike]


class Service:
    """Holds everything from `start` to `stop`. The caller holds the state directory's lock.

    Args:
        brain_factory: called once, in `start`, with the sizes rounded to what the pools have.
        gpu: where HBM is; None: in this machine's memory.
        on_move: see `Mover`.
    """

    def __init__(
        self,
        config: ServiceConfig,
        brain_factory: BrainFactory,
        metrics: ServerMetrics | None = None,
        gpu: Gpu | None = None,
        on_move: OnMove | None = None,
    ) -> None:
        self._gpu = gpu
        self._device_pools: DevicePools | type[HbmPool] = HbmPool if gpu is None else gpu.pools
        self.config = replace(
            config,
            hbm_bytes=self._device_pools.round_down(config.hbm_bytes),
            host_bytes=round_down(config.host_bytes),
        )
        self._brain_factory = brain_factory
        self._metrics = metrics
        self._on_move = on_move
        self._pools: dict[str, BytePool] = {}
        self._hbm: DevicePool | None = None
        self._waiting: dict[str, registry.Worker] = {}
        self._open = contextlib.ExitStack()  # closes in reverse: attach, mover, loop, pools
        self.loop: OwnerLoop
        self.mover: Mover
        self.attach: AttachServer
        self.brain: BrainLike

    # Lifetime ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Raises `ConfigError` when memory, the file system or a socket cannot be had; nothing is left behind then."""
        try:
            self._start()
        except BaseException:
            self._open.close()
            raise

    def _start(self) -> None:
        config = self.config
        config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        config.state_dir.chmod(0o700)
        self._host_pool = HostPool(config.state_dir, config.host_bytes)
        self._pools["host"] = self._host_pool
        self._open.callback(self._close_pools)
        self._registry = registry.Registry(config.state_dir)
        wanted = bool(config.digest_layers) and config.digest != "deviation"
        self.calibrations = Calibrations(config.calibration, wanted)
        middle = middle_codec(config.middle) if config.middle else None
        carrier: Carrier
        forms = Forms(get_codec(config.codec), middle, self.calibrations, config.measure_every)
        if self._gpu is not None:
            require_served(config.codec, config.middle, config.page_tokens)
            self._open.callback(self._gpu.pin(self._host_pool.data).close)
            carrier = self._gpu.carrier(self._pools, forms)
        else:
            carrier = CpuCarrier(self._pools, forms)
        self.mover = Mover(carrier, lambda result: self.loop.post(result), self._on_move)
        self.brain = self._brain_factory(replace(config, digest_models=self.calibrations.digest_models))
        self.loop = OwnerLoop(
            socket_path(config.state_dir, REQUEST_SOCKET), self.brain, self.mover, config.epoch,
            config.lease_seconds, self._metrics,
        )  # fmt: skip
        self.attach = AttachServer(config.state_dir, self)
        self._waiting = {worker.client_id: worker for worker in self._registry.survivors}
        if not self._waiting:
            self._fresh_pool()
        else:
            log.info("waiting for %d workers of an earlier owner", len(self._waiting))
        self._open.callback(self.loop.stop)
        self.mover.start()
        self._open.callback(self.mover.stop)
        self.loop.start()
        if not self._waiting:
            self.loop.post(events.AdoptionEnded())
        self._open.callback(self.attach.stop)
        self.attach.start(self._registry.survivors)

    def stop(self, drain: bool = False, timeout: float = DRAIN_SECONDS) -> None:
        """End all threads and close both pools; with `drain`, first stop admitting and finish moves."""
        if drain and self.loop.alive():
            self._drain(timeout)
        self._open.close()

    def _close_pools(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _drain(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self.loop.post(events.Draining())
        quiet, seen = 0, self.loop.ticks
        while quiet < QUIET_TICKS and time.monotonic() < deadline and self.loop.alive():
            time.sleep(0.01)
            if self.loop.ticks != seen:
                seen = self.loop.ticks
                quiet = 0 if self.mover.pending() else quiet + 1

    # For health and status, any thread ---------------------------------------------------------------------------

    def adopting(self) -> int:
        """Workers of an earlier owner that have neither come back nor ended."""
        return len(self._waiting)

    def tick_age(self) -> float:
        """Seconds since the loop's last tick."""
        return time.monotonic() - self.loop.last_tick

    # Host of the attach thread -----------------------------------------------------------------------------------

    def admit(self, message: Attach, peer: Peer, descriptor: int | None) -> Admission:
        """See `attach.Host`. Runs in the attach thread, as do all changes of pools and survivors."""
        client = message.client_id
        if descriptor is not None or message.sessions:
            refusal = self._adopt(message, peer, descriptor)
            if refusal is not None:
                self.survivor_ended(client)
                return Admission(Refused("pages-lost", refusal))
        elif self._hbm is None:
            return Admission(
                Refused(
                    "owner-unavailable", f"{len(self._waiting)} workers of the last owner are awaited; retry"
                )
            )
        started = registry.start_time(peer.pid)
        if started is None:
            return Admission(Refused("owner-unavailable", f"process {peer.pid} has ended"))
        self._registry.add(registry.Worker(client, peer.pid, started, registry.boot_id()))
        try:
            lost = self.loop.attach(client, tuple(message.sessions)).result(ADMIT_SECONDS)
        except (Exception, FutureTimeout) as error:
            log.error("worker %s was not admitted: %r", client, error)
            self.left(client)
            self.survivor_ended(client)
            return Admission(Refused("pages-lost" if message.sessions else "owner-unavailable", f"{error!r}"))
        self.survivor_ended(client, registered=True)
        return Admission(self._attached(lost), (self._hbm_pool().descriptor(), self._host_pool.descriptor()))

    @property
    def on_device(self) -> bool:
        return self._gpu is not None

    def left(self, client: str) -> None:
        self._registry.remove(client)
        self.loop.detach(client)

    def check_survivors(self) -> None:
        for client in [c for c in self._waiting if registry.has_left(self.config.state_dir, c)]:
            self.attach.forget_survivor(client)
            self.survivor_ended(client)

    def survivor_ended(self, client: str, registered: bool = False) -> None:
        """Nothing more is to be expected of this survivor; after the last one, unclaimed memory is free."""
        if self._waiting.pop(client, None) is None:
            return
        if not registered:
            self._registry.remove(client)
        if not self._waiting:
            if self._hbm is None:
                self._fresh_pool()
            log.info("adoption has ended")
            self.loop.post(events.AdoptionEnded())

    def _adopt(self, message: Attach, peer: Peer, descriptor: int | None) -> str | None:
        """Take the handed-back memory; a reason where that cannot be."""
        if descriptor is None:
            return "sessions were handed back without their HBM descriptor"
        if self._hbm is not None and not self._hbm.same(descriptor):
            return "the handed-back HBM is not this daemon's; its pages are lost"
        if message.sessions:
            survivor = self._waiting.get(message.client_id)
            if survivor is None:
                return "this daemon does not wait for this worker; its memory may be in use already"
            if survivor.pid != peer.pid:
                return f"client {message.client_id} belonged to process {survivor.pid}, not {peer.pid}"
            theirs, ours = (_forms(m.codec, m.middle) for m in (message, self.config))
            if theirs != ours:
                return f"its pages are packed as {theirs}, and this daemon's as {ours}: it would misread them"
        if self._hbm is None:
            try:
                self._use(self._device_pools.adopt(descriptor, self.config.hbm_bytes))
            except ConfigError as error:
                return str(error)
        return None

    def _fresh_pool(self) -> None:
        self._use(self._device_pools.create(self.config.hbm_bytes))

    def _use(self, pool: DevicePool) -> None:
        self._hbm = pool
        self._pools["hbm"] = pool

    def _hbm_pool(self) -> DevicePool:
        assert self._hbm is not None
        return self._hbm

    def _attached(self, lost: tuple[tuple[int, int, int], ...]) -> Attached:
        config = self.config
        return Attached(
            PROTOCOL_VERSION, config.epoch, self.loop.endpoint, config.hbm_bytes, config.host_bytes,
            config.codec, config.page_tokens, config.straddle, config.observing, config.heartbeat_seconds,
            config.digest_layers, config.middle, list(lost), "" if self._gpu is None else self._gpu.uuid,
        )  # fmt: skip


def _forms(codec: str, middle: str) -> str:
    return f"{codec} with {middle} in the middle" if middle else codec


def main() -> None:
    """A service without Ray, until SIGTERM (drains) or SIGKILL."""
    from tierkv.daemon.brain import Brain, BrainConfig
    from tierkv.daemon.statedir import StateLock, next_epoch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--hbm", type=int, required=True, help="bytes")
    parser.add_argument("--host", type=int, required=True, help="bytes")
    parser.add_argument("--codec", default="k3v2")
    parser.add_argument("--page-tokens", type=int, default=16)
    parser.add_argument("--lease-seconds", type=float, default=10.0)
    parser.add_argument("--heartbeat-seconds", type=float, default=2.0)
    parser.add_argument("--straddle", action="store_true")
    parser.add_argument("--digest-share", type=float, default=0.1)
    parser.add_argument("--digest-layers", type=int, default=0)
    parser.add_argument("--digest", default="auto")
    parser.add_argument("--digest-bytes", type=int, default=32)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--recent-tokens", type=int, default=64)
    parser.add_argument("--waste-limit", type=float, default=0.25)
    parser.add_argument("--device", default=CPU)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    with StateLock(given.state_dir):
        config = ServiceConfig(
            given.state_dir, given.hbm, given.host, next_epoch(given.state_dir), given.codec, given.page_tokens,
            given.straddle, lease_seconds=given.lease_seconds, heartbeat_seconds=given.heartbeat_seconds,
            digest_layers=(given.digest_layers or ALL_LAYERS) if given.digest_share else 0,
            digest=given.digest, calibration=given.calibration,
        )  # fmt: skip

        def brain(config: ServiceConfig) -> BrainLike:
            return Brain(
                BrainConfig(
                    config.hbm_bytes,
                    config.host_bytes,
                    config.epoch,
                    config.codec,
                    page_tokens=config.page_tokens,
                    straddle=config.straddle,
                    digest_share=given.digest_share,
                    digest_layers=given.digest_layers,
                    digest=given.digest,
                    digest_bytes=given.digest_bytes,
                    digest_models=config.digest_models,
                    recent_tokens=given.recent_tokens,
                    waste_limit=given.waste_limit,
                )
            )

        service = Service(config, brain, gpu=open_gpu(given.device))
        service.start()
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        signal.signal(signal.SIGINT, lambda *_: ended.set())
        service.mover.warmed.wait()  # tests time what follows
        print(f"ready {os.getpid()} epoch {config.epoch}", flush=True)
        ended.wait()
        service.stop(drain=True)


if __name__ == "__main__":
    main()
