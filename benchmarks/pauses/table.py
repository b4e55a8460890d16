"""The table of a run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from tierkv.benchmarks.pauses.records import Record
from tierkv.benchmarks.quant.table import plain_table

GIB = 2**30


def render(records: Sequence[Record]) -> Group:
    """A table a room."""
    return Group(*(_room(records, room) for room in dict.fromkeys(record.room for record in records)))


def _room(records: Sequence[Record], room: str) -> Table:
    own = [record for record in records if record.room == room]
    table = plain_table(
        f"HBM for a quarter of the sessions, {room}; {own[0].running:.0f} run on average, {own[0].resumes} resumes; a "
        f"working set is {own[0].set_share:.0%} of a session's pages"
    )
    names = ("ready", "all pages", "bound", "of the set", "mass", "late s", "running", "paused hold", "GiB/s")
    for name in ("hints", *names):
        table.add_column(name, justify="left" if name == "hints" else "right")
    for one in own:
        table.add_row(
            one.arm, f"{one.ready:.1%}", f"{one.whole:.1%}", "" if one.bound is None else f"{one.bound:.1%}",
            f"{one.found:.3f}", f"{one.mass:.3f}", f"{one.late_seconds:.2f}", f"{one.running_mass:.3f}",
            f"{one.held:.0%}", f"{one.returned / GIB:.2f}",
        )  # fmt: skip
    return table
