"""`tierkv study labels`: what wrong region labels cost `memdecay` and `memdecay-lift`.

Measured by survival of facts (see `survival`), which is not recall. A policy sees the wrong labels throughout: its
rates, its pins and its pages' borders follow them. Facts are counted by the region in which they truly stand.

wrong 20%   of blocks, each has one of the six other regions by chance; a block that is wrong at 10% is so at 20%
from roles  what a chat's roles tell: system, user, and assistant and tool as scratchpad and tool_out
all user    no labels at all
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import xxhash
from numpy.typing import NDArray
from rich.console import Group
from rich.text import Text

from tierkv.regions import Region
from tierkv.study.memdecay.ablate import DEFAULTS
from tierkv.study.memdecay.arms import Arm, compared
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

SHARES = (0.1, 0.2, 0.4)
SEEDS = (0, 1, 2, 3, 4)
"""Of the noise; survival is averaged over them."""

ROLES: dict[Region, Region] = {
    Region.SYSTEM: Region.SYSTEM,
    Region.USER: Region.USER,
    Region.PLAN: Region.SCRATCHPAD,  # assistant
    Region.TOOL_IN: Region.SCRATCHPAD,  # assistant
    Region.SCRATCHPAD: Region.SCRATCHPAD,  # assistant
    Region.TOOL_OUT: Region.TOOL_OUT,  # tool
    Region.RETRIEVAL: Region.TOOL_OUT,  # tool
}

Relabel = Callable[[Episode], NDArray[np.int8]]
"""The regions that a policy sees, `[tokens]`."""


def noisy(episode: Episode, share: float, seed: int = 0) -> NDArray[np.int8]:
    """About `share` of the blocks get another region."""
    rng = np.random.default_rng([seed, xxhash.xxh3_64_intdigest(episode.name.encode())])
    blocks = len(episode.blocks)
    wrong = rng.random(blocks) < share
    regions = np.array([block.region for block in episode.blocks])
    moved = (regions + rng.integers(1, len(Region), blocks)) % len(Region)
    return _by_token(episode, np.where(wrong, moved, regions))


def from_roles(episode: Episode) -> NDArray[np.int8]:
    return _by_token(episode, np.array([ROLES[block.region] for block in episode.blocks]))


def all_user(episode: Episode) -> NDArray[np.int8]:
    return np.full(len(episode.tokens), Region.USER, np.int8)


def _by_token(episode: Episode, regions: NDArray[np.int64]) -> NDArray[np.int8]:
    return np.repeat(regions, [block.stop - block.start for block in episode.blocks]).astype(np.int8)


def run(pairs: Iterable[Pair], told: Told = unheard) -> Survival:
    """Both policies under every labelling. Raises `ConfigError`, see `survival.survival`."""
    return survival(pairs, [case for arm in compared() if arm.name in DEFAULTS for case in cases(arm)], told)


def cases(arm: Arm) -> list[Case]:
    def case(what: str, value: str, relabel: Relabel) -> Case:
        return Case(arm.name, what, value, _keeps(arm, relabel))

    def noise(share: float, seed: int) -> Relabel:
        return lambda episode: noisy(episode, share, seed)

    return [
        case("true labels", "", lambda episode: noisy(episode, 0.0)),
        *(case("wrong", f"{share:.0%}", noise(share, seed)) for share in SHARES for seed in SEEDS),
        case("from roles", "", from_roles),
        case("all user", "", all_user),
    ]


def _keeps(arm: Arm, relabel: Relabel) -> Keeps:
    def keeps(episode: Episode, trace: Trace, budget: float) -> NDArray[np.bool_]:
        return arm.kept(replace(trace, regions=relabel(episode)), budget)

    return keeps


def render(report: Survival) -> Group:
    parts = [
        render_rows(f"{name}, wrong labels", [row for row in report.rows if row.policy == name])
        for name in DEFAULTS
    ]
    notes = (legend(report), f"wrong: this share of blocks, a mean over {len(SEEDS)} seeds")
    return Group(*parts, *(Text(line, style="dim") for line in notes))
