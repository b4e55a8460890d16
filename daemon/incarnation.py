"""One start of the owner, whole: lock, epoch, service, metrics, HTTP, in this order; its end is the reverse.

What the Ray actor hosts. Nothing here knows Ray, and nothing on this path imports torch: a restart must be quick.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tierkv.daemon import events, registry, statedir
from tierkv.daemon.brain import Brain
from tierkv.daemon.brain_config import BrainConfig
from tierkv.daemon.config import DaemonConfig
from tierkv.daemon.gpu import open_gpu
from tierkv.daemon.http import HttpServer, Verdict, loop_verdict, version
from tierkv.daemon.loop_contract import BrainLike
from tierkv.daemon.metrics import Metrics
from tierkv.daemon.policy import Thresholds
from tierkv.daemon.policy_settings import policy_of
from tierkv.daemon.pools import HOST_FILE
from tierkv.daemon.service import ALL_LAYERS, Service, ServiceConfig
from tierkv.daemon.snapshot import Snapshot

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02


def thresholds(config: DaemonConfig) -> Thresholds:
    """The policy's own thresholds, with those that are set in their place."""
    own = policy_of(config.policy, config.policy_settings).thresholds
    given = {name: getattr(config, name) for name in Thresholds._fields}
    return own._replace(**{name: value for name, value in given.items() if value is not None})


def brain_config(config: DaemonConfig, hbm_bytes: int, host_bytes: int, epoch: int) -> BrainConfig:
    """The brain's part of the configuration; sizes as the pools have them."""
    return BrainConfig(
        hbm_bytes=hbm_bytes,
        host_bytes=host_bytes,
        epoch=epoch,
        codec=config.low_bit_form,
        middle=config.middle,
        middle_below=config.middle_below,
        policy=policy_of(config.policy, config.policy_settings) if config.policy_settings else config.policy,
        page_tokens=config.page_tokens,
        straddle=config.layout == "straddling",
        demotion=config.demotion,
        backup=config.backup,
        thresholds=thresholds(config),
        low_watermark=config.low_watermark,
        high_watermark=config.high_watermark,
        sink_tokens=config.sink_tokens,
        recent_tokens=config.recent_tokens,
        pins=tuple(config.pins.items()),
        pin_quota=config.pin_quota,
        digest_share=config.digest_share,
        digest_layers=config.digest_layers,
        digest=config.digest,
        digest_bytes=config.digest_bytes,
        min_residency_steps=config.min_residency_steps,
        max_moves_in_flight=config.max_moves_in_flight,
        move_bandwidth=config.move_bandwidth,
        predict=config.predict,
        promotion_batch=config.promotion_batch,
        retain_most=config.retain_most,
        waste_limit=config.waste_limit,
    )


class Incarnation:
    """Serves from construction to `stop`. Answers HTTP as its `Source`.

    Raises:
        StateDirectoryLocked: another owner lives on the state directory.
        ConfigError: memory, a socket or a port cannot be had. Nothing is left behind then.
    """

    def __init__(self, config: DaemonConfig, origins: dict[str, str] | None = None) -> None:
        self.config = config
        self._origins = origins or {}
        self._supervisor = os.getppid()
        self._stopped = False
        begun = time.perf_counter()
        with ExitStack() as undo:
            plain = config.model_dump(mode="json")
            lock = statedir.StateLock(config.state_dir, statedir.OWNER_LOCK, plain)
            undo.callback(lock.release)
            undo.callback(tidy, config.state_dir)
            removed = statedir.remove_stale_sockets(config.state_dir)
            if removed:
                log.info("removed what a dead owner left: %s", ", ".join(removed))
            self.epoch = statedir.next_epoch(config.state_dir)
            self.metrics_ = Metrics(self.epoch, self._snapshot, config.low_bit_form)
            self.service = Service(
                self._service_config(),
                self._brain,
                self.metrics_,
                open_gpu(config.device),
                self.metrics_.moved,
            )
            self.service.start()
            undo.callback(self.service.stop)
            self._http = HttpServer(self, config.http_host, config.http_port)
            undo.callback(self._http.close)
            record = statedir.HttpRecord(self._http.url, os.getpid(), self.epoch)
            statedir.write_http(config.state_dir, record)
            self._undo = undo.pop_all()
        self.start_seconds = time.perf_counter() - begun
        log.info(
            "epoch %d serves on %s after %.2f s", self.epoch, self.service.loop.endpoint, self.start_seconds
        )

    def stop(self, drain: bool = True, timeout: float = 30.0) -> None:
        """End everything; with `drain`, first stop admitting and finish moves. Twice is once."""
        if drain and not self._stopped and self.service.loop.alive():
            self.drain(timeout)
        self._stopped = True
        self._undo.close()

    def drain(self, timeout: float) -> None:
        """Stop admitting sessions and pages, and wait until no move runs any more, at most `timeout` seconds."""
        self.service.loop.post(events.Draining())
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            snapshot = self._snapshot()
            if snapshot is not None and snapshot.draining and not snapshot.moves_in_flight:
                return
            time.sleep(POLL_SECONDS)

    def info(self) -> dict[str, object]:
        """What a banner and a supervisor need: plain values."""
        service = self.service.config
        return {
            "pid": os.getpid(),
            "epoch": self.epoch,
            "endpoint": self.service.loop.endpoint,
            "url": self._http.url,
            "state_dir": str(self.config.state_dir),
            "device": self.config.device,
            "hbm_bytes": service.hbm_bytes,
            "host_bytes": service.host_bytes,
            "codec": self.config.low_bit_form,
            "middle": self.config.middle,
            "policy": self.config.policy,
            "page_tokens": self.config.page_tokens,
            "config": self.config.model_dump(mode="json"),
            "start_seconds": self.start_seconds,
        }

    # `Source` of the HTTP server ---------------------------------------------------------------------------------

    def metrics(self) -> bytes:
        return self.metrics_.text()

    def health(self) -> Verdict:
        service = self.service
        mover = service.mover
        verdict = loop_verdict(
            service.tick_age(), mover.alive(), mover.busy_seconds(), service.attach.alive()
        )
        if verdict.ok and os.getppid() != self._supervisor:
            return Verdict(
                "Ray is gone, so nothing restarts this owner when it fails; drain it and start again"
            )
        return verdict

    def ready(self) -> Verdict:
        snapshot = self._snapshot()
        if snapshot is None:
            return Verdict("starting")
        if snapshot.draining:
            return Verdict("draining: no new sessions or pages")
        if waiting := self.service.adopting():
            return Verdict(f"waiting for {waiting} workers of the last owner to come back")
        return Verdict()

    def status(self) -> dict[str, object]:
        snapshot = self._snapshot()
        return {
            **self.info(),
            **version(),
            "health": self.health()._asdict(),
            "ready": self.ready()._asdict(),
            "stats": snapshot.flat() if snapshot else {},
            "origins": self._origins,
            "calibrations": dict(self.service.calibrations.fits),
            "digests": snapshot.digests if snapshot else {},
        }

    # Parts -------------------------------------------------------------------------------------------------------

    def _service_config(self) -> ServiceConfig:
        config = self.config
        return ServiceConfig(
            state_dir=config.state_dir,
            hbm_bytes=config.hbm,
            host_bytes=config.host,
            epoch=self.epoch,
            codec=config.low_bit_form,
            page_tokens=config.page_tokens,
            straddle=config.layout == "straddling",
            observing=config.observing,
            lease_seconds=config.lease_seconds,
            heartbeat_seconds=config.heartbeat_seconds,
            digest_layers=(config.digest_layers or ALL_LAYERS) if config.digest_share else 0,
            measure_every=config.measure_every,
            middle=config.middle,
            calibration=config.calibration,
            digest=config.digest,
        )

    def _brain(self, sizes: ServiceConfig) -> BrainLike:
        config = brain_config(self.config, sizes.hbm_bytes, sizes.host_bytes, sizes.epoch)
        return Brain(replace(config, digest_models=sizes.digest_models))

    def _snapshot(self) -> Snapshot | None:
        """The loop's latest; never waits for the loop."""
        return self.service.loop.snapshot


def tidy(state_dir: Path) -> None:
    """Remove what only a running owner needs. Call under the owner's lock.

    The host pool goes too, unless workers still live whose pages a next owner could adopt.
    """
    statedir.remove_stale_sockets(state_dir)
    if left := registry.survivors(state_dir):
        log.warning("%d workers still run: the host pool stays for the next owner", len(left))
        return
    for name in (HOST_FILE, registry.REGISTRY_FILE):
        (state_dir / name).unlink(missing_ok=True)


def reusable_bytes(state_dir: Path) -> int:
    """Bytes that a dead owner's host pool holds, which the next one takes over or removes."""
    try:
        return os.stat(state_dir / HOST_FILE).st_blocks * 512
    except OSError:
        return 0
