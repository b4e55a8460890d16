"""`tierkv study ema`: the `ema` policy's alpha and beta, swept together on attention traces.

After an observed step, the best share h of the context's tokens by the policy's score (daemon/policy/ema.py) is hot;
the hit rate is the share of the next step's attention that falls on it, or of the step `ahead` later: what is evicted
is missed long after. A step is a recorded query. Tokens that came after the hot set was chosen, the query's own among
them, do not count. Of equal scores the later token is hot. Beside all of the attention,
`beyond` counts only what goes beyond the first 16 tokens: sinks hold much of it, and any policy keeps them. The best
pair is the one with the highest `beyond`, averaged over the shares h.

This is done for attention averaged over heads (what the daemon observes), and for each recorded head alone.
Beside them, at the same sizes: the newest tokens, accumulated attention (H2O), the last step's attention (TOVA), and
the oracle, which knows the next step's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tierkv.daemon.policy.ema import Ema
from tierkv.errors import ConfigError
from tierkv.study.memdecay.lifetimes import SINK_TOKENS
from tierkv.study.memdecay.traces import Trace

ALPHAS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.8, 0.95)
BETAS = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
SHARES = (0.05, 0.1, 0.25)
EVALUATIONS = 40
"""Steps of a trace, evenly chosen, after which the hot sets are compared; all steps are observed."""

OTHERS = ("newest", "h2o", "tova", "oracle")
TIE = 1e-13
"""A token, by which the later of equal scores comes first; far below what tells scores apart."""

Floats = NDArray[np.float64]


class Hits(NamedTuple):
    """Mean hit rates of one trace, `[rows, alphas, betas, shares, 2]` and `[rows, others, shares, 2]`: of all
    attention, and of what goes beyond the sinks. Row 0 is the average over heads, the others are heads.
    """

    ema: Floats
    others: Floats
    steps: int
    evaluated: int


class Pair(msgspec.Struct, frozen=True):
    """Settings, and the hit rates of attention averaged over heads: `all` and `beyond` the sinks, by share h."""

    alpha: float
    beta: float
    all: list[float]
    beyond: list[float]


class Report(msgspec.Struct, frozen=True):
    """`ema`: `[alphas][betas][shares]` hit rates beyond the sinks, attention averaged over heads; `ema_all` with them.

    `others`: by name, hit rates beyond the sinks by share; `others_all` with them. `head_alphas`: how many heads are
    served best by each alpha (each with its own best beta), `head_betas` the same of betas. Of hit rates by head,
    averaged over heads and shares: `heads_own` with each head's best pair, `heads_one` with the one pair that is best
    for all (`heads_best`), `heads_default` with the policy's defaults.
    """

    model: str
    ahead: int
    traces: list[str]
    tokens: list[int]
    steps: int
    evaluated: int
    heads: int
    alphas: list[float]
    betas: list[float]
    shares: list[float]
    ema: list[list[list[float]]]
    ema_all: list[list[list[float]]]
    others: dict[str, list[float]]
    others_all: dict[str, list[float]]
    best: Pair
    default: Pair
    best_by_share: list[tuple[float, float]]
    best_by_trace: dict[str, tuple[float, float]]
    head_alphas: list[int]
    head_betas: list[int]
    heads_best: tuple[float, float]
    heads_own: float
    heads_one: float
    heads_default: float


def run(
    traces: Iterable[Trace],
    alphas: Sequence[float] = ALPHAS,
    betas: Sequence[float] = BETAS,
    shares: Sequence[float] = SHARES,
    evaluations: int = EVALUATIONS,
    ahead: int = 1,
) -> Report:
    """Sweep over traces, each of which counts the same. The policy's defaults are added to the grid if they lack.

    Raises:
        ConfigError: no traces, of different heads, or too short to compare two steps; a setting out of range.
    """
    if (
        not all(0 < a < 1 for a in alphas)
        or not all(0 < b < math.inf for b in betas)
        or not all(0 < h <= 1 for h in shares)
    ):
        raise ConfigError("alphas lie between 0 and 1, betas above 0 and shares in (0, 1]; correct the grid")
    default = Ema()
    alphas, betas = sorted({*alphas, default.a}), sorted({*betas, default.beta})
    names: list[str] = []
    tokens: list[int] = []
    model, found = "", []
    for trace in traces:
        names.append(trace.name)
        tokens.append(len(trace))
        model = trace.model
        found.append(sweep(trace, alphas, betas, shares, evaluations, ahead, default.tau_factor))
    if len({hits.ema.shape for hits in found}) != 1:
        raise ConfigError(
            f"{len(found)} traces hold {sorted({len(hits.ema) - 1 for hits in found})} heads; sweep over one or more "
            "traces of the same heads"
        )
    ema, others = np.mean([hits.ema for hits in found], 0), np.mean([hits.others for hits in found], 0)
    own = ema[..., 1].mean(-1)  # [rows, alphas, betas], beyond the sinks
    heads = own[1:]

    def pair(values: Floats) -> tuple[float, float]:
        alpha, beta = np.unravel_index(int(values.argmax()), values.shape)
        return alphas[int(alpha)], betas[int(beta)]

    def told(alpha: float, beta: float) -> Pair:
        at = ema[0, alphas.index(alpha), betas.index(beta)]
        return Pair(alpha, beta, at[:, 0].tolist(), at[:, 1].tolist())

    flat = heads.reshape(len(heads), -1)
    chosen = flat.argmax(1)
    usual = alphas.index(default.a), betas.index(default.beta)
    return Report(
        model, ahead, names, tokens, sum(h.steps for h in found), sum(h.evaluated for h in found), len(heads),
        alphas, betas, list(shares), ema[0, ..., 1].tolist(), ema[0, ..., 0].tolist(),
        {name: others[0, i, :, 1].tolist() for i, name in enumerate(OTHERS)},
        {name: others[0, i, :, 0].tolist() for i, name in enumerate(OTHERS)},
        told(*pair(own[0])), told(default.a, default.beta),
        [pair(ema[0, ..., share, 1]) for share in range(len(shares))],
        {name: pair(hits.ema[0, ..., 1].mean(-1)) for name, hits in zip(names, found, strict=True)},
        np.bincount(chosen // len(betas), minlength=len(alphas)).tolist(),
        np.bincount(chosen % len(betas), minlength=len(betas)).tolist(),
        pair(heads.mean(0)), float(flat.max(1).mean()), float(flat.mean(0).max()),
        float(heads[:, usual[0], usual[1]].mean()),
    )  # fmt: skip


def sweep(
    trace: Trace, alphas: Sequence[float], betas: Sequence[float], shares: Sequence[float],
    evaluations: int = EVALUATIONS, ahead: int = 1, tau_factor: float = 2.0,
) -> Hits:  # fmt: skip
    """Hit rates of one trace.

    Raises:
        ConfigError: no two recorded queries follow one another, or no step comes `ahead` later.
    """
    queries = trace.queries.tolist()
    # In a row, so that every candidate was observed at least once.
    follow = [
        i for i, (a, b) in enumerate(pairwise(queries), 1) if b == a + 1 and i + ahead - 1 < len(queries)
    ]
    if ahead < 1 or not follow:
        raise ConfigError(
            f"trace {trace.name} has no two steps in a row and one {ahead} later; record a longer window"
        )
    at = np.linspace(0, len(follow) - 1, min(evaluations, len(follow))).round().astype(int)
    evaluated = {follow[i] for i in at.tolist()}
    weights = np.array(alphas, np.float32)[:, None, None]
    rows, length = 2 if trace.mass.ndim == 1 else 1 + len(trace.mass), len(trace)
    ema = np.zeros((len(alphas), rows, length), np.float32)
    accessed = np.zeros((rows, length), np.int32)
    total, last = np.zeros((2, rows, length), np.float32)
    hits = np.zeros((rows, len(alphas), len(betas), len(shares), 2))
    others = np.zeros((rows, len(OTHERS), len(shares), 2))
    ends = np.cumsum(trace.queries.astype(np.int64) + 1).tolist()
    known = 0

    def observation(index: int, tokens: int) -> NDArray[np.float32]:
        """`[rows, tokens]`, the first of observation `index`: averaged over heads, then each head."""
        begin = ends[index] - queries[index] - 1
        heads = np.atleast_2d(trace.mass[..., begin : begin + tokens]).astype(np.float32)
        return np.concatenate([heads.mean(0, keepdims=True), heads])

    for step, query in enumerate(queries):  # `step` have been taken, this is the next
        if step in evaluated:
            coming, now = observation(step + ahead - 1, query), slice(0, query)
            sizes = [max(1, int(share * query)) for share in shares]
            since, later = step - accessed[:, now], np.arange(query) * TIE
            for b, beta in enumerate(betas):
                forgotten = (-np.expm1(-beta * np.arange(step + 1)))[since]
                for a in range(len(alphas)):
                    hits[:, a, b] += hit_rates(1 - (1 - ema[a, :, now]) * forgotten + later, coming, sizes)
            newest = np.broadcast_to(np.arange(query), coming.shape)
            for i, score in enumerate((newest, total[:, now], last[:, now], coming)):
                others[:, i] += hit_rates(score, coming, sizes)
        seen, attended = observation(step, query + 1), slice(0, query + 1)
        accessed[:, known:query] = (
            step  # tokens of a prompt come before the step, the query's own token with it
        )
        accessed[:, query] = step + 1
        known = query + 1
        ema[..., attended] += weights * (seen - ema[..., attended])
        accessed[:, attended][seen >= tau_factor / known] = step + 1
        total[:, attended] += seen
        last[:, attended] = seen
    return Hits(hits / len(evaluated), others / len(evaluated), len(queries), len(evaluated))


def hit_rates(score: NDArray[np.floating], coming: NDArray[np.float32], sizes: Sequence[int]) -> Floats:
    """`[rows, sizes, 2]`: which share of the mass `coming` `[rows, tokens]` is on the best tokens by score; of all
    tokens, and of those beyond the sinks.
    """
    tokens = coming.shape[1]
    best = np.argpartition(score, [tokens - size for size in sorted(sizes, reverse=True)], axis=1)
    beyond = coming.copy()
    beyond[:, :SINK_TOKENS] = 0
    found = []
    for mass in (coming, beyond):
        ranked = np.take_along_axis(mass, best, 1).astype(np.float64)
        whole = np.maximum(ranked.sum(1, keepdims=True), 1e-12)
        found.append(np.stack([ranked[:, tokens - size :].sum(1) for size in sizes], 1) / whole)
    return np.stack(found, -1)


def render(report: Report) -> Group:
    """Hit rates of the grid beyond the sinks, averaged over the shares; then the best pair beside other ways."""
    when = "the next step" if report.ahead == 1 else f"the step {report.ahead} later"
    grid = Table(
        title=f"Attention of {when} on the hot set, beyond the sinks, mean over h = "
        f"{', '.join(f'{share:.0%}' for share in report.shares)} ({report.model}, {len(report.traces)} traces of "
        f"{min(report.tokens):,} to {max(report.tokens):,} tokens)",
        box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0),
    )  # fmt: skip
    grid.add_column("alpha \\ beta", justify="right")
    for beta in report.betas:
        grid.add_column(f"{beta:g}", justify="right", no_wrap=True)
    for alpha, row in zip(report.alphas, report.ema, strict=True):
        grid.add_row(f"{alpha:g}", *(f"{sum(cell) / len(cell):.4f}" for cell in row))
    ways = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    ways.add_column("hot by (right: with sinks)", no_wrap=True)
    for share in report.shares:
        ways.add_column(f"h {share:.0%}", justify="right")
    for share in report.shares:
        ways.add_column(f"h {share:.0%}", justify="right", style="dim")
    for what, pair in (("best", report.best), ("default", report.default)):
        rates = (*pair.beyond, *pair.all)
        ways.add_row(f"ema, {what}: {pair.alpha:g}, {pair.beta:g}", *(f"{rate:.3f}" for rate in rates))
    for name in OTHERS:
        rates = (*report.others[name], *report.others_all[name])
        ways.add_row(name, *(f"{rate:.3f}" for rate in rates))
    served = ", ".join(f"{a:g}: {n}" for a, n in zip(report.alphas, report.head_alphas, strict=True) if n)
    lines = (
        f"heads ({report.heads}) by their best alpha: {served}; best pair for all heads {report.heads_best[0]:g}, "
        f"{report.heads_best[1]:g}",
        f"by head, mean: {report.heads_own:.4f} each head its own pair, {report.heads_one:.4f} one pair, "
        f"{report.heads_default:.4f} the defaults",
    )
    return Group(grid, ways, *(Text(line, style="dim") for line in lines))
