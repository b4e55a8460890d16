"""Ideas beyond the paper that need to know more than attention: which blocks belong together, replace, or quote others.

Each is lift (`daemon.policy.lift`) for one episode, whose links it holds; an orchestrator or the token ids would tell
the daemon the same. The constants were chosen on scenarios to develop on.

The report scenarios favour shared fate by construction: the parts that a plan names as its evidence are those that
hold facts, so whoever is told the links is told where to look. In twelve of the sixteen to develop on that is not so.
`other_evidence` is the same policy told wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.policy import TokenState
from tierkv.daemon.policy.lift import MemDecayLift
from tierkv.daemon.policy.tokens import Floats
from tierkv.geometry import PAGE_TOKENS
from tierkv.regions import Region
from tierkv.study.memdecay.scenarios import CLOSING, OPENING, Block

COPY_TOKENS = 8
"""A shorter match is chance, or a heading."""


class Span(NamedTuple):
    """Tokens `[start, stop)`."""

    start: int
    stop: int


class Evidence(NamedTuple):
    plan: Span
    of: tuple[Span, ...]


class Superseded(NamedTuple):
    """`old` is worth nothing once `since` tokens are there."""

    old: Span
    since: int


class Copy(NamedTuple):
    """`source` stands again up to token `stop`."""

    source: Span
    stop: int


def evidence_of(blocks: Sequence[Block]) -> tuple[Evidence, ...]:
    """Each plan that names evidence, and the blocks of the parts it names."""
    return tuple(
        Evidence(
            Span(plan.start, plan.stop),
            tuple(Span(b.start, b.stop) for b in blocks if b.part in plan.evidence),
        )
        for plan in blocks
        if plan.evidence
    )


def other_evidence(blocks: Sequence[Block]) -> tuple[Evidence, ...]:
    """The same plans, with as many other parts: the first movable ones that are not named."""
    parts = [p for p in dict.fromkeys(b.part for b in blocks) if p not in (OPENING, CLOSING)]
    wrong = []
    for plan in blocks:
        named = set([p for p in parts if p not in plan.evidence][: len(plan.evidence)])
        spans = tuple(Span(b.start, b.stop) for b in blocks if b.part in named)
        if spans:
            wrong.append(Evidence(Span(plan.start, plan.stop), spans))
    return tuple(wrong)


def superseded_of(blocks: Sequence[Block]) -> tuple[Superseded, ...]:
    """Tool results of which a later result of the same call comes, and where that one ends."""
    found = []
    for i, old in enumerate(blocks):
        newer = next((b for b in blocks[i + 1 :] if old.call and b.call == old.call), None)
        if newer is not None:
            found.append(Superseded(Span(old.start, old.stop), newer.stop))
    return tuple(found)


def copies_of(tokens: Sequence[int], starts: Sequence[int], least: int = COPY_TOKENS) -> tuple[Copy, ...]:
    """Spans of `least` or more tokens that stand in an earlier block as well, as long as they match, first to last.

    `starts`: first token of each block. A source is the last one before; it ends where its block ends.
    """
    ids = list(tokens)
    ends = [*starts[1:], len(ids)]
    seen: dict[tuple[int, ...], int] = {}
    found = []
    for start, end in zip(starts, ends, strict=True):
        at = start
        while at + least <= end:
            source = seen.get(tuple(ids[at : at + least]))
            if source is None:
                at += 1
                continue
            limit = min(e for e in ends if e > source)
            length = least
            while at + length < end and source + length < limit and ids[at + length] == ids[source + length]:
                length += 1
            found.append(Copy(Span(source, source + length), at + length))
            at += length
        for first in range(start, end - least + 1):
            seen[tuple(ids[first : first + least])] = first
    return tuple(found)


class Scored(NamedTuple):
    """`[pages]` scores, and the tokens `[starts, stops)` of each page."""

    scores: Floats
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def touching(self, span: Span, around: int = 0) -> NDArray[np.bool_]:
        """Which pages hold a token of the span, or of so many tokens beside it."""
        touching: NDArray[np.bool_] = (self.starts < span.stop + around) & (self.stops > span.start - around)
        return touching


class LinkedState(TokenState):
    """Its pages have lift's scores, which the policy then changes where a link says so."""

    def __init__(self, policy: Linked) -> None:
        super().__init__(policy)
        self._linked = policy

    def unlinked(self, starts: NDArray[np.int64], counts: NDArray[np.int32], step: float) -> Floats:
        """Lift's scores."""
        return super().page_scores(starts, counts, step)

    def page_scores(self, starts: NDArray[np.int64], counts: NDArray[np.int32], step: float) -> Floats:
        pages = self.unlinked(starts, counts, step)
        self._linked.link(self, Scored(pages, starts, starts + counts), step)
        return pages


@dataclass(frozen=True, kw_only=True)
class Linked(MemDecayLift, ABC):
    """Lift, and links between spans of tokens."""

    def new_state(self) -> LinkedState:
        return LinkedState(self)

    @abstractmethod
    def link(self, tokens: LinkedState, pages: Scored, step: float) -> None:
        """Change the scores in place."""


@dataclass(frozen=True, kw_only=True)
class SharedFate(Linked):
    """A plan and its evidence share fate: a page with tokens of the evidence has at least `share` of the score of the
    plan's best page.
    """

    name: ClassVar[str] = "shared-fate"
    links: tuple[Evidence, ...] = ()
    share: float = 0.5

    def link(self, tokens: LinkedState, pages: Scored, step: float) -> None:
        for plan, evidence in self.links:
            own = np.arange(plan.start, min(plan.stop, len(tokens)), PAGE_TOKENS)
            if len(own):
                ends = np.append(own[1:], min(plan.stop, len(tokens)))
                least = self.share * tokens.unlinked(own, (ends - own).astype(np.int32), step).max()
                for span in evidence:
                    touched = pages.touching(span)
                    pages.scores[touched] = np.maximum(pages.scores[touched], np.float32(least))


@dataclass(frozen=True, kw_only=True)
class Supersede(Linked):
    """A page with tokens of a tool result, of which a newer result of the same call is there, has score 0."""

    name: ClassVar[str] = "supersede"
    links: tuple[Superseded, ...] = ()

    def link(self, tokens: LinkedState, pages: Scored, step: float) -> None:
        for old, since in self.links:
            if len(tokens) >= since:
                pages.scores[pages.touching(old)] = 0.0


@dataclass(frozen=True, kw_only=True)
class CopyRefresh(Linked):
    """Who quotes a span has used it: a page with tokens of the span, or of `around` tokens beside it, has `raised` more
    as soon as the copy is there.

    Detected by token ids, see `copies_of`; tool calls are left out, because they repeat their form.
    """

    name: ClassVar[str] = "copy-refresh"
    links: tuple[Copy, ...] = ()
    raised: float = 0.5
    around: int = 8

    def link(self, tokens: LinkedState, pages: Scored, step: float) -> None:
        raised = np.zeros(len(pages.scores), bool)
        for source, end in self.links:
            if len(tokens) >= end:
                raised |= pages.touching(source, self.around)
        pages.scores[raised] += np.float32(self.raised)


def quotes_of(tokens: Sequence[int], blocks: Sequence[Block]) -> tuple[Copy, ...]:
    """`copies_of`, without copies of what stands in a tool call."""
    calls = [b for b in blocks if b.region == Region.TOOL_IN]
    return tuple(
        copy
        for copy in copies_of(tokens, [b.start for b in blocks])
        if not any(b.start <= copy.source.start < b.stop for b in calls)
    )
