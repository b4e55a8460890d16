"""Attention on a device over what a real daemon made of a prompt: exact, low-bit and cold pages at once."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tierkv
from tests.contract.on_device import OnDevice  # skips the module where kernels cannot run
from tests.faults.harness import Owner
from tests.tierkv.tiny_models import CACHE, build, prompt
from tierkv.attention.contract import Cold, ColdPages, ColdSeen, Pages
from tierkv.attention.reference import ReferenceAttention
from tierkv.model import attach
from tierkv.recall import RecallOptions
from tierkv.table import Kind
from tierkv.transformers_cache import TieredCache

PAGE_BYTES = 2 * 2 * 16 * 16 * 4
"""Layers, K and V, tokens, head_dim, float32."""


@pytest.fixture
def client() -> Iterator[tierkv.Client]:
    """Of a daemon with ten pages of HBM."""
    folder = Path(tempfile.mkdtemp(prefix="tierkv-", dir="/dev/shm"))
    owner = Owner(folder, 10 * PAGE_BYTES, 8 << 20)
    opened = tierkv.connect(folder)
    yield opened
    opened.close()
    owner.kill()
    shutil.rmtree(folder)


@pytest.mark.slow
def test_pages_of_every_tier_are_attended_as_the_reference_does(client: tierkv.Client) -> None:
    model, inputs = build("llama-mqa", num_hidden_layers=2), prompt(480)
    attached = attach(model)
    session = attached.open(client)
    cache = TieredCache(session, attention="triton", recall=RecallOptions(read=3))
    ids = inputs["input_ids"]
    for token in (None, 7, 8):
        step = ids if token is None else torch.tensor([[token]])
        with torch.no_grad():
            logits = model(input_ids=step, **{CACHE: cache}).logits
        assert torch.isfinite(logits).all()
    attached.detach()

    session.begin(0)
    rows, cold = session.rows(session.length), session.cold(session.length)
    assert {int(kind) for kind in rows.kinds} == {Kind.EXACT, Kind.QUANTIZED} and len(cold.pages) > 3
    pages = Pages(*rows, np.array([0, len(rows.offsets)]), session.length)
    far = ColdPages(
        cold.digests, cold.offsets, cold.kinds, cold.counts, cold.starts, np.array([0, len(cold.pages)])
    )
    query = 3 * torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(1))
    for layer in range(2):
        found = []
        for implementation in (ReferenceAttention(), OnDevice()):
            mass, count = np.zeros(session.length, np.float32), len(cold.pages)
            seen = ColdSeen(*(np.zeros(n, np.float32) for n in (count, count, 1)))
            got = implementation.decode(
                query, session.pool, pages, layer, 0.25, None, mass, Cold(far, session.host, 3), seen
            )
            found.append((got.out.numpy(), got.log_sum_exp.numpy(), mass, *seen))
        for wanted, got_too in zip(*found, strict=True):
            np.testing.assert_allclose(got_too, wanted, rtol=1e-4, atol=2e-5)
    session.end()
