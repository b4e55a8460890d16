"""Lifetimes: rates that are known are found again, by hand and from traces."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tierkv.daemon import policy
from tierkv.errors import ConfigError
from tierkv.regions import Region
from tierkv.study.memdecay import lifetime_figures, lifetime_tables, precision
from tierkv.study.memdecay.lifetimes import (
    BEYOND_SINKS,
    BOTH,
    SINK_TOKENS,
    Report,
    clocks,
    half_life,
    regress,
    run,
    spearman,
    sums,
)
from tierkv.study.memdecay.protocol import FIT, PAPER, Protocol
from tierkv.study.memdecay.protocol import run as score
from tierkv.study.memdecay.traces import Trace

RATES = {Region.SYSTEM: 0.0, Region.USER: 0.02, Region.TOOL_OUT: 0.01, Region.SCRATCHPAD: 0.05}
STAGES = [60, 100, 150, 220]
REGIONS = np.repeat(
    [Region.SYSTEM, Region.USER, Region.TOOL_OUT, Region.SCRATCHPAD], [40, 20, 90, 70]
).astype(np.int8)


def traced(
    name: str = "library-0-short",
    level: float = 0.5,
    faster: float = 1.0,
    model: str = "exact",
    window: int = 48,
) -> Trace:
    """A trace whose masses decay at `RATES` exactly, up to float16."""
    begins = [0, *STAGES[:-1]]
    queries = np.array(
        [q for a, b in zip(begins, STAGES, strict=True) for q in range(max(a, b - window), b)], np.int32
    )
    mass = []
    inserted, steps = _clocks()
    rates = faster * np.array([RATES.get(Region(r), 0.0) for r in REGIONS])
    for query in queries.tolist():
        age = steps.get(query, 0) - inserted[: query + 1]
        mass.append(level * np.exp(-rates[: query + 1] * age))
    blocks, stages = np.array([0], np.int32), np.array(STAGES, np.int32)
    tokens = np.arange(len(REGIONS), dtype=np.int32)
    return Trace(
        name, model, tokens, REGIONS, blocks, stages, queries, np.concatenate(mass).astype(np.float16)
    )


def _clocks() -> tuple[np.ndarray, dict[int, int]]:
    """Insertion and observation steps of FIT, written out: bursts of 8, 8, 8 and 48 steps."""
    inserted, steps = np.zeros(220, int), {}
    for first, last, before in ((52, 60, 0), (92, 100, 8), (142, 150, 16), (172, 220, 24)):
        for i, query in enumerate(range(first, last), 1):
            inserted[query] = steps[query] = before + i
    inserted[60:92], inserted[100:142], inserted[150:172] = 8, 16, 24
    return inserted, steps


def fitted(traces: list[Trace]) -> Report:
    return run(traces, draws=100)


def found(report: Report, row: str, tier: str = "short"):
    return next(one for one in report.fits if (one.row, one.tier) == (row, tier))


def test_a_line_by_hand() -> None:
    # Logs 0, -1, -3 at ages 0, 1, 2 with weights 1, 1, 2: means 5/4 and -7/4, slope -4.25/2.75, level exp(2/11).
    seen = np.array([[1.0, 1.0, 2.0]])
    line = regress(np.exp([[0.0, -1.0, -3.0]]) * seen, seen)
    assert line is not None
    assert line.rate == pytest.approx(17 / 11)
    assert line.level == pytest.approx([math.exp(2 / 11)])
    assert line.r2 == pytest.approx(1 - (2 / 11) / 6.75)
    assert half_life(line.rate) == pytest.approx(math.log(2) * 11 / 17)


def test_tiers_share_a_rate_and_keep_their_levels() -> None:
    ages = np.arange(40)
    mass = np.stack([0.3 * np.exp(-0.04 * ages), 0.01 * np.exp(-0.04 * ages)])
    seen = np.zeros((2, 40))
    seen[0, :30], seen[1, 10:] = 5, 700  # one sum over both would take the drop from .3 to .01 for decay
    line = regress(mass * seen, seen)
    assert line is not None
    assert line.rate == pytest.approx(0.04, rel=1e-12)
    assert line.level == pytest.approx([0.3, 0.01])
    assert line.r2 == pytest.approx(1)


def test_ages_without_mass_are_left_out_and_too_few_fit_nothing() -> None:
    mass = np.array([[4.0, 0.0, 1.0, 0.5]])
    line = regress(mass, np.ones((1, 4)))
    assert line is not None and line.rate == pytest.approx(math.log(2) * 1.0)
    assert regress(mass[:, :3], np.ones((1, 3))) is None


def test_what_does_not_fade_has_no_half_life() -> None:
    assert half_life(0.0) is None and half_life(-0.1) is None


def test_known_rates_are_found_in_traces() -> None:
    report = fitted(
        [traced(), traced("library-1-short"), traced("orchard-0-short"), traced("orchard-0-long", 0.1)]
    )
    assert (report.episodes, report.scenarios) == (4, ["library", "orchard"])
    for row in ("user", "tool_out", "scratchpad"):
        for tier in ("short", "long", BOTH):
            one = found(report, row, tier)
            expected = math.log(2) / RATES[Region[row.upper()]]
            assert one.half_life == pytest.approx(expected, rel=0.01)  # float16
            assert one.low == pytest.approx(expected, rel=0.01) and one.high == pytest.approx(
                expected, rel=0.01
            )
            assert one.r2 > 0.99
    system = found(report, "system")
    assert abs(system.rate) < 1e-6


def test_a_region_that_grows_is_reported_as_not_decaying() -> None:
    report = fitted([traced(faster=-1.0, level=0.01), traced("orchard-0-short", faster=-1.0, level=0.01)])
    user = found(report, "user")
    assert user.rate == pytest.approx(-0.02, rel=0.01)
    assert (user.half_life, user.low, user.high) == (None, None, None)
    assert "none [none, none]" in _printed(lifetime_tables.render(report))


def test_only_the_final_burst_is_read_unless_all_are_wanted() -> None:
    final, every = sums(traced(), FIT), sums(traced(), FIT, final_only=False)
    # The final burst's 48 queries are tokens 172 to 219: query q sees q + 1 tokens.
    assert final.seen[:-1].sum() == sum(range(173, 221))
    assert every.seen[:-1].sum() == sum(range(173, 221)) + sum(
        (*range(53, 61), *range(93, 101), *range(143, 151))
    )
    assert final.seen[int(Region.SYSTEM)].nonzero()[0].tolist() == list(range(25, 73))
    assert sums(traced(), PAPER).seen[int(Region.SYSTEM)].nonzero()[0].tolist() == list(range(25, 33))


def test_relative_mass_is_a_multiple_of_the_uniform_level() -> None:
    trace = traced(level=0.5)
    relative = sums(trace, FIT, relative=True)
    # System tokens hold .5 whenever they are seen: .5 (q + 1) on average over the burst's queries.
    row = int(Region.SYSTEM)
    assert relative.mass[row].sum() / relative.seen[row].sum() == pytest.approx(0.5 * (173 + 220) / 2)


def test_the_system_without_sinks_lacks_the_first_tokens() -> None:
    trace = traced()
    mass = trace.mass.copy()
    ends = np.cumsum(trace.queries.astype(int) + 1)
    for end, query in zip(ends, trace.queries, strict=True):
        mass[end - query - 1 : end - query - 1 + SINK_TOKENS] = 8.0
    heavy = Trace(
        trace.name, trace.model, trace.tokens, trace.regions, trace.blocks, trace.stages, trace.queries, mass
    )
    report = fitted([heavy])
    assert found(report, "system").level == pytest.approx([(16 * 8.0 + 24 * 0.5) / 40])
    assert found(report, BEYOND_SINKS).level == pytest.approx([0.5])


@pytest.mark.parametrize("protocol", [FIT, PAPER, Protocol(5, 30, every=3)])
def test_clocks_are_those_of_the_protocol(protocol: Protocol) -> None:
    trace = traced()
    never = policy.get("memdecay", tau_factor=1e6)  # t_ref stays the insertion
    scored = score(trace, never, protocol)
    inserted, observed = clocks(trace, protocol)
    assert inserted.tolist() == scored.state.columns[1].tolist()
    assert len(observed) == scored.state.observations
    assert max(observed.values()) == scored.step // protocol.every * protocol.every


def test_a_scenario_left_out_changes_what_it_made() -> None:
    report = fitted([traced(), traced("orchard-0-short"), traced("theatre-0-short", faster=2.0)])
    user = found(report, "user")
    assert user.left_out_high == pytest.approx(math.log(2) / 0.02, rel=0.01)  # without the fast one
    assert user.left_out_low is not None and user.half_life is not None
    assert user.left_out_low < user.half_life < user.left_out_high


def test_policy_files_hold_the_half_lives_of_dev_and_of_all(tmp_path: Path) -> None:
    report = fitted([traced(), traced("brewery-0-short", faster=3.0)])  # dev, report
    assert set(report.policies) == {
        f"{p}-{s}.toml" for p in ("memdecay", "memdecay-lift") for s in ("dev", "all")
    }
    for name, text in report.policies.items():
        (tmp_path / name).write_text(text)
    dev = policy.load(tmp_path / "memdecay-lift-dev.toml")
    assert (
        isinstance(dev, policy.MemDecayLift)
        if hasattr(policy, "MemDecayLift")
        else dev.name == "memdecay-lift"
    )
    lives = dev.half_life  # type: ignore[attr-defined]
    assert lives[Region.USER] == pytest.approx(math.log(2) / 0.02, rel=0.01)
    assert lives[Region.PLAN] == 52  # no plan in these traces: the default stays
    everything = policy.load(tmp_path / "memdecay-all.toml").half_life  # type: ignore[attr-defined]
    assert everything[Region.USER] < lives[Region.USER]


def test_a_policy_file_says_that_something_does_not_decay(tmp_path: Path) -> None:
    report = fitted([traced(faster=-1.0, level=0.01)])
    (tmp_path / "p.toml").write_text(report.policies["memdecay-dev.toml"])
    assert policy.load(tmp_path / "p.toml").half_life[Region.USER] == math.inf  # type: ignore[attr-defined]


def test_rank_correlation_by_hand() -> None:
    assert spearman([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert spearman([1, 2, 3, 4], [1, 2, 2, 4]) == pytest.approx(4.5 / math.sqrt(5 * 4.5))


def test_the_order_of_regions_is_held_against_the_papers() -> None:
    # system > tool_out > user > scratchpad, as in each of its columns.
    assert all(value == pytest.approx(1) for value in fitted([traced()]).order["short"].values())


@pytest.mark.parametrize(
    ("traces", "said"),
    [
        ([], "no attention trace"),
        ([traced(), traced(model="other")], "traces of exact and of other"),
        ([traced(window=20)], "lacks query 172"),
    ],
)
def test_what_cannot_be_fitted_is_refused(traces: list[Trace], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(traces)


def test_traces_by_head_are_refused() -> None:
    t = traced()
    heads = Trace(
        t.name, t.model, t.tokens, t.regions, t.blocks, t.stages, t.queries, np.stack([t.mass, t.mass])
    )
    with pytest.raises(ConfigError, match="by head"):
        fitted([heads])


def test_precision_compares_rates_of_the_same_episodes() -> None:
    exact = [traced(), traced("orchard-0-short"), traced("theatre-0-short")]
    report = precision.run(exact, [traced(faster=1.5, model="exact bfloat16"), traced("tunnel-1-long")])
    assert report.episodes == ["library-0-short"]
    rates = {one.row: one for one in report.rates}
    assert rates["user"].difference == pytest.approx(0.5, rel=0.02)
    assert report.mass > 0.01
    assert "+50" in _printed(precision.render(report)) or "+49" in _printed(precision.render(report))
    with pytest.raises(ConfigError, match="both dtypes"):
        precision.run(exact, [traced("tunnel-1-long")])


def _printed(what: object) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(what)
    return console.export_text()


def test_figures_are_drawn_and_small(tmp_path: Path) -> None:
    report = fitted([traced(), traced("orchard-0-long", 0.1), traced("orchard-1-long", 0.1)])
    lifetime_figures.draw_measured(report, tmp_path / "deep" / "measured.png")
    lifetime_figures.draw_curves(report, tmp_path / "curves.png")
    for file in (tmp_path / "deep" / "measured.png", tmp_path / "curves.png"):
        assert file.read_bytes()[:4] == b"\x89PNG"
        assert 10_000 < file.stat().st_size < 150_000
