"""A state directory that a test has a daemon and clients on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tierkv.local_daemon import World
from tierkv import Client


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        world = World(Path(folder))
        yield world
        for thing in reversed(world.open):
            (thing.close if isinstance(thing, Client) else thing.stop)()
