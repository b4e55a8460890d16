"""A real model: SmolLM2-135M over a real daemon answers with the tokens that it answers with without tierkv."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch

import tierkv
from tests.faults.harness import Owner
from tests.tierkv.tiny_models import CACHE
from tierkv.study.episodes import load_episode, spans
from tierkv.study.model import load_smollm2

NEW_TOKENS = 24
PROMPT_TOKENS = 300
POOL_BYTES = 48 << 20  # 1,000 exact float32 tokens: nothing has to give way


@pytest.mark.model
def test_smollm2_generates_the_same_tokens_over_exact_float32_pages() -> None:
    model, tokenizer = load_smollm2()
    tokens = [token for span in spans(load_episode("ferry"), tokenizer) for token in span.tokens]
    ids = torch.tensor([tokens[:PROMPT_TOKENS]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    want = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    folder = Path(tempfile.mkdtemp(prefix="tierkv-", dir="/dev/shm"))
    owner = Owner(folder, POOL_BYTES, 64 << 20)
    try:
        with tierkv.connect(folder) as client:
            attached = tierkv.attach(model)
            session = attached.open(client, "float32", ladder="exact")
            cache = tierkv.TieredCache(session, chunk_tokens=128)
            got = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **{CACHE: cache})
            assert session.horizon == got.shape[1] - 1
            attached.detach()
    finally:
        owner.kill()
        shutil.rmtree(folder)
    assert got.tolist() == want.tolist()
