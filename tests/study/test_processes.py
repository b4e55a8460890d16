"""The demo leaves nothing behind: no process, no folder; and a child that fails is quoted."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

from tierkv.study import processes

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
FAIL = [sys.executable, "-c", "import sys; print('no room at all', file=sys.stderr); sys.exit(3)"]


def test_leaving_the_block_ends_the_process_even_after_an_error(tmp_path):
    with pytest.raises(RuntimeError), processes.running(SLEEP, tmp_path / "log") as child:
        raise RuntimeError("the demo fails")
    assert child.poll() is not None


def test_sigterm_ends_the_children_first(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from tierkv.study import processes\n"
        f"with processes.running({SLEEP!r}, Path({str(tmp_path / 'log')!r})) as child:\n"
        "    print(child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.terminate()
        assert parent.wait(30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_process_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    with processes.running([sys.executable, "-c", deaf], tmp_path / "log", subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
    assert child.poll() == -9


def test_a_worker_ends_with_its_daemon(tmp_path):
    with (
        processes.running(FAIL, tmp_path / "daemon") as daemon,
        processes.running(SLEEP, tmp_path / "worker") as worker,
    ):
        processes.end_together(daemon, worker)
        worker.wait(30)  # raises when it is still there
        error = processes.failure("daemon", daemon, tmp_path / "daemon")
    assert "the daemon ended with code 3" in str(error)
    assert "no room at all" in str(error)


def test_the_state_directory_is_gone_afterwards():
    with processes.state_directory() as folder:
        (folder / "host.pool").write_bytes(b"x")
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_children_let_waiting_threads_sleep(tmp_path):
    log = tmp_path / "log"
    with processes.running(
        [sys.executable, "-c", "import os; print(os.environ['OMP_WAIT_POLICY'])"], log
    ) as child:
        child.wait(30)
    assert log.read_text() == "PASSIVE\n"


def test_the_daemon_takes_the_demos_settings(tmp_path):
    from tierkv.daemon.config import load_config

    command = processes.daemon_command(tmp_path, 4 << 20, 8 << 20)
    given = [b for a, b in itertools.pairwise(command) if a == "--set"]
    assert given == [f"{name}={value}" for name, value in processes.SETTINGS.items()]
    config = load_config(dict(pair.split("=") for pair in given)).config
    assert {name: getattr(config, name) for name in processes.SETTINGS} == processes.SETTINGS
