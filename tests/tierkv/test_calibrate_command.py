"""`tierkv calibrate` on a tiny model: the file that it writes, where, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from typer.testing import CliRunner, Result

from tests.tierkv.chat_tokenizer import SIZE, tokenizer
from tests.tierkv.tiny_models import build
from tierkv import model_support
from tierkv.calibrate_command import default_file
from tierkv.calibration import observe
from tierkv.commands import app
from tierkv.daemon.calibrations import Calibrations
from tierkv.prefetch.transform import KeySums, solve
from tierkv.quant import get
from tierkv.quant.moments import load, load_keys

TEXT = "The greenhouse door opens with code 4711. It closes at noon. " * 10  # 610 bytes, a token each


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A saved model, of 512 positions, and its tokenizer; the cache is a new one, and so is the working folder."""
    monkeypatch.setenv("TIERKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "models" / "tiny"
    build("llama", vocab_size=SIZE).save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


def calibrate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)])


def test_a_daemon_finds_what_was_observed_of_a_model(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "door.txt").write_text(TEXT)
    done = calibrate("--model", folder, "--text", tmp_path / "door.txt")
    assert done.exit_code == 0, done.output
    model = AutoModelForCausalLM.from_pretrained(folder)  # as a worker loads it
    model_id, geometry = model_support.model_id(model), model_support.geometry(model)
    (file,) = (tmp_path / "cache" / "calibrations").iterdir()
    assert file.name == f"tiny@{model_id.partition('@')[2]}.npz"
    moments, about = load(file)
    assert (about.model_id, about.texts, about.tokens) == (model_id, ("door.txt",), 512)
    tokens = tokenizer()(TEXT, add_special_tokens=False).input_ids[:512]
    for found, expected in zip(moments, observe(model, [tokens]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    keys, _ = load_keys(file)
    pages: list[KeySums] = []
    second = observe(model, [tokens], pages=pages).query_second
    solved = solve(pages, second)
    np.testing.assert_allclose(keys.mean, solved.mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(keys.variance, solved.variance, rtol=1e-3, atol=1e-6)
    assert about.page_tokens == 16
    for said in (model_id, "3 layers, 2 KV heads of 16", "1 text, 512 tokens", str(file)):
        assert said in done.output
    found = Calibrations(file.parent, digests=True)
    assert found.fit(get("klt2"), model_id, geometry) is not None
    assert found.digest_models == (about,)
    np.testing.assert_array_equal(found.digest_state(model_id, geometry)[: keys.mean.size], keys.mean.ravel())


def test_without_a_text_it_takes_those_that_are_here(folder: Path, tmp_path: Path) -> None:
    done = calibrate("--model", folder, "--out", tmp_path / "mine" / "a.npz")
    assert done.exit_code == 0, done.output
    about = load(tmp_path / "mine" / "a.npz")[1]
    assert [title.partition(":")[0] for title in about.texts] == ["prose", "code", "agent"] * 3
    assert about.tokens == 9 * 512
    assert not (tmp_path / "cache").exists()


def test_what_cannot_be_calibrated_is_refused_in_one_sentence(folder: Path, tmp_path: Path) -> None:
    good, short, binary = tmp_path / "good.txt", tmp_path / "short.txt", tmp_path / "binary"
    good.write_text(TEXT)
    short.write_text("Noon.")
    binary.write_bytes(b"\xff\xfe\xfa")
    build("gemma2", vocab_size=SIZE).save_pretrained(tmp_path / "gemma")
    tokenizer().save_pretrained(tmp_path / "gemma")
    for arguments, code, said in (
        (("--model", tmp_path / "none"), 2, "is no folder"),
        (("--model", tmp_path), 2, "holds no model"),
        (("--model", folder, "--dtype", "int8"), 2, "take auto, float32"),
        (("--model", folder, "--out", tmp_path), 2, "is a folder"),
        (("--model", folder, "--data", tmp_path), 2, "holds no trajectories.json"),
        (("--model", folder, "--device", "elsewhere", "--text", good), 2, "--device elsewhere"),
        (("--model", folder, "--text", tmp_path / "none.txt"), 2, "none.txt cannot be read"),
        (("--model", folder, "--text", binary), 2, "cannot be read as UTF-8"),
        (("--model", folder, "--text", good, "--text", short), 2, "text 2 has 5 tokens"),
        (("--model", tmp_path / "gemma", "--text", good), 1, "soft-caps"),
    ):
        done = calibrate(*arguments)
        assert (done.exit_code, said in done.stderr) == (code, True), (arguments, done.output)
        assert "Traceback" not in done.output
    assert not (tmp_path / "cache").exists()


def test_a_device_that_torch_was_built_without_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to(*_: object) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")  # as torch raises it

    (tmp_path / "good.txt").write_text(TEXT)
    monkeypatch.setattr(LlamaForCausalLM, "to", to)
    done = calibrate("--model", folder, "--device", "cuda", "--text", tmp_path / "good.txt")
    assert (done.exit_code, "--device cuda: Torch not compiled" in done.stderr) == (2, True), done.output


def test_a_files_name_is_the_end_of_the_models(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "cache" / "calibrations"
    assert default_file("/home/me/models/tiny@01") == place / "tiny@01.npz"
    assert default_file("org/a b:c@01") == place / "a-b-c@01.npz"
    assert default_file("..") == place / "model.npz"
