"""A daemon in this process, with the real brain, and its clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import tierkv
from tests.faults.pages import SMALL
from tierkv import Client, Session
from tierkv.daemon.brain import Brain, BrainConfig
from tierkv.daemon.gpu import Gpu
from tierkv.daemon.service import Service, ServiceConfig

PAGE = SMALL.page_bytes


def brain(config: ServiceConfig) -> Brain:
    return Brain(
        BrainConfig(
            config.hbm_bytes, config.host_bytes, config.epoch, config.codec,
            middle=config.middle, page_tokens=config.page_tokens, straddle=config.straddle,
        ),
        validate=True,
    )  # fmt: skip


class World:
    """A state directory, and who works on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open: list[Service | Client] = []

    def service(
        self, hbm: int = 64, host: int = 200, straddle: bool = False, codec: str = "k3v2", middle: str = "",
        gpu: Gpu | None = None, epoch: int = 1,
    ) -> Service:  # fmt: skip
        config = ServiceConfig(
            self.folder,
            hbm * PAGE,
            host * PAGE,
            epoch,
            codec,
            straddle=straddle,
            heartbeat_seconds=0.5,
            measure_every=1,
            middle=middle,
        )
        service = Service(config, brain, gpu=gpu)
        service.start()
        self.open.append(service)
        return service

    def client(self, timeout: float = 10.0, reserve_ahead: int = 1) -> Client:
        client = tierkv.connect(self.folder, timeout, reserve_ahead=reserve_ahead)
        self.open.append(client)
        return client


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def table(session: Session) -> list[tuple[int, int]]:
    """(region, count) of the committed pages."""
    return [(entry.region, entry.count) for entry in session.state()[0].table.pages]


def settled(client: Client, session: Session) -> dict[str, float]:
    """The daemon's numbers of the session, once it has heard everything."""
    return client.stats(session.id)
