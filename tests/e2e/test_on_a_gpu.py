"""The whole of it on a fake GPU: a daemon process that serves there, a worker that maps it, a model that attends it.

Kernels are interpreted on both sides, which is why these are two processes: the interpreter is one at a time.
"""

from __future__ import annotations

import gc
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import tierkv
from tests import triton_device  # noqa: F401  # skips the module where kernels cannot run
from tests.fake_cuda import GRANULE, FakeDevice, FakeDriver
from tests.faults.harness import Owner, holds_nothing, until
from tests.tierkv.tiny_models import CACHE, build, prompt
from tierkv.attention.contract import Attended, Cold, ColdSeen, Pages, PoolView, Sums
from tierkv.attention.reference import ReferenceAttention
from tierkv.attention.triton_attention import TritonAttention
from tierkv.model import attach
from tierkv.recall import RecallOptions
from tierkv.table import Kind
from tierkv.transformers_cache import TieredCache
from tierkv.triton_setup import interpreting

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not interpreting(), reason="the fake GPU is memory of this machine"),
]

PAGE_BYTES = 2 * 2 * 16 * 16 * 4
"""Layers, K and V, tokens, head_dim, float32."""

BUDGET, PROMPT = 3 * PAGE_BYTES, 256
"""16 pages: two of them exact, the others low-bit, for which there is not room enough either."""

STEPS = 8


class GpuOwner(Owner):
    """A daemon on a fake GPU of one allocation."""

    module = "tests.fake_gpu_daemon"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(folder, GRANULE, 8 << 20, "--device", "cuda:0", "--recent-tokens", "32")

    def left(self) -> list[int]:
        """Ends the daemon: handles, addresses, mappings and pinned ranges that it leaves."""
        self.signal(signal.SIGTERM)
        found = [int(word) for word in self.line().split()]
        assert self.process.wait(30) == 0
        return found


class Beside(TritonAttention):
    """Every call's pages are attended by the reference, too, in this process's view of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = ReferenceAttention()
        self.apart: list[float] = []  # outputs, and logarithms of sums
        self.kinds: set[int] = set()
        self.cold = 0

    def decode(
        self, query: torch.Tensor, pool: PoolView, pages: Pages, layer: int, scale: float,
        page_mass: Sums | None = None, token_mass: Sums | None = None,
        cold: Cold | None = None, seen: ColdSeen | None = None,
        softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> Attended:  # fmt: skip
        got = super().decode(
            query, pool, pages, layer, scale, page_mass, token_mass, cold, seen, softcap, sinks
        )
        assert pool.tensor is not None and not len(pool.data)
        here = pool._replace(data=pool.tensor.numpy(), tensor=None)
        wanted = self.reference.decode(query, here, pages, layer, scale, cold=cold)
        self._note(got, wanted)
        self.kinds |= {int(kind) for kind in pages.kinds}
        self.cold = max(self.cold, 0 if cold is None else len(cold.pages.offsets))
        return got

    def _note(self, got: Attended, wanted: Attended) -> None:
        self.apart += [float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True)]


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuOwner]:
    """Whoever leaves something on the GPU, on either side, fails the test."""
    driver, device = FakeDriver(), FakeDevice()
    monkeypatch.setattr("tierkv.device_pool.CudaDriver", lambda: driver)
    monkeypatch.setattr("tierkv.device_pool.CudaDevice", lambda index: device)
    folder = Path(tempfile.mkdtemp(prefix="tierkv-", dir="/dev/shm"))
    started = GpuOwner(folder)
    try:
        yield started
        gc.collect()  # sessions, and with them tensors over the pool
        assert driver.left() == (0, 0, 0, 0)
        assert started.left() == [0, 0, 0, 0]
    finally:
        started.kill()
        shutil.rmtree(folder)


def steps(model: Any, cache: Any) -> torch.Tensor:
    """Logits of the prompt's last token and of a few steps, whose tokens are given."""
    inputs = [prompt(PROMPT)["input_ids"], *(torch.tensor([[5 + step]]) for step in range(STEPS))]
    with torch.no_grad():
        found = [
            model(ids, logits_to_keep=1, use_cache=True, **{CACHE: cache}).logits[0, -1] for ids in inputs
        ]
    return torch.stack(found)


def test_pages_of_every_tier_are_attended_and_come_back(owner: GpuOwner) -> None:
    attached, beside = attach(build("llama-mqa", num_hidden_layers=2)), Beside()
    with tierkv.connect(owner.folder) as client:
        session = attached.open(client, hbm_budget=BUDGET, pins={})
        looks = RecallOptions(read=3, audit_every=1)
        cache = TieredCache(session, attention=beside, chunk_tokens=16, recall=looks)
        assert torch.isfinite(steps(attached.model, cache)).all()
        assert beside.kinds == {Kind.EXACT, Kind.QUANTIZED} and beside.cold > 3
        assert len(beside.apart) == 2 * 2 * STEPS and max(beside.apart) < 1e-4
        assert client.stats(session.id)["hbm_bytes"] <= BUDGET

        told = PROMPT // 16 + STEPS // session.observing.every  # slices of a page each, and some steps
        until(lambda: client.stats()["audits"] == told == len(cache.audits), 5.0)
        assert client.explain(session.id, 0).mass > 0

        session.begin(0)  # the table stands still
        cold = session.cold(session.length).pages[:2].tolist()
        session.end()
        session.recall(cold, [0.9, 0.8], 5.0)
        table = session._residency.table
        assert [table.kind[table.index[page]] for page in cold] == [Kind.QUANTIZED] * 2
        with torch.no_grad():
            attached.model(torch.tensor([[30]]), **{CACHE: cache})
        assert max(beside.apart) < 1e-4
        numbers = client.stats()
        assert not session.lost and numbers["lost_pages"] == numbers["failed_moves"] == 0
        cache.close()
        until(lambda: holds_nothing(client), 5.0)
    attached.detach()


def test_exact_copies_give_the_logits_of_the_dynamic_cache(owner: GpuOwner) -> None:
    model = build("llama-mqa", num_hidden_layers=2)
    expected = steps(model, DynamicCache(config=model.config))
    attached = attach(model)
    with tierkv.connect(owner.folder) as client:
        session = attached.open(client, hbm_budget=BUDGET, pins={})
        cache = TieredCache(session, recall=RecallOptions(exact_steps=True))
        assert cache.attention.name == "triton"
        got = steps(model, cache)
        numbers = client.stats(session.id)
        assert numbers["pages_quantized"] > 0 and numbers["pages_host"] > 3
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
        cache.close()
        until(lambda: holds_nothing(client), 5.0)
    attached.detach()
