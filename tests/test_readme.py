"""The README says what is: its example runs as it stands, its commands exist, and its table is the configuration."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tierkv
from tests.faults.harness import Owner, holds_nothing, until
from tierkv.daemon.config import DaemonConfig
from tierkv.daemon.setting_values import parse_size
from tierkv.handshake import default_state_dir

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent
MIB = 1 << 20


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def shell_lines(text: str) -> list[list[str]]:
    """Commands of indented and fenced shell blocks, without prompts, comments and what they print."""
    lines = re.findall(r"^    (?:\$ )?([a-z.].*)$", text, re.MULTILINE)
    lines += "".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [
        words
        for words in split
        if words and re.fullmatch(r"(\.venv/bin/)?(make|tierkv|tierkv-daemon)", words[0])
    ]


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """Of a service with the sizes of the README's daemon."""
    folder = Path(tempfile.mkdtemp(prefix="tierkv-", dir="/dev/shm"))
    owner = Owner(folder, 64 * MIB, 256 * MIB)
    yield folder
    owner.kill()
    shutil.rmtree(folder)


@pytest.mark.model
def test_the_worker_example_runs_as_it_stands_and_gives_its_pages_back(
    state_dir: Path, tmp_path: Path
) -> None:
    (example,) = python_blocks(README)
    script = tmp_path / "worker.py"
    script.write_text(example)
    done = subprocess.run(
        [sys.executable, str(script)], cwd="/", timeout=240, capture_output=True, text=True, check=False,
        env=os.environ | {"TIERKV_STATE_DIR": str(state_dir), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    assert "4711" in done.stdout and len(done.stdout.split()) >= 3  # what the system prompt says, in words
    with tierkv.connect(state_dir) as client:
        until(lambda: holds_nothing(client), 5.0)
        assert client.stats()["hbm_peak_bytes"] > 0  # it did work over the daemon's pages


def test_every_command_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = shell_lines(README)
    assert {"make", "tierkv", ".venv/bin/tierkv-daemon"} == {words[0] for words in commands}
    asked = set()
    for program, *words in commands:
        if program == "make":
            assert words[0] in targets
            continue
        bare = Path(program).name
        words = [word.strip("[]") for word in words]
        options = {word for word in words if word.startswith("--")}
        verbs = words[: next((i for i, word in enumerate(words) if word.startswith("-")), len(words))]
        asked.add((bare, *verbs))
        told = subprocess.run(
            [BIN / bare, *verbs, "--help"], capture_output=True, text=True, check=True, timeout=60, cwd="/",
            env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"},
        ).stdout  # fmt: skip
        assert not {option for option in options if option not in told}, (bare, verbs)
    assert asked >= {
        ("tierkv-daemon",),
        ("tierkv", "status"),
        ("tierkv", "stats"),
        ("tierkv", "config", "show"),
    }


def test_every_make_target_that_is_named_in_the_text_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", README)) <= targets


def defaults() -> dict[str, object]:
    return {
        name: field.get_default(call_default_factory=True)
        for name, field in DaemonConfig.model_fields.items()
    }


def test_every_setting_of_the_table_exists_with_that_default() -> None:
    rows = re.findall(r"^\| (`[a-z_`, ]+) \| (.*?) \| .*\|$", README, re.MULTILINE)
    said: dict[str, str] = {}
    for names, values in rows:
        settings = re.findall(r"[a-z_]+", names)
        shown = values.split(", ") if len(settings) > 1 else [values]
        said |= dict(zip(settings, shown, strict=True))
    assert len(said) >= 10
    real = defaults()
    for name, shown in said.items():
        default = real[name]
        shown = shown.strip("`")
        if isinstance(default, int) and name in ("hbm", "host"):
            assert parse_size(shown) == default, name
        elif isinstance(default, float):
            assert float(shown) == default, name
        elif name == "pins":
            assert dict([shown.split("=")]) == default
        elif name == "state_dir":
            assert default == default_state_dir()
            assert (
                shown.replace("<uid>", str(os.getuid())) == str(default) or "TIERKV_STATE_DIR" in os.environ
            )
        elif name == "ray_address":
            assert (shown, default) == ("none", "")
        elif name == "layer_codecs":
            assert (shown, default) == ("none", {})
        elif name == "http_port":
            assert (shown, default) == ("any free one", 0)
        else:
            assert shown == str(default), name


def test_every_file_that_is_linked_or_shown_exists() -> None:
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), (document.name, target)
