"""A new owner takes over what workers of the last one still hold.

Workers keep their HBM mapping and their page tables; on re-attach they hand both back. The brain claims every offset
that a table names. Until the last worker that could hold pages has re-attached or is known dead (`AdoptionEnded`), no
memory is given out: bytes that nobody has claimed yet may still be somebody's. Scores start anew; bytes do not move.
"""

from __future__ import annotations

import numpy as np

from tierkv.daemon.allocator import aligned
from tierkv.daemon.model_states import reserve
from tierkv.daemon.pages import Guard, Ladder
from tierkv.daemon.sessions import Model, Session
from tierkv.daemon.state import State
from tierkv.errors import RequestError
from tierkv.geometry import Geometry
from tierkv.prefetch.deviation import DEVIATION
from tierkv.prefetch.digest_forms import describes
from tierkv.prefetch.digest_forms import get as get_form
from tierkv.prefetch.digests import DigestForm
from tierkv.protocol import PageEntry, SessionState, TableState
from tierkv.regions import Region, parse_region
from tierkv.table import NOWHERE, Kind

Lost = tuple[int, int, int]
"""(session, first token, stop token)."""


class Adoption:
    def __init__(self, state: State) -> None:
        self._state = state
        self.pending = True
        """No memory may be given out yet."""

    def end(self) -> None:
        """Unclaimed memory is free from now on. Models whose codec state was still unfitted get room for one."""
        self.pending = False
        for model in self._state.models.values():
            reserve(self._state, model)

    def adopt(
        self, client: str, handed: SessionState, ladder: Ladder, pins: dict[Region, Guard]
    ) -> list[Lost]:
        """Rebuild one session from its worker's table; returns what no replica holds.

        Raises:
            RequestError: the table contradicts itself; nothing is claimed then.
        """
        state, table, fields = self._state, handed.table, handed.geometry
        if table.session in state.sessions:
            return []  # the worker attached twice to the same owner
        geometry = Geometry(
            fields.num_layers, fields.num_kv_heads, fields.head_dim, fields.dtype, fields.page_tokens
        )
        _check(table, geometry, state.middle is not None)
        model = self._model(handed, geometry)
        self._claim_codec_state(model, table.codec_state)
        session = Session(
            table.session, client, model, handed.options, ladder, pins, state.policy.new_state(), {table.session},
            version=table.version, acked=table.version, step=handed.step, active_at=state.now,
        )  # fmt: skip
        state.enroll(session)
        lost = []
        for row, entry in enumerate(table.pages):
            is_open = table.tail_open and row == len(table.pages) - 1
            start = session.length
            if not self._adopt_page(session, entry, sealed=not is_open):
                lost.append((session.id, start, start + entry.count))
        for blank in table.blanks:
            slot = state.pages.add(blank.page, model.index, session.id, NOWHERE, int(session.ladder))
            self._claim(model, slot, PageEntry(blank.page, 0, 0, Kind.EXACT, blank.offset))
            session.blanks.append(slot)
        session.tail_open = table.tail_open
        return lost

    def _model(self, handed: SessionState, geometry: Geometry) -> Model:
        """That of sessions that share the table's pages (always its first one, too): they read them by one state."""
        state, table = self._state, handed.table
        form = self._digest_form(handed, geometry)
        if table.pages and table.pages[0].page in state.pages.index:
            slot = state.pages.index[table.pages[0].page]
            model = state.model_of(slot)
            if (model.model_id, model.geometry) == (handed.model_id, geometry):
                return model
        return state.register_model(handed.model_id, geometry, form)

    def _digest_form(self, handed: SessionState, geometry: Geometry) -> DigestForm:
        """The form that the session's digests have, whatever this owner would choose: their state lies in HBM and is
        not fitted anew. Where it does not, there are no digests yet, and a form that cannot be fitted here is given up.
        """
        state, table = self._state, handed.table
        try:
            form = get_form(table.digest)
        except ValueError as error:
            raise RequestError(f"session {table.session}: {error}") from None
        known = state.config.digest_models
        fitted = table.codec_state != NOWHERE or any(
            describes(about, handed.model_id, geometry) for about in known
        )
        keeps = bool(state.config.digest_share) and (fitted or not form.state_floats(geometry))
        return form if keeps else DEVIATION

    def _claim_codec_state(self, model: Model, offset: int) -> None:
        state = self._state
        if model.state_bytes and model.state_offset == NOWHERE and offset != NOWHERE:
            if not state.hbm.claim_block(offset, aligned(model.state_bytes)):
                raise RequestError(f"codec state at {offset} is not free in the adopted pool")
            model.state_offset = model.state = offset

    def _adopt_page(self, session: Session, entry: PageEntry, sealed: bool) -> bool:
        """False when a page that had a replica has none now."""
        state, pages = self._state, self._state.pages
        if entry.page in pages.index:
            slot = pages.index[entry.page]
            state.share(slot, session)
            session.family |= state.sessions[int(pages.owner[slot])].family
            for member in session.family:
                state.sessions[member].family = session.family
        else:
            slot = pages.add(entry.page, session.model.index, session.id, NOWHERE, int(session.ladder))
        whole = self._claim(session.model, slot, entry)
        region = Region(entry.region)
        pages.region[slot], pages.sealed[slot] = region, sealed
        pages.count[slot] = max(int(pages.count[slot]), entry.count)
        if sealed:
            pages.pin[slot] = max(int(pages.pin[slot]), session.region_pins.get(region, Guard.NONE))
        session.pages.append(slot)
        session.starts.append(session.length)
        session.counts.append(entry.count)
        session.length += entry.count
        session.tokens.append(np.full(entry.count, region, np.int8), session.step)
        if not whole:
            state.touch(slot)
        return whole or bool(pages.kind[slot]) or bool(pages.host_kind[slot])

    def _claim(self, model: Model, slot: int, entry: PageEntry) -> bool:
        """Take the replicas that one worker reads; False when any of them could not be had.

        Sharers may have adopted different plans of the last owner. Each keeps what it reads until it has acknowledged:
        the best form wins, and a second replica of the same form retires at once.
        """
        state, pages = self._state, self._state.pages
        whole = True
        if entry.kind != Kind.NONE:
            column, size_class = pages.replica(Kind(entry.kind)), model.form(entry.kind)
            if column[slot] != entry.offset:
                whole = state.hbm.claim(size_class, entry.offset)
                if whole and column[slot] != NOWHERE:
                    state.retire("hbm", size_class, entry.offset, slot)
                elif whole:
                    column[slot] = entry.offset
            held = [form for form in model.forms if pages.replica(form)[slot] != NOWHERE]
            if held:
                pages.kind[slot] = held[0]
        if entry.host_kind != Kind.NONE and pages.host[slot] != entry.host_offset:
            size_class = model.form(entry.host_kind)
            if not state.host.claim(size_class, entry.host_offset):
                whole = False
            elif pages.host[slot] != NOWHERE:
                state.retire("host", size_class, entry.host_offset, slot)
            else:
                pages.host[slot], pages.host_kind[slot] = entry.host_offset, entry.host_kind
                pages.checksum[slot] = entry.host_checksum
        self._claim_digest(model, slot, entry)
        if state.sharing.get(slot):
            state.touch(slot)
        return whole

    def _claim_digest(self, model: Model, slot: int, entry: PageEntry) -> None:
        """Keep the digest of a page that is cold for everybody; one that cannot be had is made again later."""
        state, pages = self._state, self._state.pages
        if entry.kind == Kind.NONE and entry.digest not in (NOWHERE, int(pages.digest[slot])):
            if not state.config.digest_share or not state.hbm.claim(model.digest, entry.digest):
                state.touch(slot)
            elif pages.digest[slot] == NOWHERE:
                pages.digest[slot] = entry.digest
            else:
                state.retire("hbm", model.digest, entry.digest, slot)
        if pages.kind[slot] != Kind.NONE and pages.digest[slot] != NOWHERE:
            state.retire("hbm", model.digest, int(pages.digest[slot]), slot)
            pages.digest[slot] = NOWHERE


def _check(table: TableState, geometry: Geometry, has_middle: bool) -> None:
    kinds = {kind.value for kind in Kind if has_middle or kind is not Kind.MIDDLE}
    for entry in table.pages:
        parse_region(entry.region)
        if (
            entry.kind not in kinds
            or entry.host_kind not in kinds
            or not 1 <= entry.count <= geometry.page_tokens
        ):
            raise RequestError(f"page {entry.page:#x} of session {table.session} is not a page: {entry}")
    names = [entry.page for entry in table.pages] + [blank.page for blank in table.blanks]
    if len(set(names)) != len(names):
        raise RequestError(f"session {table.session} names a page twice")
    tokens = sum(entry.count for entry in table.pages)
    if tokens != table.length:
        raise RequestError(f"session {table.session} hands back {tokens} tokens and says {table.length}")
