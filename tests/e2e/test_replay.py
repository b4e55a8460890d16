"""`tierkv replay` as a user runs it: traces over a daemon under a budget, against a full cache."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.faults.harness import Owner
from tests.tierkv.chat_tokenizer import SIZE, tokenizer
from tests.tierkv.tiny_models import build
from tierkv.commands import app

BIN = Path(sys.executable).parent
PAGE_BYTES = 3 * 2 * 2 * 16 * 16 * 2
"""Layers, K and V, heads, tokens, head_dim, bfloat16."""

TRACE = [
    {"role": "system", "content": "Answer in haste. " * 20},
    {"role": "user", "content": "A flight to Oslo, please. " * 8},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "find", "arguments": '{"to": "Oslo"}'}}],
    },
    {"role": "tool", "name": "find", "content": "SK 12 at 9:40, DY 3 at 11:05. " * 12},
    {"role": "assistant", "content": "There is one at 9:40 and one at 11:05."},
    {"role": "user", "content": "The first."},
    {"role": "assistant", "content": "Done."},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build("llama", vocab_size=SIZE, max_position_embeddings=1500).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def state_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tierkv-", dir="/dev/shm"))
    owner = Owner(folder, 256 * PAGE_BYTES, 8 << 20)
    yield folder
    owner.kill()
    shutil.rmtree(folder)


def replay(*arguments: str | Path) -> Result:
    """The command in this process, where torch is loaded already."""
    return CliRunner().invoke(app, ["replay", *map(str, arguments)], env={"COLUMNS": "120", "NO_COLOR": "1"})


def test_traces_replay_under_a_budget_and_leave_nothing_behind(
    model: Path, state_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "traces.json"
    longer = [*TRACE, {"role": "user", "content": "z" * 500}]
    file.write_text(json.dumps([{"task_id": 0, "messages": TRACE}, {"task_id": 1, "messages": longer}]))
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TIERKV_")}
    done = subprocess.run(
        [BIN / "tierkv", "replay", file, "--model", model, "--state-dir", state_dir, "--budget", "0.25", "--json"],
        capture_output=True, text=True, cwd="/", timeout=200, check=False, env=clean | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2/2 trace 1" in done.stderr
    found = json.loads(done.stdout)
    first, second = found["traces"]
    assert [trace["error"] for trace in found["traces"]] == [None, None]
    assert first["messages"] == len(TRACE)
    assert first["budget_bytes"] == int(0.25 * first["tokens"] * PAGE_BYTES / 16)
    # Memory on its way out counts until the worker has let go of it.
    assert 0.5 < first["hbm_peak_bytes"] / first["budget_bytes"] <= 1.0
    assert first["pages"]["quantized"] > 0
    assert first["pages"]["dropped"] == 0
    assert sum(first["pages"].values()) >= first["tokens"] / 16
    assert first["quality"]["tokens"] == 64
    assert 0 < first["quality"]["kl"] < math.log(SIZE)
    # The same messages fit the second time: what is beyond the context is cut, and told.
    assert (second["messages"], second["messages_cut"]) == (len(TRACE), 1)
    assert second["tokens_cut"] == 500 + len("user\n\n") + 2
    totals = found["totals"]
    assert (totals["traces"], totals["errors"], totals["cut"], totals["bytes_left"]) == (2, 0, 1, 0)
    assert totals["kl"] == pytest.approx((first["quality"]["kl"] + second["quality"]["kl"]) / 2)
    assert totals["worker_memory"]["peak"] > 0


def test_a_plain_list_of_messages_gives_a_table(model: Path, state_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text("\n".join(map(json.dumps, TRACE)))
    done = replay(file, "--model", model, "--state-dir", state_dir, "--no-compare")
    assert done.exit_code == 0, done.stderr
    assert "budget 20% of each trace's exact KV" in done.stdout
    assert "left behind by closed sessions: 0 bytes" in done.stdout


def test_with_room_for_everything_exact_only_the_rounding_of_the_pages_is_left(
    model: Path, state_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(TRACE))
    done = replay(file, "--model", model, "--state-dir", state_dir, "--budget", "2", "--json")
    assert done.exit_code == 0, done.stderr
    (trace,) = json.loads(done.stdout)["traces"]
    assert trace["pages"]["quantized"] == trace["pages"]["host"] == 0
    assert trace["quality"]["kl"] < 0.05
    assert trace["quality"]["top1"] > 0.9


def test_what_cannot_be_replayed_is_refused_in_one_sentence(
    model: Path, state_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "traces.json"
    file.write_text(json.dumps(TRACE))
    for arguments, code, said in [
        ((tmp_path / "none.json",), 2, "cannot be read"),
        ((file, "--trace", "3"), 2, "there is no trace 3"),
        ((file, "--model", tmp_path / "none"), 2, "is no folder"),
    ]:
        refused = replay(*arguments, "--state-dir", state_dir)
        assert refused.exit_code == code, refused.stderr
        assert refused.stderr.startswith("tierkv: ") and said in refused.stderr
        assert "Traceback" not in refused.stderr
