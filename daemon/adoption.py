"""A new owner takes over what workers of the last one still hold.

Workers keep their HBM mapping and their page tables; on re-attach they hand both back. The brain claims every offset
that a table names. Until the last worker that could hold pages has re-attached or is known dead (`AdoptionEnded`), no
memory is given out: bytes that nobody has claimed yet may still be somebody's. Scores start anew; bytes do not move.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tierkv.daemon.allocator import PoolAllocator, SizeClass, aligned
from tierkv.daemon.pages import Guard, Ladder
from tierkv.daemon.sessions import Model, Session
from tierkv.daemon.state import State
from tierkv.errors import RequestError
from tierkv.geometry import Geometry
from tierkv.protocol import PageEntry, SessionState
from tierkv.regions import Region, parse_region
from tierkv.table import NOWHERE, Kind


class Adoption:
    def __init__(self, state: State) -> None:
        self._state = state
        self.pending = True
        """No memory may be given out yet."""

    def end(self) -> None:
        self.pending = False

    def adopt(
        self, client: str, handed: SessionState, ladder: Callable[[str], Ladder],
        pins: Callable[[dict[str, str] | None], dict[Region, Guard]],
    ) -> None:  # fmt: skip
        """Rebuild one session from its worker's table. Raises `RequestError` when it claims what is not free."""
        state, table, fields = self._state, handed.table, handed.geometry
        if table.session in state.sessions:
            return  # the worker attached twice to the same owner
        geometry = Geometry(
            fields.num_layers, fields.num_kv_heads, fields.head_dim, fields.dtype, fields.page_tokens
        )
        model = state.register_model(handed.model_id, geometry)
        if model.state_bytes and model.state_offset == NOWHERE and table.codec_state != NOWHERE:
            if not state.hbm.claim_block(table.codec_state, aligned(model.state_bytes)):
                raise RequestError(f"codec state at {table.codec_state} is not free in the adopted pool")
            model.state_offset = model.state = table.codec_state
        session = Session(
            table.session, client, model, handed.options, ladder(handed.options.ladder), pins(handed.options.pins),
            state.policy.new_state(), {table.session}, version=table.version, acked=table.version, step=handed.step,
        )  # fmt: skip
        session.active_at = state.now
        state.sessions[session.id] = session
        state.clients[client].sessions.add(session.id)
        model.sessions.add(session.id)
        for row, entry in enumerate(table.pages):
            is_open = table.tail_open and row == len(table.pages) - 1
            self._adopt_page(session, entry, sealed=not is_open)
        for blank in table.blanks:
            slot = self._claim(session, PageEntry(blank.page, 0, 0, Kind.EXACT, blank.offset))
            session.blanks.append(slot)
        session.tail_open = table.tail_open
        if session.length != table.length:
            raise RequestError(
                f"session {session.id} hands back {session.length} tokens and says {table.length}"
            )

    def _adopt_page(self, session: Session, entry: PageEntry, sealed: bool) -> None:
        state, pages = self._state, self._state.pages
        if entry.page in pages.index:
            slot = pages.index[entry.page]
            state.share(slot, session)
            session.family |= state.sessions[int(pages.owner[slot])].family
            for member in session.family:
                state.sessions[member].family = session.family
        else:
            slot = self._claim(session, entry)
        region = parse_region(entry.region)
        pages.region[slot], pages.sealed[slot] = region, sealed
        pages.count[slot] = max(int(pages.count[slot]), entry.count)
        if sealed:
            pages.pin[slot] = max(int(pages.pin[slot]), session.region_pins.get(region, Guard.NONE))
        session.pages.append(slot)
        session.starts.append(session.length)
        session.counts.append(entry.count)
        session.length += entry.count
        session.tokens.append(np.full(entry.count, region, np.int8), session.step)

    def _claim(self, session: Session, entry: PageEntry) -> int:
        state, model = self._state, session.model
        slot = state.pages.add(entry.page, model.index, session.id, NOWHERE, int(session.ladder))
        if entry.kind != Kind.NONE:
            replica = "quant" if entry.kind == Kind.QUANTIZED else "exact"
            self._take(state.hbm, _size(model, entry.kind), entry.offset, entry.page)
            getattr(state.pages, replica)[slot] = entry.offset
            state.pages.kind[slot] = entry.kind
        if entry.host_kind != Kind.NONE:
            self._take(state.host, _size(model, entry.host_kind), entry.host_offset, entry.page)
            state.pages.host[slot], state.pages.host_kind[slot] = entry.host_offset, entry.host_kind
            state.pages.checksum[slot] = entry.host_checksum
        return slot

    def _take(self, pool: PoolAllocator, size_class: SizeClass, offset: int, page: int) -> None:
        if not pool.claim(size_class, offset):
            raise RequestError(
                f"page {page:#x} claims bytes at {offset} that are not free in the adopted pool"
            )


def _size(model: Model, kind: int) -> SizeClass:
    return model.quant if kind == Kind.QUANTIZED else model.exact
