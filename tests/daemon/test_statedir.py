"""One owner at a time, and an epoch that only grows."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tierkv.daemon import statedir
from tierkv.daemon.statedir import StateLock, next_epoch, read_holder, remove_stale_sockets
from tierkv.errors import ConfigError, StateDirectoryLocked

HOLD = """
import sys, time
from pathlib import Path
from tierkv.daemon.statedir import StateLock, next_epoch
lock = StateLock(Path(sys.argv[1]), config={"hbm": 4096, "codec": "k3v2"})
print(next_epoch(Path(sys.argv[1])), flush=True)
time.sleep(60)
"""


def other_owner(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock; returns once it does."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/")
    assert process.stdout is not None
    assert process.stdout.readline().strip().isdigit()
    return process


def test_the_directory_is_for_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with StateLock(folder) as lock:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(lock.path.stat().st_mode) == 0o600


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is a link"):
        statedir.make_private(tmp_path / "link")


def test_a_second_owner_learns_who_the_first_is_and_what_differs(tmp_path: Path) -> None:
    process = other_owner(tmp_path)
    try:
        with pytest.raises(StateDirectoryLocked) as caught:
            StateLock(tmp_path, config={"hbm": 8192, "codec": "k3v2"})
        said = str(caught.value)
        assert f"process {process.pid} on {socket.gethostname()}" in said
        assert "hbm (4096 there, 8192 here)" in said
        assert "codec" not in said
        with pytest.raises(StateDirectoryLocked, match="the same as yours"):
            StateLock(tmp_path, config={"hbm": 4096, "codec": "k3v2"})
    finally:
        process.kill()
        process.wait()


def test_a_killed_owner_frees_the_lock_and_the_next_epoch_is_one_higher(tmp_path: Path) -> None:
    process = other_owner(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with StateLock(tmp_path):
        assert next_epoch(tmp_path) == 2


def test_epochs_count_owner_starts_and_survive_the_process(tmp_path: Path) -> None:
    for expected in (1, 2, 3):
        with StateLock(tmp_path):
            assert next_epoch(tmp_path) == expected
    record = statedir.read_epoch(tmp_path)
    assert record is not None
    assert record.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert not list(tmp_path.glob("*.new"))


def test_a_damaged_epoch_is_refused_instead_of_guessed(tmp_path: Path) -> None:
    (tmp_path / "epoch").write_text('{"epoch": 4')
    with pytest.raises(ConfigError, match=r"epoch is damaged"):
        next_epoch(tmp_path)


def test_a_process_that_dies_while_it_writes_leaves_the_old_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert next_epoch(tmp_path) == 1

    def die(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", die)
        next_epoch(tmp_path)
    assert next_epoch(tmp_path) == 2


def test_a_released_lock_can_be_taken_again_and_names_the_new_holder(tmp_path: Path) -> None:
    first = StateLock(tmp_path, config={"hbm": 1})
    first.release()
    first.release()  # twice is once
    assert read_holder(tmp_path) is None
    with StateLock(tmp_path, config={"hbm": 2}):
        holder = read_holder(tmp_path)
        assert holder is not None
        assert (holder.pid, holder.config) == (os.getpid(), {"hbm": 2})


def test_the_daemon_and_its_owner_hold_different_locks(tmp_path: Path) -> None:
    with (
        StateLock(tmp_path, statedir.DAEMON_LOCK),
        StateLock(tmp_path, statedir.OWNER_LOCK),
        pytest.raises(StateDirectoryLocked),
    ):
        StateLock(tmp_path, statedir.DAEMON_LOCK)


def test_sockets_of_a_dead_owner_are_removed_and_other_files_stay(tmp_path: Path) -> None:
    for name in statedir.SOCKETS:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / name))
    statedir.write_http(tmp_path, statedir.HttpRecord("http://127.0.0.1:1", 1, 1))
    (tmp_path / "host.pool").write_bytes(b"pages")
    with StateLock(tmp_path):
        assert remove_stale_sockets(tmp_path) == ["attach.sock", "requests.sock", "http.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["host.pool", "lock"]


def test_nobody_reaches_a_live_owners_sockets_because_the_lock_comes_first(tmp_path: Path) -> None:
    process = other_owner(tmp_path)
    try:
        with socket.socket(socket.AF_UNIX) as alive:
            alive.bind(str(tmp_path / "attach.sock"))
            with pytest.raises(StateDirectoryLocked), StateLock(tmp_path):
                remove_stale_sockets(tmp_path)
            assert (tmp_path / "attach.sock").is_socket()
    finally:
        process.kill()
        process.wait()


def test_a_lock_does_not_leak_into_a_child_process(tmp_path: Path) -> None:
    lock = StateLock(tmp_path)
    child = subprocess.Popen(["sleep", "30"], close_fds=False)
    try:
        lock.release()
        time.sleep(0.05)
        StateLock(tmp_path).release()
    finally:
        child.kill()
        child.wait()
