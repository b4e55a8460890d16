"""`tierkv-daemon` and `tierkv` as a user runs them: one daemon with its local Ray for the whole file, stopped last."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

import tierkv
from tests.faults.pages import SMALL, step
from tierkv.daemon import statedir
from tierkv.protocol import Audit

START_SECONDS = 120.0
"""ray.init takes 4 s alone and much longer on a busy machine."""

SERVING_AGAIN_SECONDS = 10.0
"""What a killed owner may take until workers are served again."""

STOP_SECONDS = 60.0
MIB = 1 << 20

BIN = Path(sys.executable).parent
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith(("TIERKV_", "RAY_"))}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass
class Daemon:
    process: subprocess.Popen[str]
    state_dir: Path
    banner: dict[str, str]

    @property
    def http(self) -> statedir.HttpRecord:
        found = statedir.read_http(self.state_dir)
        assert found is not None
        return found

    def family(self) -> list[psutil.Process]:
        """The daemon and every process under it: Ray's, and the owner."""
        daemon = psutil.Process(self.process.pid)
        return [daemon, *daemon.children(recursive=True)]


def start(state_dir: Path, *more: str) -> Daemon:
    """Run `tierkv-daemon` until its banner is complete."""
    with open(state_dir.with_suffix(".err"), "w") as errors:
        process = subprocess.Popen(
            [BIN / "tierkv-daemon", "--hbm", "8MiB", "--host", "16MiB", "--state-dir", str(state_dir), *more],
            stdout=subprocess.PIPE, stderr=errors, text=True, env=CLEAN, cwd="/",
        )  # fmt: skip
    assert process.stdout is not None
    banner: dict[str, str] = {}
    for line in process.stdout:
        key, _, value = line.strip().partition(": ")
        banner[key] = value
        if key == "life":
            return Daemon(process, state_dir, banner)
    raise AssertionError(f"no banner: {errors_of(state_dir)}")


def errors_of(state_dir: Path) -> str:
    return state_dir.with_suffix(".err").read_text()


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / program, *arguments], capture_output=True, text=True, env=CLEAN | environment, cwd="/",
        timeout=START_SECONDS, check=False,
    )  # fmt: skip


def until(condition: object, seconds: float) -> float:
    """Seconds until the condition holds."""
    assert callable(condition)
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, f"it did not come true within {seconds:g} s"
        time.sleep(0.02)
    return time.monotonic() - begun


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short path: it holds sockets."""
    made = Path(tempfile.mkdtemp(prefix="tierkv-e2e-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    daemon = start(folder / "s")
    yield daemon
    if daemon.process.poll() is None:
        daemon.process.kill()
        daemon.process.wait()


def test_the_banner_is_plain_and_says_sizes_places_and_its_life(daemon: Daemon) -> None:
    banner = daemon.banner
    assert any(line.startswith("tierkv-daemon 0.") and line.endswith("is ready") for line in banner)
    assert banner["endpoint"] == f"ipc://{daemon.state_dir}/requests.sock"
    assert banner["epoch"] == "1"
    assert banner["hbm"].startswith("8 MiB (8,388,608 bytes): 64 exact tokens of an 8B model")
    assert banner["host"].startswith("16 MiB (16,777,216 bytes)")
    assert banner["codec, policy"].startswith("k3v2, memdecay")
    assert banner["life"] == "local Ray; the daemon ends with this process"
    assert "\x1b" not in "".join(banner.values())
    with urllib.request.urlopen(banner["metrics"], timeout=5) as answer:
        assert b"tierkv_epoch 1.0" in answer.read()


def test_status_stats_ping_and_config_answer_people_and_programs(daemon: Daemon) -> None:
    where = ("--state-dir", str(daemon.state_dir))
    status = json.loads(run("tierkv", "status", "--json", *where).stdout)
    assert (status["epoch"], status["health"], status["stats"]["hbm_capacity_bytes"]) == (
        1,
        {"reason": ""},
        8 * MIB,
    )
    said = run("tierkv", "status", *where).stdout
    assert "health           well" in said
    assert "0 bytes of 8 MiB (0%)" in said
    stats = json.loads(run("tierkv", "stats", "--json", *where).stdout)
    assert stats["host_capacity_bytes"] == 16 * MIB
    ping = json.loads(run("tierkv", "ping", "--json", "-n", "20", *where).stdout)
    assert ping["count"] == 20
    assert 0 < ping["min_us"] <= ping["median_us"] <= ping["p99_us"] <= ping["max_us"]
    config = json.loads(run("tierkv", "config", "show", "--running", "--json", *where).stdout)
    assert config["hbm"] == {"value": 8 * MIB, "origin": "command line"}
    assert config["codec"] == {"value": "k3v2", "origin": "default"}


def test_explain_says_to_people_and_programs_why_a_page_is_where_it_is(daemon: Daemon) -> None:
    where = ("--state-dir", str(daemon.state_dir))
    with tierkv.connect(daemon.state_dir) as client:
        session = client.open(SMALL, "m")
        session.label("user", 48)
        step(client, session, 1, 48)
        said = run("tierkv", "explain", str(session.id), "--token", "20", *where).stdout.splitlines()
        told = json.loads(run("tierkv", "explain", str(session.id), "1", "--json", *where).stdout)
        unknown = run("tierkv", "explain", "7", "1", *where)
    assert f"page        1 of session {session.id} (0 to 2); everywhere {told['id']:#x}" in said
    assert "holds       tokens 16 to 31, user" in said
    assert "is          exact in HBM" in said
    assert "why         it was written there" in said
    assert any(
        line.startswith("next        stays for 48 more tokens exact") for line in said
    )  # 64 - (48 - 32)
    assert (told["start"], told["tokens"], told["tier"], told["guards"]) == (
        16,
        16,
        "hbm",
        {"recent": "recent"},
    )
    assert told["replicas"][0] == {"form": "exact", "pool": "hbm", "bytes": SMALL.page_bytes}
    assert unknown.returncode == 1
    assert f"session 7 is not open; open: {session.id}" in unknown.stderr


def test_sessions_are_listed_for_people_and_programs(daemon: Daemon) -> None:
    where = ("--state-dir", str(daemon.state_dir))
    with tierkv.connect(daemon.state_dir) as client:
        session = client.open(SMALL, "m")
        session.label("user", 48)
        step(client, session, 1, 48)
        step(client, session, 1, 1, steps=1)
        session.observe(np.full(49, 1 / 49, np.float32), Audit(0.75, 0.9, 0.25, 0.2, 3))
        until(lambda: client.sessions()[0].audits == 1, 5.0)
        (told,) = json.loads(run("tierkv", "sessions", "--json", *where).stdout)
        head, line = run("tierkv", "sessions", *where).stdout.splitlines()
        session.close()
        until(lambda: client.sessions() == [], 5.0)
    assert (told["session"], told["model"], told["tokens"], told["step"]) == (session.id, "m", 49, 1)
    assert (told["attention_recall"], told["missed_mass"], told["needed_cold_pages"]) == (0.75, 0.25, 3)
    assert told["pages"] == {"hbm": 4, "middle": 0, "quantized": 0, "host": 0, "dropped": 0}
    assert told["prefetched"] == {"used": 0, "late": 0, "wasted": 0, "cancelled": 0, "filled": 0}
    assert told["blocked_seconds"] >= 0
    assert head.split()[:3] == ["session", "worker", "model"]
    assert line.split()[0] == str(session.id) and "4/0/0" in line and "75.0%" in line


def test_a_second_daemon_is_refused_at_once_and_told_what_differs(daemon: Daemon) -> None:
    refused = run("tierkv-daemon", "--hbm", "4MiB", "--host", "16MiB", "--state-dir", str(daemon.state_dir))
    assert refused.returncode == 1
    assert f"belongs to process {daemon.process.pid}" in refused.stderr
    assert "differs from yours in hbm (8388608 there, 4194304 here)" in refused.stderr
    assert "local Ray" not in refused.stderr  # it did not even start one
    assert daemon.process.poll() is None


def test_a_policy_file_is_served_and_compared(folder: Path) -> None:
    file, state_dir = folder / "policy.toml", folder / "p"
    file.write_text('policy = "memdecay-lift"\n[half_life]\nplan = 7.0\n')
    daemon = start(state_dir, "--policy-file", str(file))
    try:
        assert daemon.banner["policy file"] == str(file)
        config = json.loads(run("tierkv", "status", "--json", "--state-dir", str(state_dir)).stdout)["config"]
        assert (config["policy"], config["policy_settings"]["half_life"]["plan"]) == ("memdecay-lift", 7.0)
        file.write_text('policy = "memdecay-lift"\n[half_life]\nplan = 8.0\n')
        same = ("--hbm", "8MiB", "--host", "16MiB", "--state-dir", str(state_dir))
        refused = run("tierkv-daemon", *same, "--policy-file", str(file))
        assert refused.returncode == 1
        assert "differs from yours in policy_settings.half_life.plan (7.0 there, 8.0 here)" in refused.stderr
    finally:
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(STOP_SECONDS) == 0


def test_a_node_of_a_cluster_has_one_owner(daemon: Daemon, folder: Path) -> None:
    record = json.loads((daemon.state_dir / "ray.json").read_text())
    refused = run(
        "tierkv-daemon", "--hbm", "4MiB", "--host", "0", "--state-dir", str(folder / "other"),
        "--ray-address", record["address"],
        RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(daemon.state_dir / "ray.token"),
    )  # fmt: skip
    assert refused.returncode == 1, refused.stderr
    assert "this node already has an owner" in refused.stderr
    assert str(daemon.state_dir) in refused.stderr


def test_the_owner_process_never_loads_torch(daemon: Daemon) -> None:
    maps = Path(f"/proc/{daemon.http.pid}/maps").read_text()
    assert "libzmq" in maps or "zmq" in maps  # the right process
    assert "torch" not in maps


def test_a_killed_owner_serves_again_with_the_next_epoch_and_its_workers_come_back(daemon: Daemon) -> None:
    with tierkv.connect(daemon.state_dir) as client:
        for expected in (2, 3):
            victim = daemon.http
            assert victim.epoch == expected - 1
            os.kill(victim.pid, signal.SIGKILL)
            took = until(
                lambda epoch=expected: client.connected and client.epoch == epoch, SERVING_AGAIN_SECONDS
            )
            assert client.ping() < 1.0
            assert daemon.http.pid != victim.pid
            print(f"serving again after {took:.2f} s")
        memory = client.hbm()
        assert len(memory) == 8 * MIB
    status = json.loads(run("tierkv", "status", "--json", "--state-dir", str(daemon.state_dir)).stdout)
    assert status["epoch"] == 3
    until(lambda: "serves again, epoch 3" in errors_of(daemon.state_dir), 10)


def test_a_killed_daemon_takes_its_ray_and_owner_along_and_the_next_one_goes_on(daemon: Daemon) -> None:
    family = daemon.family()
    leftover = Path(json.loads((daemon.state_dir / "ray.json").read_text())["folder"])
    daemon.process.kill()
    daemon.process.wait()
    _, alive = psutil.wait_procs(family, timeout=30)  # the reaper is one of them, and the last
    assert not alive
    assert not leftover.exists()
    assert (daemon.state_dir / "host.pool").exists()
    next_one = start(daemon.state_dir)
    daemon.process, daemon.banner = next_one.process, next_one.banner
    assert daemon.banner["epoch"] == "4"


def test_sigterm_drains_and_leaves_no_process_no_socket_and_no_pool(daemon: Daemon) -> None:
    record = json.loads((daemon.state_dir / "ray.json").read_text())
    family = daemon.family()
    assert any(process.pid == daemon.http.pid for process in family)
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(STOP_SECONDS) == 0
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    left = {path.name for path in daemon.state_dir.iterdir()}
    assert left == {"epoch", "lock", "daemon.lock", "owner.log"}
    assert not Path(record["folder"]).exists()
    said = errors_of(daemon.state_dir)
    assert "draining" in said
    assert "stopped; " in said
    answer = run("tierkv", "ping", "--state-dir", str(daemon.state_dir), "--timeout", "0.2")
    assert answer.returncode == 1
    assert "no daemon answers" in answer.stderr
    answer = run("tierkv", "status", "--state-dir", str(daemon.state_dir))
    assert answer.returncode == 1
    assert "start tierkv-daemon" in answer.stderr
