"""The benchmarks run and write what they say; how fast is for `make bench` to say, on a machine that is quiet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tierkv.benchmarks.pairs import compare, interleave

ROOT = Path(__file__).resolve().parents[2]
FIGURES = {"ours", "peer", "ratio", "ratio_low", "ratio_high", "pairs"}
MOVES = {"hbm_to_host", "host_to_hbm", "checksum", "k3v2"}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tierkv.benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_a_quick_run_of_requests_and_moves_writes_each_figure_beside_its_peer(tmp_path: Path) -> None:
    done = bench("request", "moves", "--quick", "--out", str(tmp_path / "new" / "bench.json"))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert set(results) == {"machine", "request", "moves"}
    machine = results["machine"]
    assert machine["cpu"] and machine["cores"] == len(os.sched_getaffinity(0)) and machine["torch"]
    assert machine["load_before"] >= 0 and machine["load_after"] >= 0
    assert set(results["request"]) == {"ping", "reserve"}
    assert set(results["moves"]) == {"smollm2-135m", "8b"}
    assert [set(moves) for moves in results["moves"].values()] == [MOVES] * 2
    pages = {name: moves["k3v2"]["page_bytes"] for name, moves in results["moves"].items()}
    assert pages == {"smollm2-135m": 30 * 2 * 3 * 16 * 64 * 2, "8b": 32 * 2 * 8 * 16 * 128 * 2}
    figures = [
        *results["request"].values(),
        *(one for moves in results["moves"].values() for one in moves.values()),
    ]
    for one in figures:
        assert set(one) > FIGURES
        assert one["ours"] > 0 and one["peer"] > 0 and one["pairs"] >= 3
        assert one["ratio_low"] <= one["ratio"] <= one["ratio_high"]
    for name in ("request ping", "request reserve", "move 8b host_to_hbm"):
        assert name in done.stdout


def test_an_unknown_benchmark_is_refused_by_name() -> None:
    done = bench("speed")
    assert done.returncode == 2
    assert "speed" in done.stderr and "request, moves, decode" in done.stderr


def test_samples_are_taken_in_turn_and_those_of_the_warm_up_are_left_out() -> None:
    taken: list[str] = []
    numbers = iter((100.0, 1.0, 2.0, 1.0, 6.0, 2.0, 16.0, 4.0))

    def sample(name: str) -> float:
        taken.append(name)
        return next(numbers)

    figures = interleave(lambda: sample("ours"), lambda: sample("peer"), pairs=3)
    assert taken == ["ours", "peer"] * 4
    assert (figures["ours"], figures["peer"], figures["pairs"]) == (6.0, 2.0, 3)


def test_the_ratio_is_the_median_of_pairs_not_the_ratio_of_medians() -> None:
    figures = compare([(1.0, 1.0), (10.0, 2.0), (3.0, 3.0)])  # ratios 1, 5, 1; medians 3 and 2
    assert (figures["ratio"], figures["ours"], figures["peer"]) == (1.0, 3.0, 2.0)


def test_no_pairs_give_no_figures() -> None:
    with pytest.raises(ValueError, match="no pair"):
        compare([])


def test_a_quick_run_of_policies_times_what_one_and_many_sessions_take(tmp_path: Path) -> None:
    done = bench("policy", "--quick", "--out", str(tmp_path / "bench.json"))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "bench.json").read_text())["policy"]
    assert set(results) == {"one_session", "all_changed", "one_in_100_changed", "choice"}
    for name, one in results.items():
        assert set(one) > FIGURES and one["ours"] > 0 and one["peer"] > 0
        assert one["pages"] == one["sessions"] * -(-one["tokens"] // 16)
        assert f"policy {name}, ms" in done.stdout
    assert results["one_in_100_changed"]["ours"] < results["all_changed"]["peer"]


def test_the_peer_of_the_policies_finds_the_same_scores_guards_and_pages() -> None:
    from tierkv.benchmarks.policy import _Daemon

    daemon = _Daemon(3, 1000)
    daemon.step(1)
    daemon.score()
    pages = daemon.state.pages
    ours = pages.score.copy(), pages.guard.copy(), daemon.choose()
    daemon.plain_scores()
    assert pages.score == pytest.approx(ours[0], rel=1e-5)
    assert pages.guard.tolist() == ours[1].tolist()
    pages.score[:] = ours[0]
    assert daemon.plain_choice() == ours[2]
