"""`tierkv study ablate`: one setting at a time changed from the defaults of `memdecay` and `memdecay-lift`.

Measured by survival of facts (see `survival`), which is not recall.

The paper fits decay rates on a burst of 48 decode steps and evicts after one of 8. `final burst 48` evicts after what
the rates were fitted on (`protocol.FIT`), by the defaults' rates, which are the paper's; with a policy file there is
the same pair for the rates of that file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.text import Text

from tierkv.daemon import policy
from tierkv.daemon.policy.decay import RegionDecay
from tierkv.errors import ConfigError
from tierkv.study.memdecay.arms import Arm, compared
from tierkv.study.memdecay.evict import Unit
from tierkv.study.memdecay.protocol import FIT, Protocol
from tierkv.study.memdecay.scenarios import Episode
from tierkv.study.memdecay.survival import (
    Case,
    Keeps,
    Pair,
    Survival,
    Told,
    legend,
    render_rows,
    survival,
    unheard,
)
from tierkv.study.memdecay.traces import Trace

DEFAULTS = ("memdecay", "memdecay-lift")
"""By the names that their arms have in the recall study."""

SETTINGS: dict[str, dict[str, tuple[object, ...]]] = {
    "memdecay": {
        "alpha": (0.2, 0.5, 0.8),
        "tau_factor": (1.0, 2.0, 4.0),
        "aggregate": ("mean", "max", "top2", "relief"),
        "rho": (0.8, 0.9, 0.95, 0.99),
    },
    "memdecay-lift": {
        "alpha": (3.0, 6.0, 12.0, 24.0, 48.0, 96.0),
        "tau_factor": (1.0, 2.0, 4.0, 8.0),
        "aggregate": ("mean", "max", "top2", "relief"),
        "rho": (0.9, 0.95, 0.98, 0.99, 0.999),
        "near_tokens": (0, 32, 64, 128),
        "sink_tokens": (0, 4, 16),
    },
}
"""Of the policies; the default among them is not measured twice."""

EVERY = (2, 4, 8)
PROMPT_WINDOWS = (8, 40)
"""The daemon observes the last queries of a prompt as well; the paper does not."""

UNITS: tuple[Unit, ...] = ("straddling", "aligned")
PAGE_TOKENS = (8, 16, 32)


def run(pairs: Iterable[Pair], calibrated: Path | None = None, told: Told = unheard) -> Survival:
    """Every setting on every pair. calibrated: a policy file, whose half-lives are one more setting.

    Raises:
        ConfigError: the policy file has no half-lives or cannot be read; see `survival.survival`.
    """
    rates = None if calibrated is None else _rates(calibrated)
    arms = [arm for arm in compared() if arm.name in DEFAULTS]
    return survival(pairs, [case for arm in arms for case in cases(arm, rates)], told)


def _rates(file: Path) -> RegionDecay:
    found = policy.load(file)
    if not isinstance(found, RegionDecay):
        raise ConfigError(
            f"{file} describes the policy {found.name!r}, which has no half-lives; give one that has"
        )
    return found


def cases(arm: Arm, rates: RegionDecay | None = None) -> Iterator[Case]:
    """The arm as it is, then with one thing changed at a time."""
    name = arm.policy.name

    def case(what: str, value: object, changed: Arm) -> Case:
        return Case(name, what, str(value), _keeps(changed))

    yield case("default", "", arm)
    for setting, values in SETTINGS[name].items():
        for value in values:
            if value != getattr(arm.policy, setting):
                yield case(setting, value, arm._replace(policy=policy.get(name, **{setting: value})))
    yield case("system pinned", "no" if arm.pinned else "yes", arm._replace(pinned=not arm.pinned))
    yield case("single tokens", "", arm._replace(unit="tokens"))
    for unit in UNITS:
        for size in PAGE_TOKENS:
            if (unit, size) != (arm.unit, arm.page_tokens):
                yield case(unit, size, arm._replace(unit=unit, page_tokens=size))
    for every in EVERY:
        yield case("k", every, arm._replace(protocol=Protocol(every=every)))
    for window in PROMPT_WINDOWS:
        yield case("prompt window", window, arm._replace(protocol=Protocol(prompt_window=window)))
    yield case("final burst", FIT.final_burst, arm._replace(protocol=FIT))
    if rates is not None:
        fitted = arm._replace(policy=policy.get(name, half_life=rates.half_life))
        yield case("half-lives", "fitted", fitted)
        yield case("both", "", fitted._replace(protocol=FIT))


def _keeps(arm: Arm) -> Keeps:
    def keeps(episode: Episode, trace: Trace, budget: float) -> NDArray[np.bool_]:
        return arm.kept(trace, budget)

    return keeps


def render(report: Survival) -> Group:
    parts = [
        render_rows(f"{name}, one setting changed", [row for row in report.rows if row.policy == name])
        for name in DEFAULTS
    ]
    notes = [
        "k: each k-th decode step is observed; final burst 48: as the rates were fitted, not as is evicted"
    ]
    if any(row.what == "half-lives" for row in report.rows):
        notes.append(
            "half-lives fitted: those of the policy file, instead of the paper's; both: and final burst 48"
        )
    return Group(*parts, *(Text(line, style="dim") for line in (legend(report), *notes)))
