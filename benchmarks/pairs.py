"""Two things measured in turn (A B A B ...), so that a busy moment of the machine meets both.

Every pair gives one ratio; the figure is the median of those, not the ratio of two medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

Figures = dict[str, float]

Sample = Callable[[], float]
"""Measures once; the figure (seconds, or any other number above 0)."""


def interleave(ours: Sample, peer: Sample, pairs: int, warm_up: int = 1) -> Figures:
    """Sample both in turn, `warm_up` pairs unrecorded. See `compare` for the result."""
    for _ in range(warm_up):
        ours(), peer()
    return compare((ours(), peer()) for _ in range(pairs))


def compare(pairs: Iterable[tuple[float, float]]) -> Figures:
    """Medians of `(ours, peer)` pairs.

    Returns:
        `ours` and `peer` (medians), `ratio` (median of ours / peer, pair by pair), `ratio_low` and `ratio_high` (its
        quartiles), `pairs` (how many).

    Raises:
        ValueError: there is no pair.
    """
    measured = list(pairs)
    if not measured:
        raise ValueError("no pair was measured; ask for at least one")
    ratios = [ours / peer for ours, peer in measured]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "ours": statistics.median(ours for ours, _ in measured),
        "peer": statistics.median(peer for _, peer in measured),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "pairs": len(measured),
    }
