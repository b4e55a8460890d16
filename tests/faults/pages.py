"""K/V that tells where it belongs: token `t` of a run with seed `s` has values that only (s, t) gives."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tierkv import Client, Geometry, Session
from tierkv.table import Kind

SMALL = Geometry(2, 1, 32, "float32", 16)
"""8 KiB a page."""

WIDE = Geometry(1, 2, 64, "float32", 16)
"""16 KiB a page."""


def token_values(geometry: Geometry, seed: int, token: int) -> np.ndarray:
    """`[layers, 2, kv_heads, head_dim]`: finite, and different for every (seed, token)."""
    shape = (geometry.num_layers, 2, geometry.num_kv_heads, geometry.head_dim)
    return np.random.default_rng((seed, token)).standard_normal(shape).astype(np.float32)


def write(client: Client, session: Session, seed: int, start: int, stop: int) -> None:
    """Put tokens `[start, stop)` where the session says they belong."""
    g = session.geometry
    for token, offset, slot in zip(range(start, stop), *session.slots(start, stop), strict=True):
        page = client.hbm()[offset : offset + g.page_bytes].view(np.float32).reshape(g.shape)
        page[:, :, :, slot] = token_values(g, seed, token)


def step(client: Client, session: Session, seed: int, tokens: int, steps: int = 0) -> None:
    session.begin(tokens)
    write(client, session, seed, session.length - tokens, session.length)
    session.commit(steps=steps)
    session.end()


class Found(NamedTuple):
    """Pages by where their exact bytes were found, and how many of them were wrong."""

    hbm: int
    host: int
    none: int
    wrong: int


def check(client: Client, session: Session, seed: int) -> Found:
    """Compare every exact replica of the committed table, in either pool, with what was written.

    Within a step of no tokens: else a plan could be adopted, and memory be reused, while this looks.
    """
    g = session.geometry
    session.begin(0)
    counts = {"hbm": 0, "host": 0, "none": 0, "wrong": 0}
    start = 0
    for entry in session._residency.table.entries(session.horizon):
        replicas = []
        if entry.kind == Kind.EXACT:
            replicas.append(("hbm", client.hbm(), entry.offset))
        if entry.host_kind == Kind.EXACT:
            replicas.append(("host", client.host(), entry.host_offset))
        for name, pool, offset in replicas:
            counts[name] += 1
            page = pool[offset : offset + g.page_bytes].view(np.float32).reshape(g.shape)
            for slot in range(entry.count):
                if not np.array_equal(page[:, :, :, slot], token_values(g, seed, start + slot)):
                    counts["wrong"] += 1
                    break
        counts["none"] += not replicas
        start += entry.count
    assert start == session.horizon
    session.end()
    return Found(**counts)
