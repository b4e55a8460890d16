"""The tables of a run, 100 columns wide: a table a model and batch, a row a context and arm."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from tierkv.benchmarks.attention import PEERS, SDPA
from tierkv.benchmarks.attention.run import Made, Record


def render(made: Made) -> Group:
    return Group(*_parts(made))


def _parts(made: Made) -> Iterator[Table | str]:
    for (model, batch), records in itertools.groupby(made.records, lambda one: (one.model, one.batch)):
        yield _table(model, batch, list(records))
    yield from (f"{arm} is left out: {escape(why)}" for arm, why in made.skipped.items())


def _table(model: str, batch: int, records: list[Record]) -> Table:
    table = Table(
        title=f"{model}, batch {batch}: attention of one layer for one token a row", title_justify="left",
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0),
    )  # fmt: skip
    for name in ("context", "arm", "ms", f"x {SDPA} (quartiles)", "MiB attended", "GB/s"):
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    last = 0
    for one in records:
        if last and one.context != last:
            table.add_section()
        table.add_row(
            f"{one.context:,}" if one.context != last else "",
            one.arm if one.arm in PEERS else f"[bold]{one.arm}[/]",
            f"{one.ms_per_layer:.3f}",
            ""
            if one.arm == SDPA
            else f"{one.ratio_to_sdpa:.2f} ({one.ratio_low:.2f} to {one.ratio_high:.2f})",
            f"{one.attended_bytes / 2**20:.2f}",
            f"{one.gbps:.2f}",
        )
        last = one.context
    return table
