"""Regions of a session's next tokens: the queue of labels that a caller gave, and who gave the tentative tokens theirs.

A label is used up when its tokens are laid out, and waits again when they are rolled back. Regions that nobody gave
by a label do not wait: the next tokens get their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from tierkv.regions import Region, Run, default_region


class Span(NamedTuple):
    """Tentative tokens of one region; `labelled` by the caller, not by default."""

    region: Region
    tokens: int
    labelled: bool


class Labels:
    """Labels that wait, and the spans of the tentative tokens, in order."""

    def __init__(self) -> None:
        self._waiting: deque[Run] = deque()
        self._tentative: list[Span] = []

    def add(self, region: Region, tokens: int) -> None:
        self._waiting.append(Run(region, tokens))

    def clear(self) -> None:
        """Forget labels that no token has taken yet."""
        self._waiting.clear()

    def preview(self, tokens: int, regions: Sequence[Run] = ()) -> list[Span]:
        """Spans of the next `tokens` tokens; nothing is used up. `regions` are those of tokens that no label names."""
        spans, left = [], tokens
        for run in self._waiting:
            take = min(left, run.tokens)
            if take:
                spans.append(Span(run.region, take, True))
                left -= take
        named = tokens - left
        for run in regions:
            hidden = min(named, run.tokens)
            named -= hidden
            take = min(left, run.tokens - hidden)
            if take:
                spans.append(Span(run.region, take, False))
                left -= take
        if left:
            spans.append(Span(default_region(tokens), left, False))
        return spans

    def take(self, spans: list[Span]) -> None:
        """The previewed `spans` are laid out: their labels are used up."""
        for span in spans:
            if span.labelled:
                run = self._waiting.popleft()
                if run.tokens > span.tokens:
                    self._waiting.appendleft(Run(run.region, run.tokens - span.tokens))
        self._tentative += spans

    def give_back(self, tokens: int) -> None:
        """The last `tokens` tentative tokens are rolled back: labels among theirs wait again, first of all."""
        while tokens:
            span = self._tentative.pop()
            take = min(tokens, span.tokens)
            tokens -= take
            if span.tokens > take:
                self._tentative.append(span._replace(tokens=span.tokens - take))
            if span.labelled:
                self._waiting.appendleft(Run(span.region, take))

    def commit(self) -> list[tuple[int, int]]:
        """Runs of (region, tokens) that were tentative until now; neighbours of one region are one."""
        runs: list[tuple[int, int]] = []
        for span in self._tentative:
            if runs and runs[-1][0] == span.region:
                runs[-1] = (runs[-1][0], runs[-1][1] + span.tokens)
            else:
                runs.append((int(span.region), span.tokens))
        self._tentative.clear()
        return runs
