"""Kernel threads: the OpenMP layer is pinned, several threads may call kernels, edited helpers are recompiled."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tierkv import attention, quant
from tierkv.attention.contract import Pages, PoolView
from tierkv.attention.online_softmax import ZERO, weigh
from tierkv.errors import ConfigError
from tierkv.geometry import Geometry


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_kernels_run_on_openmp() -> None:
    done = run(
        "import numba; from tierkv.numba_setup import ensure_threading_layer\n"
        "ensure_threading_layer(); print(numba.threading_layer())"
    )
    assert done.stdout.strip() == "omp", done.stderr


def test_a_layer_that_started_before_is_refused_with_a_way_out() -> None:
    done = run(
        "import numba; numba.config.THREADING_LAYER = 'workqueue'; numba.set_num_threads(1)\n"
        "from tierkv.errors import ConfigError; from tierkv.numba_setup import ensure_threading_layer\n"
        "try: ensure_threading_layer()\n"
        "except ConfigError as error: print(error)"
    )
    assert "workqueue" in done.stdout and "NUMBA_THREADING_LAYER=omp" in done.stdout, done.stderr


def test_a_missing_openmp_is_refused_with_a_way_out() -> None:
    done = run(
        "import sys; sys.modules['numba.np.ufunc.omppool'] = None\n"
        "from tierkv.errors import ConfigError; from tierkv.numba_setup import ensure_threading_layer\n"
        "try: ensure_threading_layer()\n"
        "except ConfigError as error: print(error)"
    )
    assert "libgomp" in done.stdout, done.stderr


def test_starting_the_layer_leaves_the_thread_count_of_torch_alone() -> None:
    done = run(
        "import torch; torch.set_num_threads(1)\n"
        "from tierkv.numba_setup import ensure_threading_layer\n"
        "ensure_threading_layer(); print(torch.get_num_threads())"
    )
    assert done.stdout.strip() == "1", done.stderr


def test_an_edited_helper_recompiles_the_kernels_of_other_files(tmp_path: Path) -> None:
    helper = "from tierkv.numba_setup import kernel\n@kernel()\ndef helper(x):\n    return x + {}\n"
    (tmp_path / "caller.py").write_text(
        "from helper import helper\nfrom tierkv.numba_setup import kernel\n"
        "@kernel()\ndef caller(x):\n    return helper(x)\n"
    )
    printed = []
    for addend in (1, 2):
        (tmp_path / "helper.py").write_text(helper.format(addend))
        code = "import caller; r = caller.caller(10); print(r, sum(caller.caller.stats.cache_hits.values()))"
        for _ in range(2):
            done = run(code, PYTHONPATH=str(tmp_path), PYTHONDONTWRITEBYTECODE="1")
            assert done.returncode == 0, done.stderr
            printed.append(done.stdout.split())
    assert printed == [["11", "0"], ["11", "1"], ["12", "0"], ["12", "1"]]


def test_threads_that_decode_at_once_do_not_disturb_each_other() -> None:
    geometry = Geometry(1, 3, 64, "float32", 16)
    cpu, reference = attention.get("cpu"), attention.get("reference")
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn((12, *geometry.shape), generator=generator)
    view = PoolView(
        pool.numpy().view(np.uint8).reshape(-1), geometry, quant.get("k3v2"), np.zeros(0, np.float32)
    )
    counts = np.full(12, 16, np.int32)
    pages = Pages(
        np.arange(12, dtype=np.int64) * geometry.page_bytes, np.ones(12, np.int8), counts,
        np.arange(12, dtype=np.int64) * 16, np.array([0, 12], np.int64), 192,
    )  # fmt: skip
    queries = [torch.randn((1, 9, 64), generator=generator) for _ in range(4)]
    expected = [reference.decode(query, view, pages, 0, 0.125).out for query in queries]

    def decode_often(index: int) -> float:
        worst = 0.0
        for _ in range(50):
            mass = np.zeros(192, np.float32)
            got = cpu.decode(queries[index], view, pages, 0, 0.125, token_mass=mass)
            worst = max(worst, float((got.out - expected[index]).abs().max()), abs(float(mass.sum()) - 1.0))
        return worst

    with ThreadPoolExecutor(4) as threads:
        assert max(threads.map(decode_often, range(4))) < 1e-5


def test_the_exponential_of_weights_is_accurate_and_ends_in_zero() -> None:
    x = np.linspace(-100.0, 0.0, 100_001, dtype=np.float32)
    expected = np.exp(x.astype(np.float64))
    got = x.copy()
    weigh(got, ZERO)
    relative = np.abs(got / expected - 1.0)
    assert relative[x > -10].max() < 1e-6 and relative[x > -86.9].max() < 1e-5
    assert got[-1] == 1.0 and not got[x < -87.1].any()
    special = np.array([-np.inf, -1e30, np.nan], np.float32)
    weigh(special, ZERO)
    assert special[0] == 0.0 and special[1] == 0.0 and np.isnan(special[2])


def test_an_unknown_implementation_is_named() -> None:
    with pytest.raises(ConfigError, match="'cuda9' is not one of reference, cpu, triton"):
        attention.get("cuda9")
