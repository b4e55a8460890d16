"""The bar of waste over many steps of a made-up reader: fewer wasted promotions, and hardly less mass captured.

The reader attends a few cold pages for some dozens of steps, then others. Estimates of what cold pages get are up to
threefold off, and name two pages a step that nobody wants. Pages that came back before the bar rose are left out: each
is told as wasted only when another page takes its place, long after.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from tests.daemon.test_recall import fill_up, with_cold_pages
from tierkv.daemon import events
from tierkv.daemon.pages import Outcome
from tierkv.daemon.waste import MOST_WASTED, Waste
from tierkv.table import Kind

STEPS, SETTLED = 240, 80
"""Steps in all, and those after which pages that come back, and mass, are measured."""

WANTED_PAGES, WANTED_STEPS, WANTED_MASS = 4, 30, 0.06
STRAY_PAGES, STRAY_MASS = 2, 0.03
"""Pages a step that estimates name for nothing: a lift of 4.8 among 160 pages."""


class Found(NamedTuple):
    wasted: float  # share of the pages that came back since then and whose outcome is known
    captured: float  # mean share of attention on pages in HBM
    brought: int


def read(seed: int) -> Found:
    random = np.random.default_rng(seed)
    w, session = with_cold_pages(min_residency_steps=4)
    fill_up(w)
    rows = len(session.rows)
    starts = np.cumsum([0] + [len(row.stamps) for row in session.rows])
    pages, captured = w.brain.state.pages, []
    slots = np.array([pages.index[row.page] for row in session.rows])
    outcomes = {"used": 0, "wasted": 0}
    pending = np.zeros(rows, bool)  # came back since SETTLED
    wanted = np.zeros(0, np.int64)
    for step in range(STEPS):
        if step % WANTED_STEPS == 0:
            wanted = random.permutation(rows - 20)[:WANTED_PAGES] + 1
        true = np.full(rows, 0.1 / rows)
        true[wanted] = WANTED_MASS
        true[0] += 1.0 - true.sum()
        cold = np.array([row.kind == Kind.NONE for row in session.rows])
        if step >= SETTLED:
            captured.append(float(true[~cold].sum()))
        told = np.where(cold, true * np.exp(random.uniform(-0.5, 1.1, rows)), true)
        stray = random.permutation(np.flatnonzero(cold))[:STRAY_PAGES]
        told[stray] = np.maximum(told[stray], STRAY_MASS)
        mass = np.repeat(told / np.diff(starts), np.diff(starts)).astype(np.float32)
        no_tokens = np.zeros(0, np.int32)
        w.ask(events.Committed, session.client, session.id, session.length, (), 1, no_tokens)
        session.step += 1
        w.ask(events.Observed, session.client, session.id, session.step, np.minimum(mass, 1.0))
        w.now += 0.05
        w.feed(events.Tick())
        w.settle()
        state = pages.recalled[slots]
        outcomes["used"] += int(np.count_nonzero(pending & (state == Outcome.USED)))
        outcomes["wasted"] += int(np.count_nonzero(pending & (state == Outcome.NONE)))
        pending &= state == Outcome.PENDING
        pending |= (state == Outcome.PENDING) & cold & (step >= SETTLED)
    known = sum(outcomes.values())
    return Found(outcomes["wasted"] / max(1, known), float(np.mean(captured)), known)


@pytest.mark.parametrize("seed", [0, 1])
def test_waste_stays_within_its_bound_and_costs_hardly_any_mass(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = read(seed)
    with monkeypatch.context() as unlimited:
        unlimited.setattr(Waste, "count", lambda self, wasted, now: None)
        free = read(seed)
    assert free.wasted > 2 * MOST_WASTED, "else there is nothing to limit"
    assert limited.wasted <= MOST_WASTED
    assert limited.captured >= free.captured - 0.02
