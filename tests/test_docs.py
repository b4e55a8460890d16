"""Every Python block of docs/ runs, in order, as one script over a daemon; every command in them exists."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tierkv
from tests.faults.harness import ROOT, Owner, holds_nothing, until
from tests.test_readme import BIN, MIB, python_blocks, shell_lines

GUIDE, PROTOCOL = ROOT / "docs" / "guide.md", ROOT / "docs" / "protocol.md"


@pytest.fixture
def state_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tierkv-", dir="/dev/shm"))
    owner = Owner(folder, 64 * MIB, 256 * MIB)
    yield folder
    owner.kill()
    shutil.rmtree(folder)


def run(document: Path, state_dir: Path, tmp_path: Path) -> str:
    """What the document's script prints; its pages must be back when it has ended."""
    script = tmp_path / f"{document.stem}.py"
    script.write_text("\n".join(python_blocks(document.read_text())))
    done = subprocess.run(
        [sys.executable, str(script)], cwd="/", timeout=240, capture_output=True, text=True, check=False,
        env=os.environ | {"TIERKV_STATE_DIR": str(state_dir), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    with tierkv.connect(state_dir) as client:
        until(lambda: holds_nothing(client), 5.0)
        assert client.stats()["hbm_peak_bytes"] > 0
    return done.stdout


@pytest.mark.model
def test_the_guide_runs_as_it_stands(state_dir: Path, tmp_path: Path) -> None:
    said = run(GUIDE, state_dir, tmp_path)
    assert said.startswith("The code 4711 opens the greenhouse door.\nThe door closes at noon.\n")
    # Each message's tokens, counted by the tokenizer alone.
    assert "\nsystem:11 tool_out:23 user:12 scratchpad:4\n" in said


def test_the_protocol_page_runs_as_it_stands(state_dir: Path, tmp_path: Path) -> None:
    assert run(PROTOCOL, state_dir, tmp_path).split() == ["1", str(64 * MIB), "16", "k3v2"]


@pytest.mark.parametrize("document", [GUIDE, PROTOCOL], ids=lambda path: path.stem)
def test_every_block_is_python_that_compiles_or_a_command_that_exists(document: Path) -> None:
    text = document.read_text()
    for block in python_blocks(text):
        ast.parse(block)
    assert text.count("\n```") % 2 == 0
    fences = {line for line in text.splitlines() if line.startswith("```")}
    assert fences <= {"```", "```python", "```sh"}
    for program, *words in shell_lines(text):
        verbs = [word for word in words if not word.startswith("-")][: 1 if program.endswith("tierkv") else 0]
        told = subprocess.run(
            [BIN / Path(program).name, *verbs, "--help"], capture_output=True, text=True, check=True, cwd="/",
            env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}, timeout=60,
        ).stdout  # fmt: skip
        assert all(word in told for word in words if word.startswith("--"))
