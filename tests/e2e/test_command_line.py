"""Refusals of the command line that need no daemon and no Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("TIERKV_")}


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / program, *arguments], capture_output=True, text=True, env=CLEAN | environment, cwd="/", timeout=60,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--hbm", "4000TiB"), "lower --hbm"),
        (("--hbm", "100"), "needs at least 4096"),
        (("--hbm", "8G"), "write 8GiB or 8GB"),
        (("--hbm", "1MiB", "--codec", "zip"), "codec = 'zip' (command line)"),
        (("--hbm", "1MiB", "--set", "observ_every=3"), "did you mean 'observe_every'"),
        (("--hbm", "1MiB", "--policy", "fifo"), "policy = 'fifo' (command line)"),
        (("--hbm", "1MiB", "--policy-file", "/nowhere.toml"), "the policy file /nowhere.toml cannot be read"),
        (("--hbm", "1MiB", "--set", "nonsense"), "write it as KEY=VALUE"),
        (("--hbm", "1MiB", "--config", "/nowhere.toml"), "does not exist"),
        (
            ("--hbm", "1MiB", "--ray-address", "127.0.0.1:1"),
            "no Ray cluster answers at ray_address = 127.0.0.1:1",
        ),
        (("--hbm", "1MiB", "--ray-address", "nonsense"), "no Ray cluster answers at ray_address = nonsense"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence_before_anything_starts(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    refused = run("tierkv-daemon", "--state-dir", str(tmp_path / "s"), "--host", "0", *arguments)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not [path for path in (tmp_path / "s").glob("*") if path.name not in ("lock", "daemon.lock")]


def test_config_show_tells_where_each_value_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "tierkv.toml"
    file.write_text('host = "1GiB"\n')
    said = run("tierkv", "config", "show", "--config", str(file), TIERKV_OBSERVE_EVERY="7").stdout
    lines = {line.split()[0]: line for line in said.splitlines()}
    assert f"1 GiB (1,073,741,824 bytes)  (file {file})" in lines["host"]
    assert lines["observe_every"].split()[1:] == ["7", "(environment)"]
    assert lines["codec"].endswith("(default)")


@pytest.mark.parametrize("program", ["tierkv", "tierkv-daemon"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(program: str, tmp_path: Path) -> None:
    code = f"""
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "ray" else find(name, *more)
from tierkv.{"cli" if program == "tierkv" else "daemon_cli"} import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 1
    assert done.stderr == f'{program} needs ray: pip install ".[daemon]" in a checkout of tierkv\n'


def test_no_daemon_is_exit_code_one_and_a_sentence(tmp_path: Path) -> None:
    for command in (("status",), ("stats",), ("ping", "--timeout", "0.1"), ("config", "show", "--running")):
        answer = run("tierkv", *command, "--state-dir", str(tmp_path))
        assert answer.returncode == 1, command
        assert answer.stderr.startswith("tierkv: no")
        assert "tierkv-daemon" in answer.stderr
        assert "Traceback" not in answer.stderr
