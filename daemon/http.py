"""What the owner tells over HTTP: /metrics /health /ready /status /version. Read-only, on loopback by default.

Each request has its own thread and asks a `Source` that must answer from what it already knows, without waiting for
the loop: so /health answers also when the loop, the mover or another handler is stuck, and then says so.
"""

from __future__ import annotations

import importlib.metadata
import logging
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Protocol

import msgspec

from tierkv.errors import ConfigError
from tierkv.protocol import PROTOCOL_VERSION

log = logging.getLogger(__name__)

CLIENT_SECONDS = 5.0
"""A client that sends or reads nothing for so long is dropped."""

POLL_SECONDS = 0.05
"""How soon `close` is noticed."""

MAX_CLIENTS = 32
"""Requests served at once; more are answered 503."""

LOOP_STUCK_SECONDS = 5.0
"""Age of the last loop tick beyond which the daemon is not healthy (ticks are tens of milliseconds apart)."""

MOVE_STUCK_SECONDS = 30.0
"""Time on one move beyond which the daemon is not healthy (a page takes milliseconds; a first one compiles kernels)."""


class Verdict(NamedTuple):
    """`reason` is empty exactly when all is well."""

    reason: str = ""

    @property
    def ok(self) -> bool:
        return not self.reason


class Source(Protocol):
    """Where answers come from. No method may block on the loop."""

    def metrics(self) -> bytes:
        """Prometheus text format."""
        ...

    def health(self) -> Verdict:
        """Is this process able to do its work?"""
        ...

    def ready(self) -> Verdict:
        """Does it take new sessions now?"""
        ...

    def status(self) -> dict[str, object]:
        """Plain values, for people and for `tierkv status`."""
        ...


def loop_verdict(tick_age: float, mover_alive: bool, mover_busy: float, attach_alive: bool) -> Verdict:
    """Health from what can be stuck or dead.

    Args:
        tick_age: seconds since the loop's last tick.
        mover_busy: seconds that the mover has spent on its present move.
    """
    if tick_age > LOOP_STUCK_SECONDS:
        return Verdict(f"the loop has not ticked for {tick_age:.1f} s (allowed: {LOOP_STUCK_SECONDS:g} s)")
    if not mover_alive:
        return Verdict("the mover thread has ended: no page can change its tier")
    if mover_busy > MOVE_STUCK_SECONDS:
        return Verdict(
            f"the mover has spent {mover_busy:.0f} s on one move (allowed: {MOVE_STUCK_SECONDS:g} s)"
        )
    if not attach_alive:
        return Verdict("the attach thread has ended: no worker can come or be noticed when it dies")
    return Verdict()


def version() -> dict[str, object]:
    return {"version": importlib.metadata.version("tierkv"), "protocol": PROTOCOL_VERSION}


class HttpServer:
    """Serves `source` from construction to `close`, in threads of its own.

    Raises:
        ConfigError: the address cannot be had.
    """

    def __init__(self, source: Source, host: str = "127.0.0.1", port: int = 0) -> None:
        handler = type("Handler", (_Handler,), {"source": source, "room": threading.Semaphore(MAX_CLIENTS)})
        try:
            kind = _Server6 if ":" in host else _Server
            self._server = kind((host, port), handler)
        except OSError as error:
            raise ConfigError(
                f"http_host = {host}, http_port = {port}: {error}; choose another --http-port (0: any free one)"
            ) from None
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_SECONDS,), name="tierkv-http", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLIENT_SECONDS)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a stuck handler must not keep the daemon from ending

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("HTTP client %s went away", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    source: Source
    room: threading.Semaphore
    timeout = CLIENT_SECONDS
    server_version = "tierkv"
    sys_version = ""

    def do_GET(self) -> None:
        if not self.room.acquire(blocking=False):
            return self._answer(503, "text/plain", b"too many requests at once\n")
        try:
            route = _ROUTES.get(self.path.partition("?")[0])
            if route is None:
                return self._answer(404, "text/plain", f"try {' '.join(_ROUTES)}\n".encode())
            try:
                status, kind, body = route(self.source)
            except (
                Exception
            ) as error:  # whatever a source raises, the client gets an answer and the log the reason
                log.exception("HTTP %s failed", self.path)
                status, kind, body = 500, "text/plain", f"{type(error).__name__}: {error}\n".encode()
            self._answer(status, kind, body)
        finally:
            self.room.release()

    do_HEAD = do_GET

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        log.debug("%s " + format, self.address_string(), *args)


def _verdict(verdict: Verdict) -> tuple[int, str, bytes]:
    said = {"ok": verdict.ok, "reason": verdict.reason}
    return (200 if verdict.ok else 503), "application/json", msgspec.json.encode(said)


_ROUTES: dict[str, Callable[[Source], tuple[int, str, bytes]]] = {
    "/metrics": lambda source: (200, "text/plain; version=0.0.4; charset=utf-8", source.metrics()),
    "/health": lambda source: _verdict(source.health()),
    "/ready": lambda source: _verdict(source.ready()),
    "/status": lambda source: (200, "application/json", msgspec.json.encode(source.status())),
    "/version": lambda source: (200, "application/json", msgspec.json.encode(version())),
}
