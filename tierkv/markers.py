"""Regions of a token stream that nobody labelled, from the markers by which a chat template opens its messages.

`Markers` knows the token sequences that open a system, user, assistant or tool message, or a call in an assistant's.
A `Reader` follows one sequence through any chunks: a message has its region from the first token of its opening to
that of the next one. Where an opening lies across two chunks, its message begins with the second: what was read is
laid out already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from tierkv.regions import Region, Run, default_region

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEW_TOKENS = 4
"""So many are not worth a page: BOS joins the first message, and an opening the call that follows it."""

UNKNOWN = -1
"""A token whose id is not known: no marker has it."""


class Marker(NamedTuple):
    """Tokens that open a message of a region. One of `TOOL_IN` counts in an assistant's message only."""

    tokens: tuple[int, ...]
    region: Region


class Markers:
    """The markers of one chat template.

    Raises:
        ValueError: a marker has no tokens.
    """

    def __init__(self, markers: Iterable[Marker]) -> None:
        self.markers = tuple(sorted(markers, key=lambda marker: -len(marker.tokens)))
        self._by_last: dict[int, list[Marker]] = {}
        for marker in self.markers:
            if not marker.tokens:
                raise ValueError(f"the marker of {marker.region.label} has no tokens")
            self._by_last.setdefault(marker.tokens[-1], []).append(marker)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Markers:
        """What the tokenizer's chat template puts before each role's messages, found by rendering small conversations.

        Raises:
            ValueError: nothing tells the user's messages from the assistant's.
        """
        from tierkv.marker_probe import learn

        return cls(learn(tokenizer))

    def label(self, token_ids: Sequence[int]) -> list[Run]:
        """Runs of a whole sequence."""
        return self.reader().label(token_ids)

    def reader(self, held: int = 0) -> Reader:
        """Follows a sequence of which `held` tokens, whose ids are not known, are there already."""
        return Reader(self, held)

    def ending(self, token_ids: Sequence[int], in_answer: bool) -> Marker | None:
        """The longest marker that `token_ids` end with."""
        for marker in self._by_last.get(token_ids[-1], ()):
            if marker.region == Region.TOOL_IN and not in_answer:
                continue
            if tuple(token_ids[-len(marker.tokens) :]) == marker.tokens:
                return marker
        return None


class _Opened(NamedTuple):
    """A message: its opening ends before token `stop`."""

    stop: int
    region: Region


class Reader:
    """One sequence, read chunk by chunk. Made by `Markers.reader`."""

    def __init__(self, markers: Markers, held: int = 0) -> None:
        self._markers = markers
        self._ids = [UNKNOWN] * held
        self._opened: list[_Opened] = []

    def label(self, token_ids: Iterable[int]) -> list[Run]:
        """Runs of the tokens that follow; before any marker, what a session gives unlabelled tokens."""
        ids = list(token_ids)
        first = len(self._ids)
        edges = [(first, self._opened[-1].region if self._opened else default_region(len(ids)))]
        for token in ids:
            self._ids.append(token)
            in_answer = bool(self._opened) and self._opened[-1].region == Region.SCRATCHPAD
            marker = self._markers.ending(self._ids, in_answer)
            if marker is not None:
                start = self._start(marker, first, edges[-1][0])
                while edges and edges[-1][0] >= start:
                    edges.pop()
                edges.append((start, marker.region))
                self._opened.append(_Opened(len(self._ids), marker.region))
        return _runs(edges, len(self._ids))

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        del self._ids[length:]
        while self._opened and self._opened[-1].stop > length:
            self._opened.pop()

    def fork(self) -> Reader:
        """A reader that has read the same and goes its own way."""
        child = Reader(self._markers)
        child._ids, child._opened = list(self._ids), list(self._opened)
        return child

    def _start(self, marker: Marker, first: int, message: int) -> int:
        """First token of the message that `marker` opens; the one before it began at `message`, in this chunk."""
        start = max(first, len(self._ids) - len(marker.tokens))
        if marker.region == Region.TOOL_IN and first < self._opened[-1].stop >= start - FEW_TOKENS:
            return message
        return 0 if first == 0 and start <= FEW_TOKENS else start


def _runs(edges: list[tuple[int, Region]], stop: int) -> list[Run]:
    """Tokens from each edge to the next; neighbours of one region are one run."""
    runs: list[Run] = []
    for (start, region), (end, _) in pairwise([*edges, (stop, Region.USER)]):
        if runs and runs[-1].region == region:
            runs[-1] = Run(region, runs[-1].tokens + end - start)
        elif end > start:
            runs.append(Run(region, end - start))
    return runs


__all__ = ["FEW_TOKENS", "UNKNOWN", "Marker", "Markers", "Reader"]
