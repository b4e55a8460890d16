"""A daemon whose low-bit pages have a codec of their own for one layer: what a worker then finds and attends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.faults.pages import SMALL, step, token_values
from tests.tierkv.local_daemon import World, until
from tierkv import attention
from tierkv.attention.contract import Pages
from tierkv.table import Kind

TOKENS = 30 * SMALL.page_tokens
LIMITS = {"k3v2": (0.0346, 0.1176), "kivi2": (0.15, 0.25)}
"""Error ratios of Gaussian keys and values: k3v2 loses at most what a Lloyd-Max quantizer does (Max 1960, table I);
kivi2 is coarser, and what a block of the wrong place would say is off by 1 and more."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for opened in reversed(world.open):
        opened.stop() if hasattr(opened, "stop") else opened.close()


@pytest.mark.parametrize(
    ("codec", "layers"), [("k3v2,1=kivi2", ("k3v2", "kivi2")), ("k3v2,0=kivi2", ("kivi2", "k3v2"))]
)
def test_each_layer_of_a_low_bit_page_is_read_in_its_own_codec(
    world: World, codec: str, layers: tuple[str, str]
) -> None:
    service = world.service(hbm=16, codec=codec)
    client = world.client(timeout=60)  # the first encoding may wait for a compiler
    session = client.open(SMALL, "model")
    for _ in range(TOKENS // SMALL.page_tokens):
        step(client, session, 1, SMALL.page_tokens)
    session.begin(0)
    rows = session.rows(session.length)
    assert np.count_nonzero(rows.kinds == Kind.QUANTIZED) > 10
    exact = np.stack(
        [token_values(SMALL, 1, token) for token in range(TOKENS)]
    )  # [tokens, layers, 2, heads, dim]
    seen = np.concatenate([np.arange(s, s + n) for s, n in zip(rows.starts, rows.counts, strict=True)])
    low = np.repeat(rows.kinds == Kind.QUANTIZED, rows.counts)
    pages = Pages(*rows, np.array([0, len(rows.offsets)]), session.length)
    cpu = attention.get("cpu")
    for layer, name in enumerate(layers):
        # A query that is a key times 100 attends that token alone: what comes out is its value as the page has it.
        errors = []
        for token in seen[low][::40]:
            key, value = torch.from_numpy(exact[token, layer])
            out = cpu.decode(100 * key[None], session.pool, pages, layer, 1.0).out[0]
            errors.append(float(((out - value) ** 2).sum() / (value**2).sum()))
        assert 0 < np.mean(errors) < 2 * LIMITS[name][1]
    session.end()
    until(lambda: service.brain.snapshot().flat()["measured_pages"] > 10)
    flat = service.brain.snapshot().flat()
    for side, measured in enumerate(("keys", "values")):
        most = np.mean([LIMITS[name][side] for name in layers])
        assert 0 < flat[f"quantization_error_{measured}"] < most
