from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from tierkv.daemon.registry import REGISTRY_FILE, Registry, Worker, boot_id, start_time, survivors
from tierkv.handshake import leave


def me(client: str = "me") -> Worker:
    started = start_time(os.getpid())
    assert started is not None
    return Worker(client, os.getpid(), started, boot_id())


def test_a_start_time_tells_a_process_from_none_and_from_a_zombie() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert isinstance(start_time(child.pid), int)
    assert start_time(child.pid) >= start_time(os.getpid())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
    assert start_time(child.pid) is None
    child.wait()
    assert child.stdin is not None
    child.stdin.close()
    assert start_time(child.pid) is None


def test_survivors_are_the_registered_workers_that_still_run(tmp_path: Path) -> None:
    first = Registry(tmp_path)
    mine = me()
    first.add(mine)
    first.add(Worker("dead", 2**22 - 1, 5, boot_id()))
    first.add(Worker("reused-pid", os.getpid(), mine.start_time - 1, boot_id()))
    first.add(Worker("before-the-reboot", os.getpid(), mine.start_time, "another boot"))
    first.add(me("detached"))
    first.remove("detached")
    assert survivors(tmp_path) == [mine]
    assert stat.S_IMODE(os.stat(tmp_path / REGISTRY_FILE).st_mode) == 0o600


def test_survivors_stay_registered_until_they_are_removed(tmp_path: Path) -> None:
    Registry(tmp_path).add(me())
    second = Registry(tmp_path)  # an owner that dies before the survivor came back
    assert [worker.client_id for worker in second.survivors] == ["me"]
    assert [worker.client_id for worker in survivors(tmp_path)] == ["me"]
    second.remove("me")
    assert survivors(tmp_path) == []


def test_a_client_that_left_while_there_was_no_owner_is_no_survivor(tmp_path: Path) -> None:
    Registry(tmp_path).add(me())
    leave(tmp_path, "me")
    assert survivors(tmp_path) == []
    Registry(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [REGISTRY_FILE]  # the mark is gone


def test_a_damaged_registry_names_nobody(tmp_path: Path) -> None:
    (tmp_path / REGISTRY_FILE).write_text("[{]")
    assert survivors(tmp_path) == []
