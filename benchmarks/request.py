"""How long a request of a worker takes, beside a bare pyzmq DEALER/ROUTER round trip of as many bytes.

Both ends of both arms are processes of their own over an ipc socket, one request outstanding at a time. What tierkv
adds is a typed message each way, the lease, epochs, remembered answers, the brain, and the client's own thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import zmq

import tierkv
from tierkv.benchmarks import pairs, processes
from tierkv.geometry import Geometry
from tierkv.protocol import Ping, Request, Reserve, encode

GOAL_RATIO = 1.5
BLOCK = 25
"""Requests a sample; the sample is their median, since a single one may meet a scheduling hiccup."""

GEOMETRY = Geometry(2, 2, 64, "bfloat16")
HBM_PAGES = 4096


def run(quick: bool = False) -> dict[str, pairs.Figures]:
    """Microseconds a request; see the package for keys."""
    count = 4 if quick else 120
    hbm = HBM_PAGES * GEOMETRY.page_bytes
    with (
        processes.service(hbm, hbm) as state_dir,
        processes.echo() as endpoint,
        tierkv.connect(state_dir, reserve_ahead=0) as client,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.set(zmq.LINGER, 0)
        dealer.connect(endpoint)
        reserving = _Reserving(client)
        figures = {}
        for name, ours, op in (
            ("ping", client.ping, Ping()),
            ("reserve", reserving.once, Reserve(reserving.session.id, 1)),
        ):
            payload = encode(Request(id=1, epoch=client.epoch, op=op, deadline=client.timeout, seen={}))
            peer = _block(_echo(dealer, payload))
            figures[name] = pairs.interleave(_block(ours), peer, count, warm_up=max(1, count // 10))
            figures[name]["payload_bytes"] = len(payload)
    return figures


def _block(once: Callable[[], float]) -> pairs.Sample:
    """The median of `BLOCK` requests, in microseconds."""
    return lambda: 1e6 * statistics.median(once() for _ in range(BLOCK))


def _echo(dealer: zmq.Socket[bytes], payload: bytes) -> Callable[[], float]:
    def once() -> float:
        start = time.perf_counter()
        dealer.send_multipart([payload])
        dealer.recv_multipart()
        return time.perf_counter() - start

    return once


class _Reserving:
    """A session that needs one page more each time: the request that a prefill waits for."""

    def __init__(self, client: tierkv.Client) -> None:
        self.client = client
        self.session = client.open(GEOMETRY, "bench", ladder="exact")
        self.tokens = np.arange(GEOMETRY.page_tokens, dtype=np.int32)

    def once(self) -> float:
        """Seconds of the request alone; what precedes and follows it is not timed, and answered by then."""
        tokens = GEOMETRY.page_tokens
        if self.session.length >= tokens * HBM_PAGES // 2:
            self.session.crop(0)
        start = time.perf_counter()
        self.session.reserve(tokens)
        seconds = time.perf_counter() - start
        self.session.begin(tokens)
        self.session.commit(self.tokens)
        self.session.end()
        self.client.ping()  # the commit is carried out when this is answered
        return seconds
