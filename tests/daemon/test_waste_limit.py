"""The limit on waste over many steps of a made-up reader: fewer wasted promotions, and hardly less mass captured.

The reader attends a few cold pages for some dozens of steps, then others. Estimates of what cold pages get are up to
threefold off, and name two pages a step that nobody wants. Every page that took another's place counts, from the first
step to the last, those that nobody has attended by then as wasted.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.daemon.test_recall import fill_up, with_cold_pages
from tierkv.daemon import events
from tierkv.daemon.waste import ALLOWANCE, FORGIVING_SECONDS, MOST_WASTED, Waste
from tierkv.table import Kind

STEPS = 240

WANTED_PAGES, WANTED_STEPS, WANTED_MASS = 4, 30, 0.06
STRAY_PAGES, STRAY_MASS = 2, 0.03
"""Pages a step that estimates name for nothing: a lift of 4.8 among 160 pages."""


class Found(NamedTuple):
    wasted: float  # share of the pages that took others' places
    captured: float  # mean share of attention on pages in HBM
    brought: int


def read(seed: int, waste_limit: float) -> Found:
    random = np.random.default_rng(seed)
    w, session = with_cold_pages(min_residency_steps=4, waste_limit=waste_limit)
    fill_up(w)
    rows = len(session.rows)
    starts = np.cumsum([0] + [len(row.stamps) for row in session.rows])
    captured, wanted = [], np.zeros(0, np.int64)
    for step in range(STEPS):
        if step % WANTED_STEPS == 0:
            wanted = random.permutation(rows - 20)[:WANTED_PAGES] + 1
        true = np.full(rows, 0.1 / rows)
        true[wanted] = WANTED_MASS
        true[0] += 1.0 - true.sum()
        cold = np.array([row.kind == Kind.NONE for row in session.rows])
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
    w.close(session)
    outcomes = w.brain.state.counters.prefetched
    brought = outcomes["used"] + outcomes["wasted"]
    return Found(outcomes["wasted"] / max(1, brought), float(np.mean(captured)), brought)


@pytest.mark.parametrize("seed", [0, 1])
def test_waste_stays_within_its_limit_and_costs_hardly_any_mass(seed: int) -> None:
    limited, free = read(seed, MOST_WASTED), read(seed, 1.0)
    assert free.wasted > 2 * MOST_WASTED, "else there is nothing to limit"
    assert limited.brought > 16, "else it is kept by doing nothing"
    assert limited.wasted * limited.brought <= ALLOWANCE + MOST_WASTED * limited.brought
    assert limited.captured >= free.captured - 0.02


@given(
    st.lists(st.sampled_from(["bet", "used", "wasted"]), max_size=400), st.sampled_from([0.0, 0.1, 0.25, 0.5])
)
def test_no_reader_wastes_more_than_the_limit_and_an_allowance(acts: list[str], limit: float) -> None:
    waste, found = Waste(limit), Counter[str]()
    for act in acts:
        if act == "bet" and waste.allowed(found["open"]):
            found["open"] += 1
        elif act != "bet" and found["open"]:
            found["open"] -= 1
            found[act] += 1
            waste.count(act == "wasted")
        ended = found["used"] + found["wasted"]
        assert found["wasted"] + found["open"] <= ALLOWANCE + limit * (ended + found["open"])
        assert waste.share == found["wasted"] / max(1, ended)


def test_a_reader_who_uses_everything_may_bet_ever_more() -> None:
    waste = Waste()
    before = waste.allowed(0)
    for _ in range(300):
        waste.count(wasted=False)
    assert before == math.floor(ALLOWANCE / 0.75) and waste.allowed(0) == math.floor((ALLOWANCE + 75) / 0.75)


def test_bets_that_ran_out_come_back_slowly() -> None:
    waste = Waste()
    while waste.allowed(0):
        waste.count(wasted=True)
    assert waste.allowed(0) == 0
    waste.forgive(0, 5.0)
    for minute in range(1, 4):
        waste.forgive(0, 4.9 + minute * FORGIVING_SECONDS)
        assert waste.allowed(0) == 0
        waste.forgive(0, 5.0 + minute * FORGIVING_SECONDS)
        assert 1 <= waste.allowed(0) <= 2
        while waste.allowed(0):
            waste.count(wasted=True)
        waste.forgive(0, 5.0 + minute * FORGIVING_SECONDS)


def test_with_a_limit_of_one_anything_may_be_bet() -> None:
    waste = Waste(1.0)
    for _ in range(100):
        waste.count(wasted=True)
    assert waste.allowed(1000) > 1000
