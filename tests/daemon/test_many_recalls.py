"""Exact pages that go to host memory and come back, very many times, are the bytes that were written.

20,000 recalls by default; `TIERKV_RECALLS=1000000 pytest tests/daemon/test_many_recalls.py` makes a million in minutes.
"""

from __future__ import annotations

import os
import queue
from pathlib import Path

import numpy as np

from tierkv.daemon.cpu_carrier import CpuCarrier
from tierkv.daemon.events import Copy, MoveDone, MoveFailed
from tierkv.daemon.forms import Forms
from tierkv.daemon.mover import Mover
from tierkv.daemon.pools import HbmPool, HostPool
from tierkv.quant import get

RECALLS = int(os.environ.get("TIERKV_RECALLS", "20000"))

PAGE = 256
SLOTS = 1024
"""Of either pool. Half of them are taken, so that every round may choose other places."""

PAGES = SLOTS // 2
ROUNDS = -(-RECALLS // PAGES)


def test_every_recalled_page_is_bit_for_bit_what_was_written(tmp_path: Path) -> None:
    """Each round writes new bytes (floats or not), sends all pages out, wipes HBM, and has them back elsewhere, in
    another order.
    """
    random = np.random.default_rng(0)
    hbm, host = HbmPool.create(SLOTS * PAGE), HostPool(tmp_path, SLOTS * PAGE)
    results: queue.SimpleQueue[MoveDone | MoveFailed] = queue.SimpleQueue()
    mover = Mover(CpuCarrier({"hbm": hbm, "host": host}, Forms(get("k3v2"))), results.put)
    mover.start()
    try:
        there = hbm.data[: SLOTS * PAGE].reshape(SLOTS, PAGE)
        for turn in range(ROUNDS):
            written = random.integers(0, 256, (PAGES, PAGE), np.uint8)
            first, away, back = (random.permutation(SLOTS)[:PAGES] for _ in range(3))
            there[first] = written
            keys = (turn * PAGES + np.arange(PAGES)).tolist()
            for page, (src, dst) in enumerate(zip(first.tolist(), away.tolist(), strict=True)):
                mover.submit(Copy(page, "hbm", src * PAGE, 0, "host", dst * PAGE, PAGE, keys[page]))
            sums = {done.move: done.checksum for done in (results.get(timeout=60) for _ in keys)}
            there[:] = 0xA5
            for page in random.permutation(PAGES).tolist():
                src, dst = int(away[page]) * PAGE, int(back[page]) * PAGE
                mover.submit(Copy(page, "host", src, sums[page], "hbm", dst, PAGE, keys[page]))
            assert {results.get(timeout=60) for _ in keys} == {MoveDone(page) for page in range(PAGES)}
            np.testing.assert_array_equal(there[back], written)
    finally:
        mover.stop()
        hbm.close()
        host.close()
