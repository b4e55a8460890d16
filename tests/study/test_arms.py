"""Every arm answers the same questions within its bytes, looks only where it should, and leaves nothing behind."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tierkv
from tests.faults.harness import Owner, holds_nothing, until
from tierkv.regions import Region
from tierkv.study.arms import ARMS, EpisodeResult, Worker, run_episode
from tierkv.study.episodes import PROBED, Block, Episode, Probe

PAGE = 2 * 2 * 2 * 16 * 8 * 2  # layers, K and V, heads, tokens, head_dim, bytes of a bfloat16
PAGES = 36
ROOMY, TIGHT = 4 * PAGES * PAGE, 12 * PAGE  # bytes of HBM
MIB = 1 << 20


class Letters:
    def __call__(self, text: str, add_special_tokens: bool = False) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(letter) % 26 for letter in text])

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


def episode() -> Episode:
    """Twelve blocks of three full pages each."""
    text = "pages of an agent that remembers what it was told when it is asked for it"
    blocks = [Block(Region(i % 7), (text[i:] + text[:i])[:48]) for i in range(12)]
    return Episode("letters", "", tuple(blocks), tuple(Probe(region, "what is it", "x") for region in PROBED))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=26, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def runs(model) -> dict[int, dict[str, EpisodeResult]]:
    """Results by pool size and arm."""
    found: dict[int, dict[str, EpisodeResult]] = {}
    for pool in (ROOMY, TIGHT):
        folder = Path(tempfile.mkdtemp(prefix="tierkv-", dir="/dev/shm"))
        owner = Owner(folder, pool, MIB, "--digest-share", "0.2", "--recent-tokens", "32")
        try:
            with tierkv.connect(folder, reserve_ahead=0) as client:
                worker = Worker(model, Letters(), client, pool)
                found[pool] = {arm: run_episode(worker, episode(), arm) for arm in ARMS}
                until(lambda client=client: holds_nothing(client), 5.0)
        finally:
            owner.kill()
            shutil.rmtree(folder)
    return found


def texts(result: EpisodeResult) -> list[str]:
    return [answer.text for answer in result.answers]


def test_with_room_for_everything_every_paged_arm_answers_the_same(runs):
    assert (
        texts(runs[ROOMY]["drop"]) == texts(runs[ROOMY]["tiered"]) == texts(runs[ROOMY]["tiered_recall_off"])
    )
    assert runs[ROOMY]["tiered"].tiers.pages == {"hbm": PAGES, "quantized": 0, "host": 0}


def test_every_arm_is_asked_every_question(runs):
    for result in runs[TIGHT].values():
        assert [answer.probe.region for answer in result.answers] == list(PROBED)
        assert len(result.replay.decode_seconds) == 16


def test_in_a_tight_pool_drop_forgets_tiers_move_and_the_baseline_keeps_its_budget(runs):
    found = runs[TIGHT]
    assert found["drop"].tiers.pages["hbm"] <= 12 and found["drop"].tiers.pages["host"] == 0
    for arm in ("tiered_recall_off", "tiered"):
        pages = found[arm].tiers.pages
        assert sum(pages.values()) == PAGES and pages["host"] > 0
    assert 0 < found["quantized"].bytes_peak <= TIGHT


def test_only_tiered_arms_are_audited_and_without_recall_less_is_attended(runs):
    assert {arm for arm, result in runs[TIGHT].items() if result.audits} == {"tiered_recall_off", "tiered"}
    shares = {
        arm: [audit.attended for audit in runs[TIGHT][arm].audits] for arm in ("tiered_recall_off", "tiered")
    }
    assert all(len(found) >= len(PROBED) for found in shares.values())
    assert max(shares["tiered_recall_off"]) < 1
    assert sum(shares["tiered"]) > sum(shares["tiered_recall_off"])


def test_an_arm_that_does_not_exist_is_refused(model):
    with pytest.raises(ValueError, match="'tired' does not exist; use one of full, drop"):
        run_episode(Worker(model, Letters(), None, 0), episode(), "tired")
