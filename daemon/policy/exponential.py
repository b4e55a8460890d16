"""Page scores of many sessions in one call, for every policy whose score is one exponential and one linear term.

s = (b_r - g u) 2^(-h_r age) + w u,   age = t - clock      u and clock are columns, r the token's region

MemDecay is b_r = base, h_r = 1 / half-life, u = importance, w = alpha, g = 0; the moving average of `ema` is
b = g = w = 1, u = e, because 1 - (1 - e)(1 - x) = e + (1 - e) x; a plain sum such as H2O's has b = g = 0, w = 1.
`Policy.scores` says the same in numpy, token by token; a test holds the two together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.addresses import float32_at, int8_at, int64_at
from tierkv.daemon.policy.pages import MODES, relieve_table, score_table
from tierkv.numba_setup import kernel
from tierkv.quant.floats import float_of
from tierkv.regions import Region

if TYPE_CHECKING:
    from tierkv.daemon.policy.contract import Aggregate

Floats = NDArray[np.float32]
Longs = NDArray[np.int64]

REGION, COLUMNS, CAPACITY = 0, 1, 2  # a row of `tokens`, `TokenState.addresses`
STARTS, PAGES, LENGTH = 0, 1, 2  # a row of `tables`

# 2^f = 1 + f q(f) within 9.2e-8 for |f| <= 1/2: a least-squares fit weighted towards its largest relative errors.
Q0, Q1, Q2 = np.float32(0.6931469775980866), np.float32(0.24022242084290596), np.float32(0.05550733744533749)
Q3, Q4 = np.float32(0.009671512701753362), np.float32(0.0013264726934535836)
LEAST_EXPONENT = np.float32(-126.0)
"""2^-126 is the smallest normal float32; whatever is below counts as that."""


class Exponential(NamedTuple):
    """The constants of the form above."""

    usage: int
    """Column u."""
    clock: int
    """Column of decode steps; any where the rates are 0."""
    base: Floats
    """b_r by region."""
    rate: Floats
    """h_r by region, in halvings a decode step."""
    weight: float
    give: float = 0.0


def just(column: int) -> Exponential:
    """s = u: a sum, or the last of something."""
    none = np.zeros(len(Region), np.float32)
    return Exponential(column, column, none, none, 1.0)


def score_sessions(
    form: Exponential, aggregate: Aggregate, tokens: Longs, tables: Longs, steps: Floats
) -> Floats:
    """`[all pages]` scores, session after session.

    Args:
        tokens: `[sessions, 3]`, `TokenState.addresses` of each.
        tables: `[sessions, 3]`: address of its pages' first tokens (int64, from 0 on, each page up to the next one),
            how many pages, how many tokens.
        steps: `[sessions]`, the decode step at which each is scored.
    """
    out = np.empty(int(tables[:, PAGES].sum()), np.float32)
    weight, give, relief = np.float32(form.weight), np.float32(form.give), aggregate == "relief"
    columns = (form.usage, form.clock)
    _score_sessions(
        tokens, tables, steps, *columns, form.base, form.rate, weight, give, MODES[aggregate], relief, out
    )
    return out


@kernel()
def _score_sessions(
    tokens: Longs,
    tables: Longs,
    steps: Floats,
    usage: int,
    clock: int,
    base: Floats,
    rate: Floats,
    weight: np.float32,
    give: np.float32,
    mode: int,
    relief: bool,
    out: Floats,
) -> None:
    longest = tables[:, LENGTH].max() if len(tables) else 0
    bases, rates = np.empty(longest, np.float32), np.empty(longest, np.float32)
    scores = np.empty(longest, np.float32)
    done = 0
    for session in range(len(tables)):
        length, pages = tables[session, LENGTH], tables[session, PAGES]
        columns, size = tokens[session, COLUMNS], 4 * tokens[session, CAPACITY]
        _look_up(int8_at(tokens[session, REGION], length), base, rate, bases, rates)
        used, starts = float32_at(columns + usage * size, length), int64_at(tables[session, STARTS], pages)
        _score_tokens(
            bases, rates, used, float32_at(columns + clock * size, length), steps[session], weight, give,
            scores[:length],
        )  # fmt: skip
        score_table(scores[:length], starts, mode, out[done:])
        if relief and give == 0:
            relieve_table(used, weight, starts, out[done:])
        elif relief:  # what attention gave is not a part of the score
            relieve_table(scores[:length], np.float32(1.0), starts, out[done:])
        done += pages


@kernel()
def _look_up(region: NDArray[np.int8], base: Floats, rate: Floats, bases: Floats, rates: Floats) -> None:
    """b_r and h_r of each token; apart from `_score_tokens`, which would not vectorize with it."""
    for token in range(len(region)):
        r = np.uint8(region[token])  # unsigned: no check for an index from the end
        bases[token], rates[token] = base[r], rate[r]


@kernel(fastmath=True)
def _score_tokens(
    bases: Floats,
    rates: Floats,
    usage: Floats,
    clock: Floats,
    step: np.float32,
    weight: np.float32,
    give: np.float32,
    out: Floats,
) -> None:
    for token in range(len(out)):
        ahead = step - clock[token]
        age = ahead if ahead > np.float32(0.0) else np.float32(0.0)
        u = usage[token]
        out[token] = (bases[token] - give * u) * exp2(-rates[token] * age) + weight * u


@kernel(inline=True)
def exp2(x: np.float32) -> np.float32:
    """2^x for x <= 0 within 3e-7 relative, down to 2^-126. Plain arithmetic, so that loops over it vectorize."""
    bounded = x if x > LEAST_EXPONENT else LEAST_EXPONENT
    whole = np.int32(bounded - np.float32(0.5))  # the nearest, since it is not above 0
    f = bounded - np.float32(whole)
    mantissa = np.float32(1.0) + f * (Q0 + f * (Q1 + f * (Q2 + f * (Q3 + f * Q4))))
    power: np.float32 = mantissa * float_of(np.uint32((whole + np.int32(127)) << np.int32(23)))
    return power
