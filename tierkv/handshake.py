"""The attach handshake: one length-prefixed message each way over a Unix stream, descriptors beside it.

A frame is a little-endian u32 length and that many bytes of msgpack. Descriptors travel as SCM_RIGHTS ancillary data
with the first byte of a frame. Both sides use these functions; the daemon's side reads without blocking and parses
what it has with `take_frame`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from tierkv import errors
from tierkv.protocol import (
    ATTACH_SOCKET,
    FAREWELL,
    MAX_HEADER_BYTES,
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Refused,
    decode_attach_reply,
    encode,
)

LENGTH = struct.Struct("<I")
PATH_LIMIT = 107
"""Longest path of a Unix socket on Linux, in bytes."""

LEFT_PREFIX = "left."
"""`left.<client id>` in the state directory: this client closed while no owner was there and will not come back."""

_CHUNK = 1 << 16


def default_state_dir() -> Path:
    """`$TIERKV_STATE_DIR`, else `/dev/shm/tierkv-<uid>`."""
    return Path(os.environ.get("TIERKV_STATE_DIR") or f"/dev/shm/tierkv-{os.getuid()}")


def socket_path(state_dir: Path, name: str) -> str:
    """Path of a socket in the state directory. Raises `ConfigError` when it is longer than Linux takes."""
    path = str(state_dir / name)
    if len(os.fsencode(path)) > PATH_LIMIT:
        raise errors.ConfigError(
            f"{path} has {len(os.fsencode(path))} bytes; a socket's path may have {PATH_LIMIT}: "
            "choose a shorter state directory"
        )
    return path


def send_frame(stream: socket.socket, message: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send one frame, whole."""
    raw = LENGTH.pack(len(message)) + message
    sent = socket.send_fds(stream, [raw[:_CHUNK]], list(descriptors)) if descriptors else 0
    if sent < len(raw):  # even an empty send would fail where the peer has answered and closed already
        stream.sendall(memoryview(raw)[sent:])


def take_frame(buffer: bytearray) -> bytes | None:
    """Remove and return the first frame of `buffer`; None while it is incomplete.

    Raises:
        ProtocolError: the length is beyond `MAX_HEADER_BYTES`.
    """
    if len(buffer) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(buffer)
    if length > MAX_HEADER_BYTES:
        raise errors.ProtocolError(f"attach frame of {length:,} bytes; at most {MAX_HEADER_BYTES:,} are read")
    if len(buffer) < LENGTH.size + length:
        return None
    frame = bytes(buffer[LENGTH.size : LENGTH.size + length])
    del buffer[: LENGTH.size + length]
    return frame


def receive(stream: socket.socket, limit: int) -> tuple[bytes, list[int]]:
    """What one `recvmsg` gives: bytes (empty at the end of the stream) and at most `limit` descriptors."""
    data, descriptors, _, _ = socket.recv_fds(stream, _CHUNK, limit, socket.MSG_CMSG_CLOEXEC)
    return data, list(descriptors)


def attach(
    state_dir: Path, message: Attach, hbm: int | None, timeout: float
) -> tuple[socket.socket, Attached, int, int]:
    """Worker side: connect, attach (handing `hbm` back on re-attach), and receive the pools.

    Returns:
        The open stream, the daemon's answer, and the descriptors of the HBM and the host pool (the caller's to close).

    Raises:
        OwnerUnavailable: nobody listens, answers in time, or may admit yet (retryable).
        TierKVError: refused; the class says why.
    """
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptors: list[int] = []
    try:
        stream.settimeout(max(timeout, 0.001))
        stream.connect(socket_path(state_dir, ATTACH_SOCKET))
        send_frame(stream, encode(message), () if hbm is None else (hbm,))
        buffer = bytearray()
        while (frame := take_frame(buffer)) is None:
            data, more = receive(stream, 2)
            descriptors += more
            if not data:
                raise errors.OwnerUnavailable("the daemon closed the attach stream without an answer; retry")
            buffer += data
        reply = decode_attach_reply(frame)
        if isinstance(reply, Refused):
            raise errors.from_wire(reply.code, reply.message)
        if reply.protocol != PROTOCOL_VERSION:
            raise errors.ProtocolError(
                f"the daemon speaks protocol {reply.protocol}, this is {PROTOCOL_VERSION}"
            )
        if len(descriptors) != 2:
            raise errors.ProtocolError(
                f"{len(descriptors)} descriptors came with the attach reply instead of 2"
            )
        stream.setblocking(False)
        return stream, reply, descriptors[0], descriptors[1]
    except BaseException as error:
        stream.close()
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, OSError):
            raise errors.OwnerUnavailable(
                f"no daemon answers at {state_dir / ATTACH_SOCKET} ({error}); is tierkv-daemon running there?"
            ) from None
        raise


def say_farewell(stream: socket.socket) -> None:
    """No kernel of this worker touches the HBM pool any more; the stream is closed next."""
    with contextlib.suppress(OSError):
        stream.send(FAREWELL)


def leave(state_dir: Path, client_id: str) -> None:
    """Tell the next owner not to wait for this client."""
    with contextlib.suppress(OSError):
        (state_dir / f"{LEFT_PREFIX}{client_id}").touch(mode=0o600)
