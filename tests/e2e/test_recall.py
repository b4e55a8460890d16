"""Cold pages over a real daemon: read in place, waited for, audited; and what happens to damaged ones."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

import tierkv
from tests.faults.harness import Owner, holds_nothing
from tests.tierkv.tiny_models import CACHE, build, expected, greedy, longer, prompt
from tierkv import model_support
from tierkv.calibration import observe
from tierkv.model import attach
from tierkv.prefetch.transform import KeySums, solve
from tierkv.quant.moments import About, save
from tierkv.recall import RecallMode, RecallOptions
from tierkv.table import Kind
from tierkv.transformers_cache import TieredCache

Start = Callable[..., tierkv.Client]

PAGE_BYTES = 3 * 2 * 2 * 16 * 16 * 4
"""Layers, K and V, heads, tokens, head_dim, float32."""

PAGES, PROMPT = 16, 2000
"""125 pages of prompt: half of them go to host."""

MODES: tuple[RecallMode, ...] = get_args(RecallMode)
EVERYTHING = RecallOptions("direct", read=1000, audit_every=1)
OFF = RecallOptions("off", audit_every=1)


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def calibration(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model, on noise: what its digests are made by."""
    texts = [np.random.default_rng(seed).integers(2, 97, 600).tolist() for seed in range(3)]
    pages: list[KeySums] = []
    moments, geometry = observe(model, texts, pages=pages), model_support.geometry(model)
    shape = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)
    about = About(model_support.model_id(model), *shape, geometry.dtype, ("noise",), 1800)
    file = tmp_path_factory.mktemp("calibrations") / "a.npz"
    save(file, moments, solve(pages, moments.query_second), about)
    return file


@pytest.fixture(params=["deviation", "transform"])
def digest(request: pytest.FixtureRequest, calibration: Path) -> tuple[str, ...]:
    """What a daemon is told of digests."""
    return ("--digest", request.param, "--digest-bytes", "20", "--calibration", str(calibration))


@pytest.fixture
def start(digest: tuple[str, ...]) -> Iterator[Start]:
    """A client of a fresh daemon with that many pages of HBM."""
    folder = Path(tempfile.mkdtemp(prefix="tierkv-", dir="/dev/shm"))
    owners: list[Owner] = []
    clients: list[tierkv.Client] = []

    def client(pages: int = PAGES, *options: str) -> tierkv.Client:
        owners.append(
            Owner(
                folder,
                pages * PAGE_BYTES,
                8 << 20,
                "--recent-tokens",
                "32",
                *(options or ("--digest-share", "0.2")),
                *digest,
            )
        )
        clients.append(tierkv.connect(folder))
        return clients[-1]

    yield client
    for opened in clients:
        opened.close()
    for owner in owners:
        owner.kill()
    shutil.rmtree(folder)


def filled(model: Any, client: tierkv.Client, recall: RecallOptions, tokens: int = PROMPT) -> TieredCache:
    """A cache whose session holds a prompt, most of it cold."""
    cache = TieredCache(attach(model).open(client, pins={}), recall=recall)
    with torch.no_grad():
        model(**prompt(tokens), logits_to_keep=1, **{CACHE: cache})
    assert cache.has_cold
    return cache


def cold_rows(session: Any) -> Any:
    session.begin(0)
    rows = session.cold(session.length)
    session.end()
    return rows


def divergence(model: Any, recall: RecallOptions, client: tierkv.Client) -> float:
    """Mean KL to the full cache's next-token distributions over a second turn of 40 tokens and 8 decode steps."""
    cache = filled(model, client, recall)
    more = prompt(48, seed=2)["input_ids"]
    inputs = torch.cat([prompt(PROMPT)["input_ids"], more], 1)
    with torch.no_grad():
        full = model(inputs, logits_to_keep=48).logits[0].log_softmax(-1)
        parts = [model(more[:, :40], **{CACHE: cache}).logits[0]]
        parts += [model(more[:, i : i + 1], **{CACHE: cache}).logits[0] for i in range(40, 48)]
    found = torch.cat(parts).log_softmax(-1)
    cache.close()
    return float((full.exp() * (full - found)).sum(-1).mean())


def test_reading_cold_pages_in_place_is_close_to_the_full_cache_and_ignoring_them_is_not(
    model: Any, start: Start
) -> None:
    client = start()
    ignored, read = (divergence(model, recall, client) for recall in (OFF, EVERYTHING))
    assert read < ignored / 2, (read, ignored)


def test_a_chunk_gives_the_logits_of_the_full_cache(model: Any, start: Start) -> None:
    """Pages are exact in HBM or read from their exact host copies, whatever the daemon did with them meanwhile."""
    cache = filled(model, start(), RecallOptions("direct"))
    more = prompt(40, seed=2)["input_ids"]
    with torch.no_grad():
        got = model(more, **{CACHE: cache}).logits
        full = model(torch.cat([prompt(PROMPT)["input_ids"], more], 1), logits_to_keep=40).logits
    torch.testing.assert_close(got, full, atol=1e-3, rtol=1e-3)
    cache.close()


def test_steps_may_give_the_logits_of_the_full_cache_too(model: Any, start: Start) -> None:
    client, far = start(), {}
    more = prompt(12, seed=2)["input_ids"]
    with torch.no_grad():
        full = model(torch.cat([prompt(PROMPT)["input_ids"], more], 1), logits_to_keep=12).logits
        for exact in (True, False):
            cache = filled(model, client, RecallOptions("direct", read=1000, exact_steps=exact))
            assert client.stats(cache.sessions[0].id)["pages_quantized"] > 0
            got = torch.cat([model(more[:, i : i + 1], **{CACHE: cache}).logits for i in range(12)], 1)
            far[exact] = float((got - full).abs().max())
            session = cache.sessions[0]
            assert session.step == 12
            cache.close()
    assert far[True] < 1e-3 < far[False]


def test_audits_say_what_was_attended(model: Any, start: Start) -> None:
    client = start()
    attended = {}
    for name, recall in (("off", OFF), ("everything", EVERYTHING)):
        cache = filled(model, client, recall)
        cache.audits.clear()
        greedy(model, longer(prompt(PROMPT), prompt(20, seed=3)["input_ids"]), cache, max_new_tokens=12)
        assert cache.audits
        attended[name] = np.mean([audit.attended for audit in cache.audits])
        assert all(0 <= audit.attended <= 1 and 0 < audit.oracle <= 1 for audit in cache.audits)
        if name == "off":
            assert all(
                audit.attended + audit.missed == pytest.approx(1.0, abs=1e-3) for audit in cache.audits
            )
        cache.close()
    assert attended["everything"] == pytest.approx(1.0, abs=1e-4)
    assert attended["off"] < 0.8
    assert client.stats()["audits"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_generates_and_leaves_nothing_behind(model: Any, start: Start, mode: RecallMode) -> None:
    client = start()
    cache = filled(model, client, RecallOptions(mode, chunk_read=8, read=2, missing=0.0))
    turn = longer(prompt(PROMPT), prompt(30, seed=4)["input_ids"])
    tokens = greedy(model, turn, cache, max_new_tokens=20)
    assert tokens.shape[1] == PROMPT + 30 + 20
    session = cache.sessions[0]
    assert session.horizon == session.length == PROMPT + 30 + 19
    assert session.step == 19, "a replayed step counts once"
    cache.close()
    wait_until(lambda: holds_nothing(client))


@pytest.mark.parametrize("mode", ["direct", "strict"])
def test_beams_and_padded_rows_recall_their_own_pages(model: Any, start: Start, mode: RecallMode) -> None:
    client = start(40)
    attached = attach(model)
    inputs = prompt(1900, 1720)
    for options in ({"num_beams": 2}, {}):
        caches = [attached.open(client, pins={}) for _ in range(2)]
        cache = TieredCache(caches, recall=RecallOptions(mode, chunk_read=4, missing=0.0))
        tokens = greedy(model, inputs, cache, max_new_tokens=6, **options)
        assert tokens.shape == (2, 1906)
        cache.close()
    wait_until(lambda: holds_nothing(client))


def test_a_scout_leaves_no_trace(model: Any, start: Start) -> None:
    """The same second turn with and without one: tokens, labels and steps lie the same way in both tables."""
    client, tables = start(), []
    for recall in (RecallOptions("strict", chunk_read=2), RecallOptions("off")):
        cache = filled(model, client, recall)
        session: Any = cache.sessions[0]
        session.label("tool_out", 21)
        session.label("plan", 12)
        before = len(cache.audits)
        greedy(model, longer(prompt(PROMPT), prompt(40, seed=5)["input_ids"]), cache, max_new_tokens=3)
        table = session._residency.table
        rows = slice(0, table.length)
        tables.append(
            (table.start[rows].tolist(), table.region[rows].tolist(), session.step, session.horizon, before)
        )
        cache.close()
    assert tables[0] == tables[1]


def test_pages_that_a_step_waits_for_are_there_when_it_goes_on(model: Any, start: Start) -> None:
    client = start()
    cache = filled(model, client, RecallOptions("off"))
    session: Any = cache.sessions[0]
    rows = cold_rows(session)
    wanted = rows.pages[:4].tolist()
    session.recall(wanted, [0.9, 0.8, 0.7, 0.6], 5.0)
    kinds = [session._residency.table.kind[session._residency.table.index[page]] for page in wanted]
    assert kinds == [Kind.QUANTIZED] * 4
    cache.close()


def test_an_exact_page_comes_back_bit_for_bit(model: Any, start: Start) -> None:
    client = start()
    session: Any = attach(model).open(client, pins={})
    cache = TieredCache(session, recall="off")
    with torch.no_grad():
        model(**prompt(64), logits_to_keep=1, **{CACHE: cache})
    table = session._residency.table
    page, offset = int(table.page[2]), int(table.offset[2])
    before = session.pool.data[offset : offset + PAGE_BYTES].copy()
    with torch.no_grad():
        model(prompt(PROMPT, seed=6)["input_ids"], logits_to_keep=1, **{CACHE: cache})
    assert table.kind[table.index[page]] != Kind.EXACT
    session.pin(32, 48, "exact")
    wait_until(lambda: session._residency.table.kind[session._residency.table.index[page]] == Kind.EXACT)
    at = int(session._residency.table.offset[session._residency.table.index[page]])
    np.testing.assert_array_equal(session.pool.data[at : at + PAGE_BYTES], before)
    cache.close()


def test_a_damaged_page_is_never_attended_and_counted_as_lost(model: Any, start: Start) -> None:
    client = start()
    cache = filled(model, client, RecallOptions("off", audit_every=0))  # nothing was verified yet
    session: Any = cache.sessions[0]
    row = int(
        np.flatnonzero(session._residency.table.kind[: session._residency.table.length] == Kind.NONE)[0]
    )
    page, offset = int(session._residency.table.page[row]), int(session._residency.table.host_offset[row])
    (pool,) = Path(client.state_dir).glob("host*")
    with pool.open("r+b") as file:
        file.seek(offset + 100)
        byte = file.read(1)
        file.seek(offset + 100)
        file.write(bytes([byte[0] ^ 0xFF]))
    rows = cold_rows(session)
    assert page not in rows.pages and len(rows.pages) > 10
    wait_until(lambda: client.stats()["lost_pages"] == 1)
    with torch.no_grad():
        logits = model(prompt(30, seed=7)["input_ids"], **{CACHE: cache}).logits
    assert torch.isfinite(logits).all()
    cache.close()


def test_without_digests_a_chunk_still_reads_everything(model: Any, start: Start) -> None:
    client = start(PAGES, "--digest-share", "0")
    cache = filled(model, client, EVERYTHING)
    cache.audits.clear()
    with torch.no_grad():
        model(prompt(30, seed=8)["input_ids"], **{CACHE: cache})
    assert cache.audits[-1].attended == pytest.approx(1.0, abs=1e-4)
    assert cache.audits[-1].estimated == 0.0
    cache.close()


def test_exact_pages_in_hbm_give_the_same_tokens_in_every_mode(model: Any, start: Start) -> None:
    client, inputs = start(64), prompt(300)
    want = expected(model, inputs)
    for mode in MODES:
        cache = TieredCache(attach(model).open(client), recall=mode)
        assert torch.equal(greedy(model, inputs, cache), want)
        cache.close()


def wait_until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not become true"
        time.sleep(0.02)
