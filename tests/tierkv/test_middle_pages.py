"""A daemon with a middle form: what a worker then finds and attends, exact, middle and low-bit pages at once."""

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

PAGES = 60
TOKENS = PAGES * SMALL.page_tokens
LIMITS = {Kind.MIDDLE: 0.012, Kind.QUANTIZED: 2 * 0.1176}
"""Error ratios of Gaussian values. k3v2's is a Lloyd-Max quantizer's of 2 bits (Max 1960, table I), doubled, since with
keys of 3 bits another token may answer. A uniform quantizer of 15 steps over the range of 64 values, two and a half
deviations to each side, loses (5 / 15)^2 / 12 = .0093: nf4, with narrower steps where values are dense, may not lose a
third more. A page read in the wrong form or place is off by 1 and more."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for opened in reversed(world.open):
        opened.stop() if hasattr(opened, "stop") else opened.close()


def test_a_worker_attends_pages_of_three_forms_in_place(world: World) -> None:
    service = world.service(hbm=16, middle="nf4")
    client = world.client(timeout=60)  # the first encoding may wait for a compiler
    assert client.middle == "nf4"
    session = client.open(SMALL, "model")
    for _ in range(PAGES):
        step(client, session, 1, SMALL.page_tokens)
    until(lambda: service.brain.snapshot().flat()["pages_middle"] > 10)
    session.begin(0)
    rows = session.rows(session.length)
    kinds = set(rows.kinds.tolist())
    assert kinds == {Kind.EXACT, Kind.MIDDLE, Kind.QUANTIZED}
    exact = np.stack([token_values(SMALL, 1, token) for token in range(TOKENS)])
    seen = np.concatenate([np.arange(s, s + n) for s, n in zip(rows.starts, rows.counts, strict=True)])
    forms = np.repeat(rows.kinds, rows.counts)
    pages = Pages(*rows, np.array([0, len(rows.offsets)]), session.length)
    cpu = attention.get("cpu")
    for kind, most in LIMITS.items():
        # A query that is a key times 100 attends that token alone: what comes out is its value as the page has it.
        errors = []
        for token in seen[forms == kind][::11]:
            for layer in range(SMALL.num_layers):
                key, value = torch.from_numpy(exact[token, layer])
                out = cpu.decode(100 * key[None], session.pool, pages, layer, 1.0).out[0]
                errors.append(float(((out - value) ** 2).sum() / (value**2).sum()))
        assert 0 < np.mean(errors) < most, kind.name
    session.end()


def test_pages_of_the_middle_form_are_read_from_their_exact_copies_where_that_is_asked_for(
    world: World,
) -> None:
    service = world.service(hbm=16, middle="nf4")
    client = world.client(timeout=60)
    session = client.open(SMALL, "model")
    for _ in range(PAGES):
        step(client, session, 1, SMALL.page_tokens)
    until(lambda: service.brain.snapshot().flat()["pages_middle"] > 10)
    session.begin(0)
    packed = np.count_nonzero(session.rows(session.length).kinds != Kind.EXACT)
    here, far = session.exact(session.length, PAGES) or pytest.fail("nothing is packed")
    assert set(here.kinds) == {Kind.EXACT} and set(far.kinds) == {Kind.EXACT}
    assert len(far.pages) == packed
    session.end()
