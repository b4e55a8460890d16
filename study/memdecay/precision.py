"""`tierkv study lifetimes --precision`: what a model in bfloat16 changes about the fitted rates.

The same episodes are recorded twice, by the model in float32 and in bfloat16, and fitted the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
from rich import box
from rich.table import Table

from tierkv.errors import ConfigError
from tierkv.study.memdecay.lifetimes import Fit, fit, sums
from tierkv.study.memdecay.protocol import FIT
from tierkv.study.memdecay.traces import Trace


class Compared(msgspec.Struct, frozen=True):
    """A row (region) in a tier: rates per decode step, and `difference` of the second in shares of the first's.

    `interval` is half the width of the first rate's 95% interval, in the same shares: what a difference is to be held
    against.
    """

    row: str
    tier: str
    float32: float
    bfloat16: float
    difference: float
    interval: float


class Report(msgspec.Struct, frozen=True):
    """`mass` is the mean absolute difference of a token's mass, in shares of the mean mass."""

    models: tuple[str, str]
    episodes: list[str]
    mass: float
    rates: list[Compared]


def run(float32: Iterable[Trace], bfloat16: Iterable[Trace]) -> Report:
    """Compare the episodes that both have.

    Raises:
        ConfigError: there are none, or two traces of one name are not of the same tokens.
    """
    second = {trace.name: trace for trace in bfloat16}
    pairs = [(trace, second[trace.name]) for trace in float32 if trace.name in second]
    if not pairs:
        raise ConfigError(
            "no episode was recorded in both dtypes; record some in bfloat16 into a folder of their own"
        )
    for one, twin in pairs:
        if one.tokens.tolist() != twin.tokens.tolist() or one.queries.tolist() != twin.queries.tolist():
            raise ConfigError(
                f"the two traces of {one.name} are not of the same tokens and queries; record both again"
            )
    fits = [_by_place(fit([sums(trace, FIT) for trace in traces])) for traces in zip(*pairs, strict=True)]
    apart = sum(float(np.abs(a.mass.astype(np.float32) - b.mass).sum()) for a, b in pairs)
    whole = sum(float(a.mass.sum(dtype=np.float64)) for a, _ in pairs)
    rates = [
        Compared(
            row, tier, usual.rate, other.rate, (other.rate - usual.rate) / abs(usual.rate),
            (usual.rate_high - usual.rate_low) / 2 / abs(usual.rate),
        )
        for (row, tier), usual in fits[0].items()
        if (other := fits[1].get((row, tier))) is not None and usual.rate
    ]  # fmt: skip
    return Report(
        (pairs[0][0].model, pairs[0][1].model), [one.name for one, _ in pairs], apart / whole, rates
    )


def _by_place(fits: Iterable[Fit]) -> Mapping[tuple[str, str], Fit]:
    return {(one.row, one.tier): one for one in fits}


def render(report: Report) -> Table:
    table = Table(
        title=f"Rates of {report.models[1]} beside {report.models[0]}, {len(report.episodes)} episodes; a token's mass "
        f"differs by {report.mass:.2%} on average",
        box=box.SIMPLE_HEAD, title_justify="left",
    )  # fmt: skip
    for column in ("region", "tier", "float32", "bfloat16", "difference", "95% interval"):
        table.add_column(column, justify="left" if column in ("region", "tier") else "right")
    for one in report.rates:
        table.add_row(
            one.row, one.tier, f"{one.float32:.5f}", f"{one.bfloat16:.5f}", f"{one.difference:+.1%}",
            f"± {one.interval:.0%}",
        )  # fmt: skip
    return table
