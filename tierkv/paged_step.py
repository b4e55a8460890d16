"""One forward pass over pages: where its tokens are written, which pages it attends, and the mass it saw.

A step is built once, after every row's `Session.begin`, and shared by all layers. `DecodeStep` serves one new token a
row, all rows in one kernel call; `PrefillStep` serves many new tokens, row by row. Nothing here knows transformers.

What attention adds up stays where it runs until `leave`; reading it before it has `arrived` waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.attention.contract import PagedAttention, Pages, PoolView
from tierkv.cold_look import (
    NO_ESTIMATES,
    NOTHING,
    WHOLE,
    ColdLook,
    Looks,
    look_at_cold,
    look_at_exact,
    sunk_of,
)
from tierkv.geometry import Geometry
from tierkv.protocol import Audit, Observing
from tierkv.recall import Estimates
from tierkv.regions import Run
from tierkv.rows import ColdRows, PageRows
from tierkv.table import Kind
from tierkv.tally import Tally


class Rows(Protocol):
    """Attendable pages of one session, in token order."""

    @property
    def offsets(self) -> NDArray[np.int64]: ...  # [pages] bytes into the pool
    @property
    def kinds(self) -> NDArray[np.int8]: ...  # [pages]
    @property
    def counts(self) -> NDArray[np.int32]: ...  # [pages]
    @property
    def starts(self) -> NDArray[np.int64]: ...  # [pages] the session's token index of the first token


class PagedSession(Protocol):
    """What a step and a cache need of a session (`tierkv.session.Session`)."""

    @property
    def geometry(self) -> Geometry: ...
    @property
    def observing(self) -> Observing: ...
    @property
    def horizon(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def pool(self) -> PoolView: ...
    @property
    def host(self) -> PoolView: ...
    @property
    def hbm_budget(self) -> int: ...
    @property
    def has_cold(self) -> bool: ...
    @property
    def cold_pages(self) -> int: ...

    def cold(self, stop: int) -> ColdRows: ...
    def exact(self, stop: int, most: int) -> tuple[PageRows, ColdRows] | None: ...
    def recall(
        self, pages: Sequence[int], masses: Sequence[float], seconds: float, wait: bool = True
    ) -> None: ...
    def reserve(self, tokens: int, regions: Sequence[Run] = ()) -> None: ...
    def expect(self, tokens: int) -> None: ...
    def begin(self, tokens: int, regions: Sequence[Run] = ()) -> None: ...
    def slots(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]: ...
    def rows(self, stop: int) -> Rows: ...
    def commit(self, token_ids: NDArray[np.int32] | None = None, *, steps: int = 0) -> None: ...
    def observe(self, mass: NDArray[np.float32], audit: Audit | None = None) -> None: ...
    def end(self) -> None: ...
    def rollback(self, length: int) -> None: ...
    def crop(self, length: int) -> None: ...
    def fork(self) -> PagedSession: ...
    def close(self) -> None: ...


class NewTokens(NamedTuple):
    """A row of the batch that takes part in this forward."""

    session: PagedSession
    row: int  # of the batch
    tokens: int  # new tokens, pads not counted
    columns: NDArray[np.int64] | None  # where they lie among the forward's columns; None: everywhere
    regions: Sequence[Run] = ()  # of those that no label names


class Step(Protocol):
    """`layer` counts paged layers; K/V are `[batch, kv_heads, columns, head_dim]`."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None: ...

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float,
        softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """query `[batch, q_heads, columns, head_dim]` -> `[batch, columns, q_heads, head_dim]`, the query's dtype."""
        ...

    def leave(self) -> None:
        """Every layer has attended: what was added up begins to leave the device. Does not wait."""
        ...

    @property
    def arrived(self) -> bool:
        """What was added up can be read without waiting for a device."""
        ...

    def masses(self) -> list[NDArray[np.float32]]:
        """For each row of the step `[session.length]`: shares of attention averaged over heads and layers, 1 in all
        with what sinks took.

        A token of a cold page has its share of the page's estimate; NaN where nothing is known.
        """
        ...

    def estimates(self) -> list[Estimates]:
        """For each row: its cold pages with a digest, as the last query would attend them."""
        ...

    def audits(self) -> list[Audit | None]:
        """For each row, where the step is an audit: what its last query attended, and what it would have."""
        ...


class DecodeStep:
    """One new token a row, written before it is attended."""

    def __init__(
        self, attention: PagedAttention, rows: Sequence[NewTokens], batch: int, looks: Looks = NOTHING
    ) -> None:
        self._attention = attention
        self._pool = rows[0].session.pool
        self._subset = None if len(rows) == batch else Picked([new.row for new in rows])
        sessions = [new.session for new in rows]
        slots = [session.slots(session.length - 1, session.length) for session in sessions]
        tables = [session.rows(session.length) for session in sessions]
        if len(rows) == 1:
            (self._offsets, self._slots), table = slots[0], tables[0]
            self._bases, total, starts = [0], sessions[0].length, table.starts
            edges = np.array((0, len(table.offsets)), np.int64)
            self._pages = Pages(table.offsets, table.kinds, table.counts, starts, edges, total)
        else:
            self._offsets = np.concatenate([offsets for offsets, _ in slots])
            self._slots = np.concatenate([slot for _, slot in slots])
            lengths = [session.length for session in sessions]
            self._bases = np.concatenate(([0], np.cumsum(lengths)[:-1])).tolist()
            self._pages = Pages(
                np.concatenate([table.offsets for table in tables]),
                np.concatenate([table.kinds for table in tables]),
                np.concatenate([table.counts for table in tables]),
                np.concatenate(
                    [table.starts + base for table, base in zip(tables, self._bases, strict=True)]
                ),
                np.concatenate(([0], np.cumsum([len(table.offsets) for table in tables]))),
                sum(lengths),
            )
        self._audits, self._sampled = looks.audit, None if looks.audit else looks.layers
        self._lengths = [session.length for session in sessions]
        masses = looks.masses or looks.audit
        self._tally = Tally(attention)
        self._mass = self._tally.zeros(self._pool, self._pages.total_tokens) if masses else None
        self._cold = look_at_cold(sessions, self._lengths, self._bases, looks, self._tally)
        self._layers = 0

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        keys, values = keys[:, :, 0], values[:, :, 0]
        if self._subset is not None:
            there = self._subset.on(keys.device)
            keys, values = keys[there], values[there]
        self._attention.write(self._pool, layer, self._offsets, self._slots, keys, values)

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float,
        softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        subset = None if self._subset is None else self._subset.on(query.device)
        asked = query[:, :, 0] if subset is None else query[subset, :, 0]
        cold, seen = (None, None) if self._cold is None else (self._cold.cold, self._cold.seen)
        looked = self._sampled is None or layer in self._sampled
        out = self._attention.decode(
            asked, self._pool, self._pages, layer, scale, None, self._mass if looked else None, cold, seen,
            softcap, sinks,
        ).out  # fmt: skip
        self._layers += looked
        if subset is None:
            return out.to(query.dtype).unsqueeze(1)
        full = query.new_zeros(query.shape[0], 1, *out.shape[1:])
        full[subset, 0] = out.to(query.dtype)
        return full

    def leave(self) -> None:
        self._tally.leave()

    @property
    def arrived(self) -> bool:
        return self._tally.leave().arrived

    def masses(self) -> list[NDArray[np.float32]]:
        if self._mass is None or not self._layers:
            return []
        mass, covered = _mean(self._tally.read(self._mass), self._layers), _covered(self._pages)
        if self._cold is None:
            mass[~covered] = np.nan
            return np.split(mass, self._bases[1:])
        parts = zip(np.split(mass, self._bases[1:]), np.split(covered, self._bases[1:]), strict=True)
        return [self._cold.spread(row, *part) for row, part in enumerate(parts)]

    def estimates(self) -> list[Estimates]:
        return [] if self._cold is None else self._cold.estimates()

    def audits(self) -> list[Audit | None]:
        if not self._audits or self._mass is None:
            return []
        if self._cold is None:
            return [WHOLE] * len(self._lengths)
        mass, kinds = _mean(self._tally.read(self._mass), self._layers), self._pages.kinds
        sums, sunk = _sums(mass, self._pages), [sunk_of(part) for part in np.split(mass, self._bases[1:])]
        edges = itertools.pairwise(self._pages.row_starts.tolist())
        return [
            self._cold.audit(
                row, self._lengths[row], sums[first:last], kinds[first:last], self._layers, sunk[row]
            )
            for row, (first, last) in enumerate(edges)
        ]


class PrefillStep:
    """Many new tokens: each row attends its earlier pages and, causally, its own new tokens. Pads attend nothing.

    `rows` is empty where every new column is padding (the first slice of a batch padded to some multiple).
    """

    def __init__(self, attention: PagedAttention, rows: Sequence[NewTokens], looks: Looks = NOTHING) -> None:
        self._attention = attention
        self._pools = [new.session.pool for new in rows]
        self._rows = rows
        self._columns = [None if new.columns is None else Picked(new.columns) for new in rows]
        self._tally = Tally(attention)
        self._slots = [new.session.slots(new.session.length - new.tokens, new.session.length) for new in rows]
        self._pages: list[Pages] = []
        self._cold: list[ColdLook | None] = []
        for new in rows:
            past = new.session.length - new.tokens
            exact = look_at_exact(new.session, past, looks, self._tally)
            table: Rows = new.session.rows(past) if exact is None else exact[0]
            edges = np.array((0, len(table.offsets)), np.int64)
            self._pages.append(Pages(table.offsets, table.kinds, table.counts, table.starts, edges, past))
            cold = look_at_cold([new.session], [past], [0], looks, self._tally) if exact is None else exact[1]
            self._cold.append(cold)
        self._audits, self._sampled = looks.audit, None if looks.audit else looks.layers
        masses = looks.masses or looks.audit
        self._mass = (
            [self._tally.zeros(new.session.pool, new.session.length) for new in rows] if masses else None
        )
        self._layers = 0

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for index, (new, columns) in enumerate(zip(self._rows, self._columns, strict=True)):
            offsets, slots = self._slots[index]
            row_keys, row_values = (
                _pick(heads[new.row], columns).transpose(0, 1) for heads in (keys, values)
            )
            self._attention.write(self._pools[index], layer, offsets, slots, row_keys, row_values)

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float,
        softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        batch, heads, columns, head_dim = query.shape
        result = query.new_zeros(batch, columns, heads, head_dim)
        looked = self._sampled is None or layer in self._sampled
        for index, (new, picked, pages, look) in enumerate(
            zip(self._rows, self._columns, self._pages, self._cold, strict=True)
        ):
            row = new.row
            cold, seen = (None, None) if look is None else (look.cold, look.seen)
            out = self._attention.prefill(
                _pick(query[row], picked), _pick(keys[row], picked), _pick(values[row], picked),
                self._pools[index], pages, layer, scale,
                self._mass[index] if looked and self._mass is not None else None,
                min(new.session.observing.queries, new.tokens), cold, seen,
                softcap, sinks,
            ).out.transpose(0, 1).to(query.dtype)  # fmt: skip
            if picked is None:
                result[row] = out
            else:
                result[row, picked.on(out.device)] = out
        self._layers += looked
        return result

    def leave(self) -> None:
        self._tally.leave()

    @property
    def arrived(self) -> bool:
        return self._tally.leave().arrived

    def masses(self) -> list[NDArray[np.float32]]:
        if self._mass is None or not self._layers:
            return []
        masses = []
        for sums, pages, look in zip(self._mass, self._pages, self._cold, strict=True):
            mass, covered = _mean(self._tally.read(sums), self._layers), np.ones(len(sums), np.bool_)
            covered[: pages.total_tokens] = _covered(pages)
            if look is None:
                mass[~covered] = np.nan
            masses.append(mass if look is None else look.spread(0, mass, covered))
        return masses

    def estimates(self) -> list[Estimates]:
        found = []
        for index, look in enumerate(self._cold):
            if look is None:
                found.append(NO_ESTIMATES)
                continue
            known = self._mass is not None and self._layers > 0
            mass = _mean(self._tally.read(self._mass[index]), self._layers) if known and self._mass else None
            found.append(look.estimates(0.0 if mass is None else look.in_hbm(0, mass))[0])
        return found

    def audits(self) -> list[Audit | None]:
        if not self._audits or self._mass is None:
            return []
        found: list[Audit | None] = []
        for new, mass, pages, look in zip(self._rows, self._mass, self._pages, self._cold, strict=True):
            if look is None:
                found.append(WHOLE)
                continue
            mean = _mean(self._tally.read(mass), self._layers)
            sums = np.append(_sums(mean, pages), mean[pages.total_tokens :].sum())
            kinds = np.append(pages.kinds, np.int8(Kind.EXACT))  # the chunk's own tokens, as one more page
            found.append(look.audit(0, new.session.length, sums, kinds, self._layers, sunk_of(mean)))
        return found


class Picked:
    """Some rows or columns of a batch, on whichever device they are first asked for: copied once a step."""

    def __init__(self, places: Sequence[int] | NDArray[np.int64]) -> None:
        self._places = torch.from_numpy(np.asarray(places, np.int64))

    def on(self, device: torch.device) -> torch.Tensor:
        if self._places.device != device:
            self._places = self._places.to(device, non_blocking=True)
        return self._places


def _pick(heads: torch.Tensor, columns: Picked | None) -> torch.Tensor:
    """`[heads, columns, head_dim]`, only the given columns."""
    return heads if columns is None else heads.index_select(1, columns.on(heads.device))


def _mean(mass: NDArray[np.float32], layers: int) -> NDArray[np.float32]:
    return mass * np.float32(1 / layers)


def _sums(mass: NDArray[np.float32], pages: Pages) -> NDArray[np.float32]:
    """`[pages]`: the mass of each page's tokens."""
    ends = np.concatenate(([0.0], np.cumsum(mass, dtype=np.float64)))
    sums: NDArray[np.float32] = (ends[pages.token_starts + pages.counts] - ends[pages.token_starts]).astype(
        np.float32
    )
    return sums


def _covered(pages: Pages) -> NDArray[np.bool_]:
    """`[total_tokens]`: which tokens lie in an attendable page."""
    edges = np.zeros(pages.total_tokens + 1, np.int32)
    np.add.at(edges, pages.token_starts, 1)
    np.add.at(edges, pages.token_starts + pages.counts, -1)
    covered: NDArray[np.bool_] = np.cumsum(edges[:-1]) > 0
    return covered


__all__ = [
    "DecodeStep",
    "Looks",
    "NewTokens",
    "PagedSession",
    "PrefillStep",
    "Rows",
    "Step",
]
