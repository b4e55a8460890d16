"""What a killed daemon's Ray leaves is found again; nothing else is ever removed. (Ray itself: tests/e2e.)"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tierkv.daemon import reaper
from tierkv.daemon.local_ray import remove_leftovers
from tierkv.daemon.reaper import processes_of, reap


def leave(state_dir: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "session").write_text("logs")
    (state_dir / "ray.json").write_text(f'{{"folder": "{folder}", "address": "127.0.0.1:1"}}')


def test_the_folder_that_the_record_names_is_removed_with_the_record(tmp_path: Path) -> None:
    leave(tmp_path, tmp_path / "tierkv-ray-abc")
    assert remove_leftovers(tmp_path) == tmp_path / "tierkv-ray-abc"
    assert list(tmp_path.iterdir()) == []
    assert remove_leftovers(tmp_path) is None


def test_a_record_that_names_another_folder_removes_nothing_there(tmp_path: Path) -> None:
    leave(tmp_path, tmp_path / "precious")
    remove_leftovers(tmp_path)
    assert (tmp_path / "precious/session").exists()


def holder(folder: Path) -> subprocess.Popen[bytes]:
    """A process that has a file of `folder` open."""
    with open(folder / "session") as file:
        return subprocess.Popen(["sleep", "60"], stdin=file)


def test_a_process_of_the_session_that_stays_is_killed_and_no_other(tmp_path: Path) -> None:
    leave(tmp_path, tmp_path / "tierkv-ray-abc")
    leave(tmp_path, tmp_path / "tierkv-ray-abcd")  # a name that begins the same
    ours, other = holder(tmp_path / "tierkv-ray-abc"), holder(tmp_path / "tierkv-ray-abcd")
    assert reap(tmp_path / "tierkv-ray-abc", grace=0.2) == [ours.pid]
    assert ours.wait(5) == -signal.SIGKILL
    assert other.poll() is None
    assert not (tmp_path / "tierkv-ray-abc").exists()
    other.kill()
    other.wait()


@pytest.mark.parametrize("folder", ["/", "/tmp", "relative/folder"])
def test_a_path_that_cannot_be_a_session_is_refused(folder: str) -> None:
    with pytest.raises(ValueError, match="no session folder"):
        processes_of(Path(folder))


def test_the_reaper_acts_when_its_parent_is_gone_and_not_before(tmp_path: Path) -> None:
    leave(tmp_path, tmp_path / "tierkv-ray-abc")
    watching = subprocess.Popen(
        [sys.executable, "-I", reaper.__file__, str(tmp_path / "tierkv-ray-abc")], stdin=subprocess.PIPE
    )
    with pytest.raises(subprocess.TimeoutExpired):
        watching.wait(0.5)
    assert (tmp_path / "tierkv-ray-abc").exists()
    watching.communicate(timeout=5)  # closes the pipe, as the parent's end would
    assert not (tmp_path / "tierkv-ray-abc").exists()


def test_a_damaged_record_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "ray.json").write_text("{")
    assert remove_leftovers(tmp_path) is None
