"""What the recall study found: the contents of `recall-study.json`, and the tables that people read."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
from rich.console import Group
from rich.table import Table

FIRST = (4, 8, 16)
"""Pages that might be brought back."""


class Spread(msgspec.Struct):
    """Over questions."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


class Places(msgspec.Struct):
    """For how many questions the fact's page is among the first so many, and how many pages come before it at most."""

    first: dict[int, int]
    worst: int

    @classmethod
    def of(cls, ranks: Sequence[int]) -> Places:
        return cls({count: sum(rank < count for rank in ranks) for count in FIRST}, max(ranks))


class EstimatorReport(msgspec.Struct):
    """`ratio` is the sum of estimated shares of cold pages over the sum of their true ones; `late`: last ten layers."""

    name: str
    offset: bool
    ratio: Spread
    ratio_late: Spread
    places: Places
    places_late: Places


class AnswerReport(msgspec.Struct):
    """`chunk_read` and `read` are pages a KV head; None for all. `answered` counts questions."""

    chunk_read: int | None
    pages: int
    read: int
    answered: int


class StudyReport(msgspec.Struct):
    episodes: int
    questions: int
    cold_pages: Spread
    estimators: list[EstimatorReport]
    uninformed: Places
    uninformed_late: Places
    answers: list[AnswerReport]
    seconds: float


def render(report: StudyReport) -> Group:
    """Masses, ranks and answers."""
    cold, several = report.cold_pages, "/".join(map(str, FIRST))
    masses = Table(title="Estimated over true mass of cold pages, median (least to most) over questions")
    for name in ("estimator", "all layers", "last ten"):
        masses.add_column(name, justify="left" if name == "estimator" else "right")
    ranks = Table(title=f"Questions whose fact's page is among the first {several} (pages before it at most)")
    for name in ("estimator", "all layers", "last ten"):
        ranks.add_column(name, justify="left" if name == "estimator" else "right")
    for one in report.estimators:
        name = f"{one.name}, offset a head" if one.offset else one.name
        masses.add_row(name, _spread(one.ratio), _spread(one.ratio_late))
        ranks.add_row(name, _places(one.places), _places(one.places_late))
    ranks.add_row("digest, uninformed", _places(report.uninformed), _places(report.uninformed_late))
    answers = Table(title=f"Answers, of {report.questions}")
    for name in ("question reads, a KV head", "pages brought back", "decode reads", "answers"):
        answers.add_column(name, justify="right")
    for row in report.answers:
        read = "all" if row.chunk_read is None else str(row.chunk_read)
        answers.add_row(read, str(row.pages), str(row.read), str(row.answered))
    told = f"{report.episodes} episodes, {cold.min:.0f} to {cold.max:.0f} cold pages; {report.seconds:.0f} s"
    return Group(masses, ranks, answers, told)


def _spread(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.min:.2f} to {spread.max:.2f})"


def _places(places: Places) -> str:
    return f"{'/'.join(str(places.first[count]) for count in FIRST)} ({places.worst})"
