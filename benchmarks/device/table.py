"""What parts find, a line each, and all of it as one table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """`good` is None for what is measured and not judged."""

    what: str
    found: str
    good: bool | None = None


class Part(NamedTuple):
    """What a part found, in how many seconds, and why it did not end well."""

    name: str
    rows: list[Row]
    seconds: float
    problem: str = ""

    @property
    def good(self) -> bool:
        return not self.problem and all(row.good is not False for row in self.rows)


def append(file: Path, row: Row) -> None:
    """Rows are written one by one: what a part found before it failed is kept."""
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def read(file: Path) -> list[Row]:
    """Whole lines; a part may have been killed in the middle of one."""
    if not file.exists():
        return []
    text = file.read_text()
    return [Row(*json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]


def render(title: str, parts: Iterable[Part]) -> str:
    """The table as text."""
    lines = [title, ""]
    for part in parts:
        verdict = "ok" if part.good else "FAILED"
        lines.append(
            f"{part.name}: {verdict}, {part.seconds:.0f} s{f' ({part.problem})' if part.problem else ''}"
        )
        marks = {True: "ok", False: "WRONG", None: ""}
        lines += [f"  {marks[row.good]:6} {row.what:58} {row.found}" for row in part.rows]
        lines.append("")
    return "\n".join(lines)
