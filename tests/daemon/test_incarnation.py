"""One owner start without Ray: what it serves, and what it leaves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tierkv
from tests.fake_cuda import UUIDS, FakeDriver, fake_gpu
from tierkv import handshake
from tierkv.daemon import statedir
from tierkv.daemon.brain import Brain
from tierkv.daemon.brain_config import BrainConfig
from tierkv.daemon.config import load_config
from tierkv.daemon.events import Tick
from tierkv.daemon.incarnation import Incarnation, brain_config
from tierkv.daemon.policy import get as get_policy
from tierkv.errors import ConfigError, StateDirectoryLocked
from tierkv.protocol import PROTOCOL_VERSION, Attach

MIB = 1 << 20


def start(state_dir: Path, **flags: object) -> Incarnation:
    return Incarnation(*load_config({"state_dir": state_dir, "hbm": 8 * MIB, "host": 16 * MIB} | flags))


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Incarnation]:
    owner = start(tmp_path / "s")
    yield owner
    owner.stop(drain=False)


def get(owner: Incarnation, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(str(owner.info()["url"]) + path, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def until(condition: object, seconds: float = 5.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def test_a_worker_attaches_and_shows_in_the_metrics(owner: Incarnation, tmp_path: Path) -> None:
    with tierkv.connect(tmp_path / "s") as client:
        assert client.epoch == 1
        assert client.hbm_bytes == 8 * MIB
        client.ping()
        lines = get(owner, "/metrics")[1].splitlines()
        assert "tierkv_workers 1.0" in lines
        assert 'tierkv_tier_capacity_bytes{tier="host"} 1.6777216e+07' in lines
    until(lambda: "tierkv_workers 0.0" in get(owner, "/metrics")[1].splitlines())


def test_the_clock_ticks_and_health_is_green(owner: Incarnation) -> None:
    assert get(owner, "/health")[0] == 200
    first = owner.service.loop.ticks
    until(lambda: owner.service.loop.ticks > first)


def test_health_turns_red_while_the_brain_is_stuck_and_still_answers(
    owner: Incarnation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.daemon.http.LOOP_STUCK_SECONDS", 0.3)
    release, inside = threading.Event(), threading.Event()
    handle = owner.service.brain.handle

    def stuck(event: object, now: float) -> list[object]:
        if isinstance(event, Tick):
            inside.set()
            release.wait(10)
        return handle(event, now)  # type: ignore[arg-type,return-value]

    monkeypatch.setattr(owner.service.brain, "handle", stuck)
    assert inside.wait(5)
    until(lambda: get(owner, "/health")[0] == 503)
    assert "the loop has not ticked" in get(owner, "/health")[1]
    assert get(owner, "/metrics")[0] == 200
    release.set()
    until(lambda: get(owner, "/health")[0] == 200)


def test_health_is_red_once_nothing_would_restart_the_owner(
    owner: Incarnation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getppid", lambda: 1)  # what an orphan sees
    status, said = get(owner, "/health")
    assert status == 503
    assert "Ray is gone" in said


def test_status_names_each_values_origin(owner: Incarnation) -> None:
    status = json.loads(get(owner, "/status")[1])
    assert status["config"]["hbm"] == 8 * MIB
    assert status["origins"]["hbm"] == "command line"
    assert status["origins"]["codec"] == "default"
    assert status["ready"] == {"reason": ""}


def test_a_policy_file_is_in_the_status_and_in_what_a_second_start_compares(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('policy = "ema"\na = 0.05\n[thresholds]\noffload_below = -inf\n')
    owner = start(tmp_path / "s", policy_file=file)
    try:
        config = json.loads(get(owner, "/status")[1])["config"]
        assert (config["policy"], config["policy_file"]) == ("ema", str(file))
        assert config["policy_settings"]["a"] == 0.05
        assert config["policy_settings"]["thresholds"]["offload_below"] == "-inf"
        with pytest.raises(StateDirectoryLocked, match="is the same as yours"):
            start(tmp_path / "s", policy_file=file)
        file.write_text('policy = "ema"\na = 0.1\n[thresholds]\noffload_below = 0.2\n')
        differs = r"policy_settings.a \(0.05 there, 0.1 here\), policy_settings.thresholds.offload_below \('-inf' there"
        with pytest.raises(StateDirectoryLocked, match=differs):
            start(tmp_path / "s", policy_file=file)
    finally:
        owner.stop(drain=False)


def test_the_brain_scores_by_the_policy_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('policy = "ema"\na = 0.05\n[thresholds]\noffload_below = 0.3\ndrop_below = 0.1\n')
    loaded = load_config({"state_dir": tmp_path, "policy_file": file, "drop_below": 0.2})
    brain = Brain(brain_config(loaded.config, MIB, MIB, 1))
    assert brain.state.policy == get_policy(
        "ema", a=0.05, thresholds={"offload_below": 0.3, "drop_below": 0.1}
    )
    assert (brain.state.thresholds.offload_below, brain.state.thresholds.drop_below) == (0.3, 0.2)


def test_draining_takes_ready_away_but_not_health(owner: Incarnation) -> None:
    owner.drain(5)
    assert (get(owner, "/health")[0], get(owner, "/ready")[0]) == (200, 503)


def test_a_second_owner_is_refused_and_takes_nothing_from_the_first(
    owner: Incarnation, tmp_path: Path
) -> None:
    with pytest.raises(StateDirectoryLocked, match=r"hbm \(8388608 there, 4194304 here\)"):
        start(tmp_path / "s", hbm=4 * MIB)
    with tierkv.connect(tmp_path / "s") as client:
        assert client.epoch == 1


def test_a_clean_stop_leaves_locks_and_epoch_only(tmp_path: Path) -> None:
    owner = start(tmp_path / "s")
    owner.stop()
    owner.stop()  # twice is once
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["epoch", "lock"]
    again = start(tmp_path / "s")
    assert again.epoch == 2
    again.stop(drain=False)


def test_a_clean_stop_keeps_the_host_pool_for_a_worker_that_still_runs(tmp_path: Path) -> None:
    owner = start(tmp_path / "s")
    code = "import sys, tierkv; c = tierkv.connect(sys.argv[1]); print(c.epoch, flush=True); sys.stdin.read()"
    worker = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "s")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"1\n"
    owner.stop(drain=False)
    assert (tmp_path / "s/host.pool").exists()
    assert not (tmp_path / "s/attach.sock").exists()
    worker.kill()
    worker.communicate()
    start(tmp_path / "s").stop(drain=False)
    assert not (tmp_path / "s/host.pool").exists()


def test_a_start_that_fails_late_leaves_no_pool_no_socket_and_no_lock(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"http_port = {port}"):
            start(tmp_path / "s", http_port=port)
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["epoch", "lock"]
    statedir.StateLock(tmp_path / "s").release()


def test_every_setting_of_the_brain_can_be_configured(tmp_path: Path) -> None:
    loaded = load_config(
        {
            "state_dir": tmp_path, "demotion": "eager", "backup": "never", "low_watermark": 0.2, "high_watermark": 0.3,
            "sink_tokens": 1, "recent_tokens": 2, "pins": "plan=exact", "pin_quota": 0.25, "page_tokens": 32,
            "layout": "straddling", "min_residency_steps": 3, "max_moves_in_flight": 5, "move_bandwidth": "1MiB",
            "offload_below": 0.05, "layer_codecs": "1=kivi2", "promotion_batch": "2MiB", "retain_most": 60,
            "waste_limit": 0.5,
        }
    )  # fmt: skip
    brain = brain_config(loaded.config, 100, 200, 9)
    own = BrainConfig(100, 200)
    assert (brain.hbm_bytes, brain.host_bytes, brain.epoch) == (100, 200, 9)
    assert (brain.demotion, brain.backup, brain.straddle, brain.page_tokens) == ("eager", "never", True, 32)
    assert (brain.low_watermark, brain.high_watermark, brain.pin_quota) == (0.2, 0.3, 0.25)
    assert (brain.sink_tokens, brain.recent_tokens, brain.pins) == (1, 2, (("plan", "exact"),))
    assert (brain.min_residency_steps, brain.max_moves_in_flight, brain.move_bandwidth) == (3, 5, MIB)
    assert brain.codec == "k3v2,1=kivi2"
    assert (brain.promotion_batch, brain.retain_most, brain.waste_limit) == (2 * MIB, 60.0, 0.5)
    assert brain.thresholds is not None
    assert brain.thresholds.offload_below == 0.05
    defaults = brain_config(load_config({"state_dir": tmp_path}).config, 100, 200, 1)
    assert {**vars(defaults), "thresholds": None} == vars(own)  # the same defaults in both places


def test_nothing_on_the_owners_path_imports_torch() -> None:
    code = "import sys, tierkv.daemon.incarnation, tierkv.commands; print(*sorted(sys.modules))"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True
    ).stdout
    loaded = set(modules.split())
    assert "numba" in loaded  # the list is the right one
    assert not loaded & {"torch", "transformers", "bitsandbytes", "ray"}


def test_an_owner_that_finds_no_gpu_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.daemon.gpu.CudaDriver", FakeDriver)
    said = {
        "cuda:5": "device = 'cuda:5', and this process sees 2 GPUs, numbered from 0; check CUDA_VISIBLE_DEVICES"
    }
    if not torch.cuda.is_available():
        said["cuda"] = "device = 'cuda', and torch .* finds no CUDA device; install a build with CUDA"
    for device, sentence in said.items():
        with pytest.raises(ConfigError, match=sentence):
            start(tmp_path / "s", device=device)
        assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["epoch", "lock"]
    owner = start(tmp_path / "s", device="cpu")
    assert owner.info()["device"] == "cpu"
    owner.stop(drain=False)


def test_an_owner_on_a_gpu_pins_its_host_pool_and_says_where_its_memory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()
    monkeypatch.setattr("tierkv.daemon.incarnation.open_gpu", lambda name: fake_gpu(driver))
    owner = start(tmp_path / "s", device="cuda:0", hbm=5 * MIB)
    try:
        assert owner.info()["hbm_bytes"] == 4 * MIB  # whole allocations
        assert list(driver.pinned.values()) == [16 * MIB]
        stream, attached, hbm, host = handshake.attach(
            tmp_path / "s", Attach(PROTOCOL_VERSION, "w"), None, 5.0
        )
        assert (attached.device, attached.hbm_bytes) == (UUIDS[0], 4 * MIB)
        stream.close()
        os.close(hbm)
        os.close(host)
    finally:
        owner.stop(drain=False)
    assert driver.left() == (0, 0, 0, 0)
