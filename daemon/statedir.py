"""The state directory: one owner at a time, and a number that tells its incarnations apart.

Two locks (`flock`, so the kernel releases them with the process, however it ends):

- `lock`: held by the owner, the process that serves. The fence against two owners is this lock, not Ray.
- `daemon.lock`: held by `tierkv-daemon` for its whole life, so that another one cannot slip in while Ray restarts a
  crashed owner.

Whoever holds a lock writes who it is into the file, which is what a second one quotes. `epoch` holds the number of
owner starts and survives all of them; it is replaced atomically, under the lock.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from tierkv.daemon.registry import boot_id
from tierkv.errors import ConfigError, StateDirectoryLocked
from tierkv.protocol import ATTACH_SOCKET, REQUEST_SOCKET

OWNER_LOCK = "lock"
DAEMON_LOCK = "daemon.lock"
EPOCH = "epoch"
HTTP = "http.json"
SOCKETS = (ATTACH_SOCKET, REQUEST_SOCKET)


T = TypeVar("T", bound=msgspec.Struct)


class Holder(msgspec.Struct, frozen=True):
    """Who holds a lock, as written into it. `config` is the configuration as plain values."""

    pid: int
    host: str
    boot_id: str
    started: float
    """Seconds since 1970."""
    config: dict[str, object] = {}


class EpochRecord(msgspec.Struct, frozen=True):
    epoch: int
    boot_id: str


class HttpRecord(msgspec.Struct, frozen=True):
    """Where the owner's HTTP server listens, for the command line to find."""

    url: str
    pid: int
    epoch: int


def make_private(state_dir: Path) -> None:
    """Create the directory for this user alone, or check that it is so.

    Raises:
        ConfigError: it belongs to someone else, is no directory, or cannot be created.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(state_dir)
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(
                f"state_dir = {state_dir} is a link, not a directory; choose another --state-dir"
            )
        if found.st_uid != os.getuid():
            raise ConfigError(
                f"state_dir = {state_dir} belongs to user {found.st_uid}, not to you (user {os.getuid()}); "
                "choose another --state-dir"
            )
        if stat.S_IMODE(found.st_mode) != 0o700:
            state_dir.chmod(0o700)
    except OSError as error:
        raise ConfigError(
            f"state_dir = {state_dir} cannot be used: {error}; choose another --state-dir"
        ) from None


class StateLock:
    """One of the two locks, held from construction to `release` (or the end of the process).

    The file is never unlinked: someone waiting on a removed file would lock what nobody else sees.

    Raises:
        StateDirectoryLocked: someone else holds it; names them and what their configuration differs in.
    """

    def __init__(
        self, state_dir: Path, name: str = OWNER_LOCK, config: dict[str, object] | None = None
    ) -> None:
        make_private(state_dir)
        self.path = state_dir / name
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise StateDirectoryLocked(
                _refusal(state_dir, read_holder(state_dir, name), config or {})
            ) from None
        self.holder = Holder(os.getpid(), socket.gethostname(), boot_id(), time.time(), config or {})
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, msgspec.json.encode(self.holder), 0)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> StateLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def read_holder(state_dir: Path, name: str = OWNER_LOCK) -> Holder | None:
    """Who last took the lock; `None` when nobody did, or the file is being written."""
    return _read(state_dir / name, Holder)


def next_epoch(state_dir: Path) -> int:
    """Count one more owner start and return the number. Call under the owner's lock.

    Raises:
        ConfigError: the file is damaged; a guess could repeat an epoch that workers have seen.
    """
    path = state_dir / EPOCH
    last = _read(path, EpochRecord)
    if last is None and path.exists():
        raise ConfigError(
            f"{path} is damaged; stop all workers of this daemon, then remove it to start over at 1"
        )
    epoch = last.epoch + 1 if last else 1
    _replace(path, msgspec.json.encode(EpochRecord(epoch, boot_id())))
    return epoch


def read_epoch(state_dir: Path) -> EpochRecord | None:
    """The last owner start and its boot; `None` before the first."""
    return _read(state_dir / EPOCH, EpochRecord)


def remove_stale_sockets(state_dir: Path) -> list[str]:
    """Remove sockets and `http.json` that a dead owner left behind; names what went. Call under the owner's lock.

    Only the lock's holder listens here, so under the lock nothing of these can be alive.
    """
    removed = []
    for name in (*SOCKETS, HTTP):
        path = state_dir / name
        if path.exists() or path.is_socket():
            path.unlink()
            removed.append(name)
    return removed


def write_http(state_dir: Path, record: HttpRecord) -> None:
    _replace(state_dir / HTTP, msgspec.json.encode(record))


def read_http(state_dir: Path) -> HttpRecord | None:
    """Where the owner answers HTTP; `None` when no owner says so."""
    return _read(state_dir / HTTP, HttpRecord)


def differences(theirs: dict[str, object], ours: dict[str, object]) -> str:
    """`hbm (4096 there, 8192 here), ...` for settings that both have; empty when they agree.

    Of tables with the same keys, the entries: `policy_settings.half_life.plan (52.0 there, 60.0 here)`.
    """
    return ", ".join(_differences(theirs, ours, ""))


def _differences(theirs: dict[str, object], ours: dict[str, object], within: str) -> Iterator[str]:
    for key in sorted(theirs.keys() & ours.keys()):
        there, here = theirs[key], ours[key]
        if isinstance(there, dict) and isinstance(here, dict) and there.keys() == here.keys():
            yield from _differences(there, here, f"{within}{key}.")
        elif there != here:
            yield f"{within}{key} ({there!r} there, {here!r} here)"


def _refusal(state_dir: Path, holder: Holder | None, config: dict[str, object]) -> str:
    if holder is None:
        return f"another daemon is just starting on {state_dir}; wait for it, or choose another --state-dir"
    differ = differences(holder.config, config)
    compared = f"differs from yours in {differ}" if differ else "is the same as yours"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.started))
    return (
        f"the state directory {state_dir} belongs to process {holder.pid} on {holder.host}, which runs since {since}; "
        f"its configuration {compared}. Use that daemon, stop it, or choose another --state-dir"
    )


def _replace(path: Path, content: bytes) -> None:
    """The file has either its old content or the new one, whatever happens."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    with open(fresh, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None
