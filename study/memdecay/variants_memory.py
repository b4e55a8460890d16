"""Ideas beyond the paper that need nothing but attention: each is lift (`daemon.policy.lift`) with one thing changed.

In a trace every token is attended, so what is far is all but the sinks and the newest; L is a far token's lift and
x = L / (1 + L), as in lift, and a page has its relief. The constants were chosen on scenarios to develop on. The study
does not fork a session, and what these keep beside a token's columns is not copied with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from tierkv.daemon.policy import Policy, Seen, TokenState
from tierkv.daemon.policy.lift import LEAST_MASS, MemDecayLift
from tierkv.daemon.policy.tokens import Floats
from tierkv.regions import Region


class Far(NamedTuple):
    """`where` is an index for columns; `lift` `[far tokens]`."""

    where: slice
    lift: Floats

    @property
    def saturated(self) -> Floats:
        """x"""
        x: Floats = self.lift / (1 + self.lift)
        return x


def far_of(policy: MemDecayLift, seen: Seen) -> Far:
    """What lift sees of an observation in which every token was attended."""
    first = policy.sink_tokens
    where = slice(first, max(first, len(seen.observed) - policy.near_tokens))
    mass = seen.observed[where]
    return Far(where, mass * np.float32(len(mass) / max(float(mass.sum()), LEAST_MASS)))


@dataclass(frozen=True, kw_only=True)
class FastMemory(MemDecayLift):
    """A fast memory beside the slow one:  f <- .9 f + .1 x,  alpha max(u, beta f) for
    alpha u.

    f forgets in 6.6 observations: it keeps what was looked at a moment ago, u what was looked at often. u starts from
    0 and needs hundreds of observations to come near the mean of x, f ten; beta makes up for that.
    """

    name: ClassVar[str] = "fast-memory"
    fast_rho: float = 0.9
    beta: float = 0.5

    def insert(self, step: float) -> tuple[float, ...]:
        return 0.0, step, 0.0

    def observe(self, tokens: TokenState, seen: Seen, step: float) -> None:
        _observe_lift(self, tokens, seen, step)
        far = far_of(self, seen)
        fast = tokens.columns[2, far.where]
        fast *= np.float32(self.fast_rho)
        fast += np.float32(1 - self.fast_rho) * far.saturated

    def importance(self, tokens: TokenState, step: float, span: slice) -> Floats:
        usage, _, fast = tokens.columns[:, span]
        importance: Floats = np.float32(self.alpha) * np.maximum(usage, np.float32(self.beta) * fast)
        return importance


@dataclass(frozen=True, kw_only=True)
class BiasCorrected(MemDecayLift):
    """Usage over the weight of the observations that could see the token, so that a young token is not behind:

    w <- rho w + (1 - rho)   whenever the token is far
    alpha u / w   for alpha u

    ZipCache (arXiv 2405.14256) divides by the number of queries that saw a token, which is the same without forgetting.
    """

    name: ClassVar[str] = "bias-corrected"
    alpha: float = 12.0

    def insert(self, step: float) -> tuple[float, ...]:
        return 0.0, step, 0.0

    def observe(self, tokens: TokenState, seen: Seen, step: float) -> None:
        _observe_lift(self, tokens, seen, step)
        weight = tokens.columns[2, far_of(self, seen).where]
        weight *= np.float32(self.rho)
        weight += np.float32(1 - self.rho)

    def importance(self, tokens: TokenState, step: float, span: slice) -> Floats:
        usage, _, weight = tokens.columns[:, span]
        importance: Floats = np.float32(self.alpha) * usage / np.maximum(weight, np.float32(1e-6))
        return importance


@dataclass(frozen=True, kw_only=True)
class RegionFloors(MemDecayLift):
    """s = floor_r + (1 - floor_r) raw,  raw = lift's score of a token / (1 + alpha),  floor_r = floor b_r.

    max(floor, raw) would tie everything below the floor; and one floor for all regions changes no order.
    """

    name: ClassVar[str] = "region-floors"
    floor: float = 0.01

    def scores(self, tokens: TokenState, step: float, span: slice) -> Floats:
        floor = np.float32(self.floor) * self.bases[tokens.region[span]]
        structural = self.decayed(tokens.region[span], tokens.columns[1, span], step)
        scores: Floats = floor + (1 - floor) * structural / np.float32(1 + self.alpha)
        scores += self.importance(tokens, step, span)
        return scores

    def importance(self, tokens: TokenState, step: float, span: slice) -> Floats:
        floor = np.float32(self.floor) * self.bases[tokens.region[span]]
        importance: Floats = (1 - floor) * super().importance(tokens, step, span) / np.float32(1 + self.alpha)
        return importance


class LifeState(TokenState):
    """Counts of the session, by region: lives that ended, and token steps in which one could have."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.expirations = np.zeros(len(Region))
        self.exposure = np.zeros(len(Region))
        self.observed_at = 0.0


@dataclass(frozen=True, kw_only=True)
class AdaptiveRates(MemDecayLift):
    """Decay rates learnt while the session runs, from which lives end: the mean of a Gamma posterior,

    lambda_r = (prior lambda_r0 + expirations_r) / (prior + exposure_r)

    A life begins when a token becomes far or is refreshed, and expires after `patience` decode steps without a
    refresh. Exposure is the steps of all lives, in token steps; `prior` is the weight of the file's rates, in the same.
    """

    name: ClassVar[str] = "adaptive-rates"
    patience: float = 40.0
    prior: float = 500.0

    def new_state(self) -> LifeState:
        return LifeState(self)

    def insert(self, step: float) -> tuple[float, ...]:
        return 0.0, step, 0.0  # the third: steps of this life so far; `patience` or more when it has ended

    def observe(self, tokens: TokenState, seen: Seen, step: float) -> None:
        assert isinstance(tokens, LifeState)
        _observe_lift(self, tokens, seen, step)
        far = far_of(self, seen)
        region, lived = tokens.region[far.where], tokens.columns[2, far.where]
        passed, tokens.observed_at = step - tokens.observed_at, step
        alive = lived < self.patience
        tokens.exposure += passed * np.bincount(region[alive], minlength=len(Region))
        lived += np.float32(passed) * alive
        lived[far.lift >= self.tau_factor] = 0.0
        tokens.expirations += np.bincount(region[alive & (lived >= self.patience)], minlength=len(Region))

    def rates_of(self, tokens: LifeState) -> Floats:
        """lambda_r by region, at this moment."""
        rates = (self.prior * self.rates + tokens.expirations) / (self.prior + tokens.exposure)
        return rates.astype(np.float32)

    def scores(self, tokens: TokenState, step: float, span: slice) -> Floats:
        assert isinstance(tokens, LifeState)
        region = tokens.region[span]
        age = np.maximum(np.float32(step) - tokens.columns[1, span], np.float32(0.0))
        decayed = self.bases[region] * np.exp(-self.rates_of(tokens)[region] * age)
        scores: Floats = decayed + self.importance(tokens, step, span)
        return scores


@dataclass(frozen=True, kw_only=True)
class Reuse(MemDecayLift):
    """How likely a token is to be needed again, from when it was: age against its own rhythm, and its trend.

    m = the longest interval between refreshes of the token, its first is from its insertion
    s = b_r exp(-(t - t_ref) / max(1 / lambda_r, stretch m)) + alpha u + trend (f - g)
    f and g are averages of x, of .9 and as of u, both over the weight they have so far.

    The maximum recurrence interval is LazyEviction's (arXiv 2506.15969); a token is late only measured by it. The best
    trend is negative: what is looked at less than it was.
    """

    name: ClassVar[str] = "future-reuse"
    stretch: float = 2.0
    trend: float = -4.0
    fast_rho: float = 0.9

    def insert(self, step: float) -> tuple[float, ...]:
        return 0.0, step, 0.0, 0.0, 0.0  # u, t_ref, m, f, observations that saw it

    def observe(self, tokens: TokenState, seen: Seen, step: float) -> None:
        far = far_of(self, seen)
        before = tokens.columns[1, far.where].copy()
        _observe_lift(self, tokens, seen, step)
        _, t_ref, longest, fast, count = tokens.columns[:, far.where]
        np.maximum(longest, t_ref - before, out=longest)
        fast *= np.float32(self.fast_rho)
        fast += np.float32(1 - self.fast_rho) * far.saturated
        count += 1

    def scores(self, tokens: TokenState, step: float, span: slice) -> Floats:
        _, t_ref, longest, _, _ = tokens.columns[:, span]
        region = tokens.region[span]
        life = np.maximum(1 / self.rates[region], np.float32(self.stretch) * longest)
        age = np.maximum(np.float32(step) - t_ref, np.float32(0.0))
        scores: Floats = self.bases[region] * np.exp(-age / life) + self.importance(tokens, step, span)
        return scores

    def importance(self, tokens: TokenState, step: float, span: slice) -> Floats:
        usage, _, _, fast, count = tokens.columns[:, span]
        seen = np.maximum(count, 1)
        trend = fast / (1 - np.float32(self.fast_rho) ** seen) - usage / (1 - np.float32(self.rho) ** seen)
        importance: Floats = np.float32(self.alpha) * usage + np.float32(self.trend) * trend
        return importance


class PhaseState(TokenState):
    """Means of x by [phase, region of the token], over the session."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.sums = np.zeros((len(Region), len(Region)))
        self.counts = np.zeros((len(Region), len(Region)))


@dataclass(frozen=True, kw_only=True)
class PhaseConditioned(MemDecayLift):
    """A look counts by how unusual it is: while a region p is written (the phase), region r usually gets E[p, r].

    x' = x - share (E[p, r] - 1/2)      E[p, r] is the mean of x so far, 1/2 before there is one
    u <- rho u + (1 - rho) x',  the rest as in lift
    """

    name: ClassVar[str] = "phase-conditioned"
    share: float = 0.5

    def new_state(self) -> PhaseState:
        return PhaseState(self)

    def observe(self, tokens: TokenState, seen: Seen, step: float) -> None:
        assert isinstance(tokens, PhaseState)
        _observe_lift(self, tokens, seen, step)
        far = far_of(self, seen)
        phase, region = int(tokens.region[len(seen.observed) - 1]), tokens.region[far.where]
        sums, counts = tokens.sums[phase], tokens.counts[phase]
        counts += np.bincount(region, minlength=len(Region))
        sums += np.bincount(region, far.saturated, minlength=len(Region))
        usual = np.where(counts > 0, sums / np.maximum(counts, 1), 0.5)
        usage = tokens.columns[0, far.where]
        usage -= np.float32((1 - self.rho) * self.share) * (usual[region] - 0.5).astype(np.float32)


def _observe_lift(policy: MemDecayLift, tokens: TokenState, seen: Seen, step: float) -> None:
    """As lift does, on the first two columns."""
    usage, t_ref = tokens.columns[:2]
    far = far_of(policy, seen)
    known = usage[far.where]
    known *= np.float32(policy.rho)
    known += np.float32(1 - policy.rho) * far.saturated
    t_ref[far.where][far.lift >= policy.tau_factor] = step
