"""Heads and layers that look at facts are found, and used where they were not found.

Of 120 tokens 4 are sinks; then come system, a page of a document that holds the fact, and scratchpad, of which the
first eight tokens are far. One head looks at half of the document twenty times as hard as at anything else, the others
look at all alike.

At a quarter one page of 16 tokens stays. After eight observations by even heads no page has relief: system is worth .97
and the document .37. By the head that looks, the lifts in the document are 5.1 and .25, so it has
24 * .149 * (.84 - .20) / 2 = 1.1 more, and stays. The average of four heads has lifts of 2.5 and .73: .52 more, which
is too little.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.study.memdecay.test_ablate import pair_of
from tierkv.errors import ConfigError
from tierkv.regions import Region
from tierkv.study.memdecay import variants
from tierkv.study.memdecay.survival import Pair
from tierkv.study.memdecay.variants_tables import Report

S, R, P = Region.SYSTEM, Region.RETRIEVAL, Region.SCRATCHPAD
LAYERS, HEADS = 2, 4


def looking(scenario: str, head: int) -> list[Pair]:
    """The same in both tiers."""
    pairs: list[Pair] = []
    for tier in ("long", "short"):
        episode, trace = pair_of([(S, 32), (R, 16), (P, 72)], [(R, 36, 40)], scenario, tier)
        masses = []
        for which in range(HEADS):
            rows = [np.ones(q + 1) for q in trace.queries.tolist()]
            for row in rows:
                if which == head:
                    row[32:40] = 20
                row /= row.sum()
            masses.append(np.concatenate(rows))
        pairs.append((episode, replace(trace, mass=np.array(masses, np.float16))))
    return pairs


def survived(report: Report, row: int) -> float:
    return report.survival.rows[row].at("long", 0.25).non_system


def test_the_head_that_looks_at_facts_is_found_in_one_half_and_serves_the_other() -> None:
    report = variants.run_weighted([*looking("inn", 3), *looking("mill", 3)], LAYERS)
    assert report.chosen == {
        "best layers of inn": [1], "best layers of mill": [1],
        "best heads of inn": [3], "best heads of mill": [3],
    }  # fmt: skip
    assert [row.label for row in report.survival.rows] == ["all heads alike", "best layers", "best heads"]
    assert (survived(report, 0), survived(report, 2)) == (0, 1)


def test_no_scenario_is_tested_by_what_was_fitted_on_it() -> None:
    report = variants.run_weighted([*looking("inn", 3), *looking("mill", 0)], LAYERS)
    assert report.chosen["best heads of inn"] == [3] and report.chosen["best heads of mill"] == [0]
    assert survived(report, 2) == 0  # each has the head that is even in it


def test_scenarios_are_halved_by_turns() -> None:
    pairs = [pair for name in ("d", "b", "a", "c", "e") for pair in looking(name, 2)]
    assert [n for n in variants.run_weighted(pairs, LAYERS).chosen if "heads" in n] == [
        "best heads of a, c, e",
        "best heads of b, d",
    ]


def test_a_page_outranks_those_that_got_less_and_not_those_that_got_the_same() -> None:
    (episode, trace), _ = looking("inn", 1)
    # The other far pages are the system's, of the same age, and the scratchpad's first, which fewer queries see as far.
    assert variants.outranked(episode, trace).tolist() == [[0.5, 1, 0.5, 0.5]]
    assert variants.outranked(episode, replace(trace, mass=variants.by_layer(trace, 2))).tolist() == [
        [1, 0.5]
    ]


def test_traces_that_are_not_by_head_and_a_single_scenario_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not hold all heads of 3 layers"):
        variants.run_weighted(looking("inn", 0), 3)
    with pytest.raises(ConfigError, match="does not hold all heads"):
        variants.run_weighted([pair_of([(S, 16)], [(S, 2, 3)])], LAYERS)
    with pytest.raises(ConfigError, match="1 scenarios cannot be halved"):
        variants.run_weighted(looking("inn", 0), LAYERS)
