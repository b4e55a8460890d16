"""A Ray of our own for a daemon without a cluster: small, private, and gone with the daemon.

Its folder (sockets, logs) lies in the system's temporary folder. A reaper (`reaper.py`) waits for the end of this
process, however it ends, and clears up after it; `ray.json` in the state directory names the folder for the next
daemon. Other users and machines cannot use this Ray: it wants a token that lies in the state directory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from tierkv.daemon import reaper
from tierkv.errors import ConfigError

RECORD = "ray.json"
TOKEN = "ray.token"
PREFIX = "tierkv-ray-"
CONNECT_SECONDS = 5.0

OBJECT_STORE_BYTES = 80_000_000
"""About Ray's minimum (75 MiB); no page passes through it."""

REAP_SECONDS = 2 * reaper.GRACE_SECONDS

MAX_TEMP_CHARACTERS = 30
"""Ray's own sockets add about 65 characters to this folder, and a socket's path may have 107."""


class Record(msgspec.Struct, frozen=True):
    folder: str
    address: str = ""
    """For `--ray-address`; who uses it needs RAY_AUTH_TOKEN_PATH too."""


QUIET: dict[str, Any] = {
    "namespace": "tierkv",
    "log_to_driver": False,
    "configure_logging": False,
    "logging_level": "error",
}


def quiet_ray() -> None:
    """What every Ray of ours is told before it is imported: no usage statistics, no tips, GPUs left visible."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # an actor without num_gpus still sees them
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")


def hush() -> None:
    """Keep Ray's notices off our output; that an owner died, the daemon says itself. Call after `ray.init`."""
    with contextlib.suppress(
        ImportError, AttributeError
    ):  # no public way exists; elsewhere it is just louder
        from ray._private.ray_logging import global_worker_stdstream_dispatcher

        global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")


class JoinedRay:
    """A connection to a cluster that somebody else runs. What was started there stays when it ends.

    Raises:
        ConfigError: nobody answers there.
    """

    def __init__(self, address: str) -> None:
        try:
            _knock(address)
            import ray

            ray.init(address=address, **QUIET)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"no Ray cluster answers at ray_address = {address} ({str(error).splitlines()[0]}); "
                "check --ray-address, or leave it out for a local Ray"
            ) from None
        hush()

    def stop(self) -> None:
        import ray

        ray.shutdown()


def _knock(address: str) -> None:
    """Ray retries an address where nobody listens for many minutes. Raises `OSError`, `ValueError`."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


class LocalRay:
    """Runs from construction to `stop`, as children of this process. Holds the daemon's lock meanwhile: the caller."""

    def __init__(self, state_dir: Path) -> None:
        self._record = state_dir / RECORD
        self._token = state_dir / TOKEN
        remove_leftovers(state_dir)
        temp = tempfile.gettempdir()
        self.folder = Path(
            tempfile.mkdtemp(prefix=PREFIX, dir=temp if len(temp) <= MAX_TEMP_CHARACTERS else "/tmp")
        )
        self._write(Record(str(self.folder)))
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", reaper.__file__, str(self.folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(32))
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(self._token)
        try:
            import ray

            context = ray.init(
                num_cpus=1,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(self.folder),
                **QUIET,
            )
            hush()
            self.address = str(context.address_info["gcs_address"])
            self._write(Record(str(self.folder), self.address))
        except BaseException:
            self.stop()
            raise

    def _write(self, record: Record) -> None:
        self._record.write_bytes(msgspec.json.encode(record))

    def stop(self) -> None:
        """End Ray's processes and remove its folder. Twice is once."""
        import ray

        ray.shutdown()
        self._reaper.communicate(timeout=REAP_SECONDS)
        self._record.unlink(missing_ok=True)
        self._token.unlink(missing_ok=True)


def remove_leftovers(state_dir: Path) -> Path | None:
    """End what a killed daemon's Ray left, and remove its folder; returns it. Call under the daemon's lock.

    Usually the reaper was there before; this is for when it was killed too.
    """
    record = state_dir / RECORD
    try:
        folder = Path(msgspec.json.decode(record.read_bytes(), type=Record).folder)
    except (OSError, msgspec.DecodeError):
        return None
    if folder.name.startswith(PREFIX):  # a damaged record must not end or remove anything else
        reaper.reap(folder, grace=0.0)
    record.unlink(missing_ok=True)
    return folder
