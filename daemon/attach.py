"""The attach socket: who is here, what they hand back, and when they are gone.

One thread. The kernel says who the peer is (SO_PEERCRED) and a pidfd says when that process has ended, so death is
known and never guessed. A stream that ends while its process lives is a detach; but where HBM is a GPU's, only one that
ends with a farewell, a byte by which a worker says that its kernels are done. The kernel may close a dying process's
streams before its GPU context, whose kernels could still write; its end comes after both. Before a peer has said
something well-formed it holds nothing but one slot of `MAX_STRANGERS`, for `HANDSHAKE_SECONDS`.

What admission means (pools, adoption, the brain) is the `Host`'s business; this file only moves messages,
descriptors and deaths.
"""

from __future__ import annotations

import logging
import os
import re
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from tierkv.daemon.registry import Worker
from tierkv.errors import ConfigError, ProtocolError
from tierkv.handshake import receive, send_frame, socket_path, take_frame
from tierkv.protocol import ATTACH_SOCKET, PROTOCOL_VERSION, Attach, Attached, Refused, decode_attach, encode

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
"""A peer that has not attached by then is cut off."""

MAX_STRANGERS = 64
"""Connections that have not attached yet; more wait in the kernel's backlog."""

REPLY_SECONDS = 1.0
"""A peer that does not take its reply within this time is cut off."""

POLL_SECONDS = 0.2
"""How often deadlines, and survivors that closed their client, are looked at."""

BREATH_SECONDS = 0.05
"""Pause when the process is out of descriptors, so that the thread does not spin."""

SO_PEERPIDFD = 77
"""Linux 6.5: the peer's pidfd from the kernel, free of the race between a pid and its reuse."""

CLIENT_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CREDENTIALS = struct.Struct("3i")


class Peer(NamedTuple):
    pid: int
    uid: int


class Admission(NamedTuple):
    reply: Attached | Refused
    descriptors: tuple[int, ...] = ()


class Host(Protocol):
    """Decides who is admitted. Called from the attach thread."""

    def admit(self, message: Attach, peer: Peer, descriptor: int | None) -> Admission:
        """`descriptor` is an HBM pool that the worker hands back (the attach thread closes it)."""
        ...

    @property
    def on_device(self) -> bool:
        """The HBM pool is a GPU's, where kernels of a worker may still run when its stream has ended."""
        ...

    def left(self, client: str) -> None:
        """The client's process ended or it detached."""
        ...

    def check_survivors(self) -> None:
        """Time passed; survivors may have closed their client."""
        ...

    def survivor_ended(self, client: str) -> None:
        """A worker of an earlier owner ended without coming back."""
        ...


class _Version(msgspec.Struct, tag="attach"):
    """Only the version: readable whatever else another version sends."""

    protocol: int


_version = msgspec.msgpack.Decoder(_Version)


@dataclass(eq=False)
class _Stream:
    connection: socket.socket
    peer: Peer
    pidfd: int
    deadline: float
    client: str = ""
    ended: bool = False
    buffer: bytearray = field(default_factory=bytearray)
    descriptors: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Survivor:
    client: str
    pidfd: int


class AttachServer:
    """Listens on `attach.sock` in the state directory (0600)."""

    def __init__(self, state_dir: Path, host: Host) -> None:
        self._path = socket_path(state_dir, ATTACH_SOCKET)
        self._host = host
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._streams: set[_Stream] = set()
        self._clients: dict[str, _Stream] = {}
        self._survivors: dict[str, _Survivor] = {}
        self._stopping = False
        self._accepting = True
        self._thread: threading.Thread | None = None
        self.refused = 0
        self.errors = 0

    # Lifetime ----------------------------------------------------------------------------------------------------

    def start(self, survivors: Iterable[Worker] = ()) -> None:
        """Bind and start the thread. The caller holds the state directory's lock, so a socket there is stale.

        Raises:
            ConfigError: the socket cannot be made.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            Path(self._path).unlink(missing_ok=True)
            listener.bind(self._path)
            os.chmod(self._path, 0o600)
            listener.listen(128)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise ConfigError(f"the attach socket {self._path} cannot be made: {error}") from None
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        for worker in survivors:
            self._watch_survivor(worker)
        self._thread = threading.Thread(target=self._run, name="tierkv-attach", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """End the thread and close every stream (workers see it and look for a new owner)."""
        self._stopping = True
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join(5.0)
        for stream in list(self._streams):
            self._close(stream)
        for survivor in list(self._survivors.values()):
            self.forget_survivor(survivor.client)
        if self._listener is not None:
            self._listener.close()
            Path(self._path).unlink(missing_ok=True)
        self._selector.close()
        os.close(self._wake)

    # The thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._stopping:
            try:
                for key, _ in self._selector.select(POLL_SECONDS):
                    if isinstance(key.data, _Stream):
                        self._ready(key.data, process_ended=key.fd == key.data.pidfd)
                    elif isinstance(key.data, _Survivor):
                        self._survivor_ended(key.data)
                    elif key.data is not None:
                        key.data()
                if time.monotonic() - looked >= POLL_SECONDS:
                    looked = time.monotonic()
                    self._cut_off_silent(looked)
                    self._host.check_survivors()
            except Exception:  # a bad peer must not end the thread that everybody's life depends on
                self.errors += 1
                log.exception("the attach thread met an error and goes on")

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # out of descriptors: the peer waits in the backlog
            log.error("no peer can be accepted: %s", error)
            time.sleep(BREATH_SECONDS)
            return
        try:
            self._admit_stranger(connection)
        except OSError as error:  # the peer is gone already, or descriptors are short
            connection.close()
            log.info("a peer could not be watched: %s", error)

    def _admit_stranger(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.getuid():
            self._refuse(connection, "config", f"this daemon serves user {os.getuid()}, not {uid}")
            return
        if pid <= 0:
            self._refuse(
                connection, "config", "the worker is in another PID namespace, where its end is not seen"
            )
            return
        stream = _Stream(
            connection, Peer(pid, uid), _pidfd(connection, pid), time.monotonic() + HANDSHAKE_SECONDS
        )
        self._streams.add(stream)
        self._selector.register(connection, selectors.EVENT_READ, stream)
        self._selector.register(stream.pidfd, selectors.EVENT_READ, stream)
        self._pause_accepting()

    def _pause_accepting(self) -> None:
        """Leave further strangers in the kernel's backlog while `MAX_STRANGERS` have not attached."""
        full = len(self._streams) - len(self._clients) >= MAX_STRANGERS
        if full == self._accepting and self._listener is not None and not self._stopping:
            if full:
                self._selector.unregister(self._listener)
            else:
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._accepting = not full

    def _ready(self, stream: _Stream, process_ended: bool) -> None:
        if stream not in self._streams:  # closed earlier in this round
            return
        if process_ended:
            self._gone(stream)
            return
        try:
            data, descriptors = receive(stream.connection, 1)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        stream.descriptors += descriptors
        if not data and stream.client and self._host.on_device:
            self._await_end(stream)
            return
        if not data or stream.client:  # the end; or a word after the one message, which is a farewell
            self._gone(stream)
            return
        stream.buffer += data
        try:
            frame = take_frame(stream.buffer)
            if frame is not None:
                self._attach(stream, _read(frame))
        except ProtocolError as error:
            self._turn_away(stream, Refused(error.code, str(error)))

    def _attach(self, stream: _Stream, message: Attach) -> None:
        previous = self._clients.get(message.client_id)
        if previous is not None and previous.peer.pid != stream.peer.pid:
            self._turn_away(stream, Refused("config", f"client id {message.client_id!r} is taken"))
            return
        if previous is not None:  # its new stream came before the end of its old one
            self._gone(previous)
        handed_back = stream.descriptors[0] if stream.descriptors else None
        admission = self._host.admit(message, stream.peer, handed_back)
        if isinstance(admission.reply, Refused):
            self._turn_away(stream, admission.reply)
            return
        self._close_descriptors(stream)
        stream.client = message.client_id
        self._clients[stream.client] = stream
        self.forget_survivor(stream.client)
        self._pause_accepting()
        if not _send(stream.connection, admission.reply, admission.descriptors):
            self._gone(stream)

    def _turn_away(self, stream: _Stream, reply: Refused) -> None:
        self.refused += 1
        _send(stream.connection, reply)
        self._close(stream)

    def _refuse(self, connection: socket.socket, code: str, message: str) -> None:
        self.refused += 1
        _send(connection, Refused(code, message))
        connection.close()

    def _gone(self, stream: _Stream) -> None:
        client = stream.client
        self._close(stream)
        if client:
            self._host.left(client)

    def _await_end(self, stream: _Stream) -> None:
        """A stream that ended without a farewell: of a process that is dying, whose end says that its kernels have."""
        stream.ended = True
        self._selector.unregister(stream.connection)

    def _close(self, stream: _Stream) -> None:
        self._streams.discard(stream)
        if self._clients.get(stream.client) is stream:
            del self._clients[stream.client]
        if not stream.ended:
            self._selector.unregister(stream.connection)
        self._selector.unregister(stream.pidfd)
        stream.connection.close()
        os.close(stream.pidfd)
        self._close_descriptors(stream)
        self._pause_accepting()

    @staticmethod
    def _close_descriptors(stream: _Stream) -> None:
        for descriptor in stream.descriptors:
            os.close(descriptor)
        stream.descriptors.clear()

    def _cut_off_silent(self, now: float) -> None:
        for stream in [s for s in self._streams if not s.client and s.deadline < now]:
            self._close(stream)

    # Survivors of an earlier owner -------------------------------------------------------------------------------

    def _watch_survivor(self, worker: Worker) -> None:
        try:
            survivor = _Survivor(worker.client_id, os.pidfd_open(worker.pid))
        except OSError:
            self._host.survivor_ended(worker.client_id)
            return
        self._survivors[worker.client_id] = survivor
        self._selector.register(survivor.pidfd, selectors.EVENT_READ, survivor)

    def _survivor_ended(self, survivor: _Survivor) -> None:
        if self._survivors.get(survivor.client) is survivor:
            self.forget_survivor(survivor.client)
            self._host.survivor_ended(survivor.client)

    def forget_survivor(self, client: str) -> None:
        """Stop watching; for the attach thread only."""
        survivor = self._survivors.pop(client, None)
        if survivor is not None:
            self._selector.unregister(survivor.pidfd)
            os.close(survivor.pidfd)


def _pidfd(connection: socket.socket, pid: int) -> int:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4)
        return int.from_bytes(raw, "little")
    except OSError:
        return os.pidfd_open(pid)


def _read(frame: bytes) -> Attach:
    """The message, or a `ProtocolError` that names both versions where they differ."""
    try:
        version = _version.decode(frame).protocol
    except msgspec.DecodeError as error:
        raise ProtocolError(f"attach message is not readable: {error}") from None
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the worker speaks protocol {version}, this daemon {PROTOCOL_VERSION}; install the same tierkv on both"
        )
    message = decode_attach(frame)
    if not CLIENT_ID.fullmatch(message.client_id):
        raise ProtocolError(f"client id {message.client_id[:80]!r} is not 1 to 64 of A-Z a-z 0-9 _ . -")
    return message


def _send(connection: socket.socket, reply: Attached | Refused, descriptors: tuple[int, ...] = ()) -> bool:
    """Whether the peer took the reply."""
    try:
        connection.settimeout(REPLY_SECONDS)
        send_frame(connection, encode(reply), descriptors)
        connection.setblocking(False)
        return True
    except OSError:
        return False
