"""Recording into a folder: in chunks as in one piece, some heads of all, once and not again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tierkv.chat_tokenizer import CHATML, SIZE, tokenizer
from tierkv.errors import ConfigError
from tierkv.regions import Region
from tierkv.study.memdecay import collect
from tierkv.study.memdecay import record as recording
from tierkv.study.memdecay.attention import StudyAttention
from tierkv.study.memdecay.record import Reading, label, record
from tierkv.study.memdecay.traces import Trace, load_trace
from tierkv.study.traces import Trace as Chat

TOKENS = np.random.default_rng(4).integers(5, 90, 60).tolist()
SPLITS: tuple[collect.Split, ...] = ("all", "dev", "report")
READING = Reading("tiny", TOKENS, [0] * 20 + [2] * 40, [0, 20], [25, 60])
CHAT = Chat(
    "task 3, trial 1",
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is my bag? It was blue."},
        {"role": "assistant", "content": "I will look for it."},
    ],
)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SIZE, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_reading_in_chunks_records_what_one_piece_does(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = StudyAttention(model)
    _, whole = record(model, attention, READING, 10)
    monkeypatch.setattr(recording, "CHUNK_TOKENS", 7)  # less than a window, and no divisor of a stage
    _, chunked = record(model, attention, READING, 10)
    assert chunked.queries.tolist() == whole.queries.tolist()
    assert chunked.mass.astype(float) == pytest.approx(whole.mass.astype(float), abs=2e-4)


def test_every_nth_head_is_that_head_of_all(model: LlamaForCausalLM) -> None:
    attention = StudyAttention(model)
    _, heads = record(model, attention, READING, 10, every=1)
    _, some = record(model, attention, READING, 10, every=5)
    assert some.mass.shape[0] == 4  # heads 0, 5, 10 and 15 of 18
    assert some.mass.astype(float) == pytest.approx(heads.mass[::5].astype(float), abs=1e-3)


def test_a_chat_is_recorded_message_by_message_and_not_twice(model: LlamaForCausalLM, tmp_path: Path) -> None:
    words = tokenizer(CHATML)
    told: list[str] = []
    first = collect.run(
        tmp_path, model, words, chats=[CHAT], window=6, told=lambda d, n, what: told.append(what)
    )
    assert first.new == ("task-3-trial-1",) and told == ["task 3, trial 1", "done"]
    trace = load_trace(tmp_path / "task-3-trial-1.safetensors")
    assert len(trace.stages) == 3
    assert {Region(r) for r in trace.regions} == {Region.SYSTEM, Region.USER, Region.SCRATCHPAD}
    assert trace.regions[trace.stages[1] - 1] == Region.USER
    again = collect.run(tmp_path, model, words, chats=[CHAT], window=6)
    assert (again.new, again.kept) == ((), ("task-3-trial-1",))
    heads = collect.run(tmp_path, model, words, chats=[CHAT], window=6, every=9)
    assert heads.new == ("task-3-trial-1.by-9",)
    assert [t.mass.ndim for t in collect.load_folder(tmp_path)] == [1]
    assert [t.mass.shape[0] for t in collect.load_folder(tmp_path, by_head=True)] == [2]


@pytest.mark.parametrize("change", ["damage", "window", "tokens"])
def test_what_is_damaged_or_of_other_settings_is_recorded_again(
    model: LlamaForCausalLM, tmp_path: Path, change: str
) -> None:
    words, window, chat = tokenizer(CHATML), 6, CHAT
    collect.run(tmp_path, model, words, chats=[chat], window=window)
    file = tmp_path / "task-3-trial-1.safetensors"
    if change == "damage":
        file.write_bytes(file.read_bytes()[:-40])
    elif change == "window":
        window = 5
    else:
        chat = CHAT._replace(messages=[*CHAT.messages[:1], {"role": "user", "content": "Where is my hat?"}])
    assert collect.run(tmp_path, model, words, chats=[chat], window=window).new == ("task-3-trial-1",)
    assert load_trace(file)


def test_chats_that_would_be_one_file_are_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    twins = [CHAT, CHAT._replace(name="task 3 (trial 1)")]
    with pytest.raises(ConfigError, match=r"2 chats would all be task-3-trial-1\.safetensors"):
        collect.run(tmp_path, model, tokenizer(CHATML), chats=twins, window=6)
    assert not list(tmp_path.iterdir())


def test_a_long_chat_is_cut(model: LlamaForCausalLM) -> None:
    reading = collect.of_chat(CHAT, tokenizer(CHATML), tokens=50)
    assert len(reading.tokens) == len(reading.regions) == reading.stages[-1] == 50
    assert all(block < 50 for block in reading.blocks)
    whole = collect.of_chat(CHAT, tokenizer(CHATML))
    assert whole.tokens[:50] == reading.tokens and len(whole.tokens) > 50


def test_an_empty_folder_says_how_to_fill_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"run: tierkv study record --out {tmp_path}$"):
        list(collect.load_folder(tmp_path))


def test_an_empty_folder_says_how_to_fill_it_with_traces_by_head(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"by head yet; run: tierkv study record --every 10 --out {tmp_path}$"
    ):
        list(collect.load_folder(tmp_path, by_head=True, options="--every 10"))


def test_an_episode_is_paired_with_its_trace(tmp_path: Path) -> None:
    from tierkv.study.model import load_tokenizer

    words = load_tokenizer()
    with pytest.raises(ConfigError, match="no attention trace of the report scenarios"):
        list(collect.load_pairs(tmp_path, "report", words))
    for name in ("harbour-1-long", "orchard-0-short"):
        regions = np.zeros(3, np.int8)
        tokens, first, stop = np.arange(3, dtype=np.int32), np.zeros(1, np.int32), np.array([3], np.int32)
        Trace(name, "tiny", tokens, regions, first, stop, first, np.ones(1, np.float16)).save(
            tmp_path / f"{name}.safetensors"
        )
    names = {
        split: [(e.name, t.name) for e, t in collect.load_pairs(tmp_path, split, words)] for split in SPLITS
    }
    assert names == {
        "report": [("harbour-1-long",) * 2], "dev": [("orchard-0-short",) * 2],
        "all": [("orchard-0-short",) * 2, ("harbour-1-long",) * 2],
    }  # fmt: skip


def test_a_model_of_another_dtype_has_another_label(model: LlamaForCausalLM) -> None:
    import copy

    plain = label(model)
    assert label(copy.deepcopy(model).to(torch.bfloat16)) == f"{plain} bfloat16"


@pytest.mark.model
def test_an_episode_of_the_study_is_recorded(tmp_path: Path) -> None:
    from tierkv.study.model import load_smollm2

    recorded = collect.run(tmp_path, *load_smollm2(), "dev", ("short",), (0,))
    assert len(recorded.new) == 16
    for trace in collect.load_folder(tmp_path):
        for query, mass in trace.rows():
            assert mass.sum() == pytest.approx(1, abs=0.02) and len(mass) == query + 1
