"""The ema sweep: its hit rates against a plain walk with the policy itself, and its grid."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tierkv.daemon import policy
from tierkv.errors import ConfigError
from tierkv.study.memdecay import lifetime_figures
from tierkv.study.memdecay.ema_sweep import OTHERS, hit_rates, render, run, sweep
from tierkv.study.memdecay.traces import Trace

STAGES = [40, 70]
QUERIES = [*range(30, 40), *range(58, 70)]
ALPHAS, BETAS, SHARES = (0.1, 0.6), (0.01, 0.4), (0.1, 0.3)


def traced(heads: int = 3, seed: int = 5, name: str = "chance") -> Trace:
    rng = np.random.default_rng(seed)
    rows = [rng.dirichlet(np.full(q + 1, 0.3), heads).astype(np.float16) for q in QUERIES]
    mass = np.concatenate(rows, 1)
    length = STAGES[-1]
    return Trace(
        name, "chance", np.arange(length, dtype=np.int32), np.zeros(length, np.int8), np.array([0], np.int32),
        np.array(STAGES, np.int32), np.array(QUERIES, np.int32), mass if heads > 1 else mass[0],
    )  # fmt: skip


def walked(
    trace: Trace, head: int | None, alpha: float, beta: float, share: float, ahead: int
) -> tuple[float, float]:
    """The hit rates, by the daemon's policy one token and one step at a time."""
    state = policy.get("ema", a=alpha, beta=beta).new_state()
    rows = [(q, m.astype(np.float32).mean(0) if head is None else m[head]) for q, m in trace.rows()]
    every, beyond = [], []
    for step, (query, mass) in enumerate(rows):
        if step and rows[step - 1][0] == query - 1 and step + ahead - 1 < len(rows):
            scores = state.token_scores(step)
            hot = sorted(range(query), key=lambda i: (scores[i], i))[-max(1, int(share * query)) :]
            coming = rows[step + ahead - 1][1][:query].astype(float)
            every.append(sum(coming[i] for i in hot) / coming.sum())
            beyond.append(sum(coming[i] for i in hot if i >= 16) / coming[16:].sum())
        state.append(np.zeros(query - len(state), np.int8), step)
        state.append(np.zeros(1, np.int8), step + 1)
        state.observe(mass, step + 1)
    return float(np.mean(every)), float(np.mean(beyond))


@pytest.mark.parametrize("ahead", [1, 4])
def test_hit_rates_are_those_of_the_policy_walked_token_by_token(ahead: int) -> None:
    trace = traced()
    hits = sweep(trace, ALPHAS, BETAS, SHARES, evaluations=1000, ahead=ahead)
    for row, head in enumerate((None, 0, 1, 2)):
        for a, alpha in enumerate(ALPHAS):
            for b, beta in enumerate(BETAS):
                for h, share in enumerate(SHARES):
                    expected = walked(trace, head, alpha, beta, share, ahead)
                    assert hits.ema[row, a, b, h] == pytest.approx(expected, abs=2e-3)


def test_hit_rates_by_hand() -> None:
    coming = np.array([[0.5, *[0.0] * 15, 0.1, 0.2, 0.15, 0.05]], np.float32)  # sixteen sinks, then four
    score = np.array([[9.0, *[0.0] * 15, 1.0, 2.0, 3.0, 4.0]])
    # Best two: the first sink and the last token; best four: those and the two before it.
    assert hit_rates(score, coming, [2, 4])[0] == pytest.approx(np.array([[0.55, 0.1], [0.9, 0.8]]))


def test_others_are_newest_accumulated_last_and_the_best_there_is() -> None:
    trace = traced()
    hits = sweep(trace, ALPHAS, BETAS, SHARES, evaluations=1000)
    rows = [(q, m.mean(0).astype(float)) for q, m in trace.rows()]
    found: dict[str, list[float]] = {name: [] for name in OTHERS}
    total = np.zeros(STAGES[-1])
    for step, (query, mass) in enumerate(rows):
        if step and rows[step - 1][0] == query - 1:
            coming, size = mass[:query], int(0.3 * query)
            by = {
                "newest": np.arange(query),
                "h2o": total[:query],
                "tova": rows[step - 1][1],
                "oracle": coming,
            }
            for name, score in by.items():
                found[name].append(coming[np.argsort(score)[-size:]].sum() / coming.sum())
        total[: query + 1] += mass
    for i, name in enumerate(OTHERS):
        assert hits.others[0, i, 1, 0] == pytest.approx(np.mean(found[name]), abs=1e-4)
    assert (hits.ema[..., 0] <= hits.others[:, None, None, OTHERS.index("oracle"), :, 0] + 1e-9).all()


def test_of_tokens_that_the_last_step_accessed_the_average_tells_nothing() -> None:
    """One token has .9 of all attention. It scores 1 at n = 0, as the step's own token does, and the later is hot."""
    tokens, queries = 120, list(range(60, 120))
    rows = []
    for query in queries:
        mass = np.full(query + 1, 0.0005)
        mass[20] = 0.9
        rows.append(mass)
    trace = Trace(
        "steady", "made", np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.int8), np.array([0], np.int32),
        np.array([tokens], np.int32), np.array(queries, np.int32), np.concatenate(rows).astype(np.float16),
    )  # fmt: skip
    one, two = 1 / tokens, 2 / 60  # one token at any length; two or more
    report = run([trace], alphas=(0.9,), betas=(1.0,), shares=(one, two))
    assert max(cell[0] for row in report.ema for cell in row) < 0.01
    assert min(cell[1] for row in report.ema for cell in row) > 0.9
    assert report.others["tova"][0] > 0.9


def test_the_report_names_the_best_of_its_grid(tmp_path: Path) -> None:
    report = run([traced(), traced(seed=6, name="other")], ALPHAS, BETAS, SHARES, evaluations=10)
    assert report.alphas == [0.1, 0.2, 0.6] and report.betas == [0.001, 0.01, 0.4]  # with the defaults
    means = np.array(report.ema).mean(-1)
    a, b = np.unravel_index(means.argmax(), means.shape)
    assert (report.best.alpha, report.best.beta) == (report.alphas[a], report.betas[b])
    assert report.best.beyond == report.ema[a][b]
    assert sum(report.head_alphas) == sum(report.head_betas) == report.heads == 3
    assert report.heads_own >= report.heads_one >= report.heads_default - 1e-12
    assert set(report.best_by_trace) == {"chance", "other"}
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(render(report))
    assert f"best: {report.best.alpha:g}, {report.best.beta:g}" in console.export_text()
    lifetime_figures.draw_sweep([report, report], tmp_path / "ema.png")
    assert 10_000 < (tmp_path / "ema.png").stat().st_size < 150_000


def test_a_trace_averaged_over_heads_counts_as_one_head() -> None:
    report = run([traced(heads=1)], ALPHAS, BETAS, SHARES)
    assert report.heads == 1
    assert report.heads_one == pytest.approx(max(np.mean(cell) for row in report.ema for cell in row))


def test_what_cannot_be_swept_is_refused() -> None:
    with pytest.raises(ConfigError, match="correct the grid"):
        run([traced()], alphas=(1.5,))
    with pytest.raises(ConfigError, match="of the same heads"):
        run([traced(), traced(heads=2)])
    with pytest.raises(ConfigError, match="one 99 later"):
        run([traced()], ahead=99)
    with pytest.raises(ConfigError, match="of the same heads"):
        run([])
