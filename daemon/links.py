"""Steps of a session as its orchestrator names them, and the tokens that each of them depends on."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

Step = tuple[str, str]
"""(workflow, step)."""

Tokens = tuple[int, int]
"""Tokens `[start, stop)`."""

MOST_STEPS = 256
MOST_LINKS = 64
"""Of a step; the oldest ones go."""

NO_STEP = ("", "")


@dataclass
class Links:
    present: Step = NO_STEP
    began: int = 0
    """First token of the present step."""
    _written: OrderedDict[Step, Tokens] = field(default_factory=OrderedDict)  # by steps that are over
    _links: OrderedDict[Step, list[Tokens]] = field(default_factory=OrderedDict)

    def enter(self, step: Step, length: int) -> None:
        """`step` runs from token `length` on."""
        if step == self.present:
            return
        self._written[self.present] = (self.began, length)
        self.present, self.began = step, length
        for kept in (self._written, self._links):
            while len(kept) > MOST_STEPS:
                kept.popitem(last=False)

    def written_by(self, step: Step) -> Tokens | None:
        """Tokens that an earlier step added; None if it is not known or added none."""
        start, stop = self._written.get(step, (0, 0))
        return (start, stop) if start < stop else None

    def add(self, tokens: Tokens) -> None:
        """The present step depends on `tokens`."""
        known = self._links.setdefault(self.present, [])
        if tokens not in known:
            known.append(tokens)
            del known[:-MOST_LINKS]

    @property
    def wanted(self) -> list[Tokens]:
        """What the present step depends on."""
        return self._links.get(self.present, [])

    def cut(self, length: int) -> None:
        """Tokens from `length` on are forgotten."""
        self.began = min(self.began, length)
        for step, (start, stop) in list(self._written.items()):
            self._written[step] = (min(start, length), min(stop, length))
        for step, links in list(self._links.items()):
            self._links[step] = [(start, min(stop, length)) for start, stop in links if start < length]
