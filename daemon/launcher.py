"""Starts moves: the source is pinned, the destination reserved and the mover told.

A method that finds no room starts nothing and returns False.
"""

from __future__ import annotations

from tierkv.daemon.acts import ENCODES, PACKS, Act
from tierkv.daemon.allocator import SizeClass
from tierkv.daemon.events import Copy, FitCodec, Quantize, RequestToken, Summarize
from tierkv.daemon.flights import Flights
from tierkv.daemon.framing import may_take_frame
from tierkv.daemon.hostroom import HostRoom
from tierkv.daemon.sessions import Model
from tierkv.daemon.state import Pool, State
from tierkv.table import NOWHERE, Kind


class Launcher:
    def __init__(self, state: State, flights: Flights, room: HostRoom) -> None:
        self._state = state
        self._flights = flights
        self._room = room

    def backup(self, slot: int) -> bool:
        """Copy the exact replica to host. False when host has no room, or a replica already."""
        pages = self._state.pages
        copied = pages.host[slot] != NOWHERE or self._flights.running(slot, Act.BACKUP)
        if copied or pages.exact[slot] == NOWHERE:
            return False
        return self.copy(slot, Act.BACKUP, "hbm", int(pages.exact[slot]), "host", Kind.EXACT)

    def encode(self, slot: int, form: Kind = Kind.QUANTIZED) -> bool:
        """Make a packed replica in HBM. False when there is no room for it."""
        return not self._state.pages.refused[slot] and self.quantize(slot, ENCODES[form], "hbm", form)

    def compress(self, slot: int) -> bool:
        """Replace a cold page's exact host replica by its low-bit form (flagged lossy)."""
        if self._state.pages.refused[slot]:
            return False
        return self.quantize(slot, Act.COMPRESS, "host", Kind.QUANTIZED)

    def digest(self, slot: int) -> bool:
        """Make the digest of a page whose host replica exists. False when digests are off or have no room."""
        state, pages, model = self._state, self._state.pages, self._state.model_of(slot)
        if not (state.hbm.free_items(model.digest) or state.kept_for_digests(model)):
            return False
        floats = model.digest_form.state_floats(model.geometry)
        if (pages.host_kind[slot] == Kind.QUANTIZED or floats) and not model.ready:
            return False
        if not state.may_hold_digest(state.sessions.get(int(pages.owner[slot]))):
            return False
        destination = state.hbm.allocate(model.digest)
        if destination is None:
            return False
        move = self._flights.take_off(slot, Act.DIGEST, "hbm", model.digest, destination)
        layers = model.digest_form.shape(model.geometry, state.config.digest_layers).layers
        source = (int(pages.host[slot]), int(pages.host_kind[slot]), int(pages.checksum[slot]))
        state.out.append(
            Summarize(
                move.number, model.geometry, layers, int(pages.count[slot]), *source, model.state, destination,
                int(pages.id[slot]), model.digest_form.name,
            )
        )  # fmt: skip
        return True

    def pack(self, slot: int, form: Kind) -> bool:
        """Copy the replica of a packed form to host as it is."""
        source = int(self._state.pages.replica(form)[slot])
        return self.copy(slot, PACKS[form], "hbm", source, "host", form)

    def fork(self, slot: int, child: int, request: RequestToken) -> bool:
        """Copy the open page for a forked session; `child` is the new page's slot (its exact frame is reserved)."""
        state, pages, model = self._state, self._state.pages, self._state.model_of(slot)
        move = self._flights.take_off(
            slot, Act.FORK, "hbm", model.exact, int(pages.exact[child]), others=(child,), request=request
        )
        source, size, key = int(pages.exact[slot]), model.geometry.page_bytes, int(pages.id[child])
        state.out.append(Copy(move.number, "hbm", source, 0, "hbm", move.destination, size, key))
        return True

    def fit(self, model: Model, slots: list[int]) -> None:
        """Fit the model's state; `slots` are exact pages that it may be fitted from."""
        state, pages = self._state, self._state.pages
        model.fitting = True
        size = SizeClass(model.state_bytes, model.state_bytes)
        move = self._flights.take_off(
            slots[0], Act.FIT, "hbm", size, model.state_offset, others=tuple(slots[1:])
        )
        offsets = tuple(int(pages.exact[slot]) for slot in slots)
        counts = tuple(int(pages.count[slot]) for slot in slots)
        state.out.append(
            FitCodec(
                move.number, model.geometry, offsets, counts, model.state_offset, model.model_id,
                model.digest_form.name,
            )
        )  # fmt: skip

    def copy(
        self, slot: int, act: Act, src_pool: Pool, src: int, dst_pool: Pool, form: Kind
    ) -> bool:  # fmt: skip
        """Copy a replica of `form` at `src`, in the same form, as `act`."""
        state, pages, model = self._state, self._state.pages, self._state.model_of(slot)
        size, size_class = state.page_bytes(model, form), model.form(form)
        destination = self._reserve(dst_pool, form, slot)
        if destination is None:
            return False
        move = self._flights.take_off(slot, act, dst_pool, size_class, destination)
        checksum = int(pages.checksum[slot]) if src_pool == "host" else 0
        key = int(pages.id[slot])
        state.out.append(Copy(move.number, src_pool, src, checksum, dst_pool, destination, size, key))
        self._flights.charge(move, size)
        return True

    def _exact_source(self, slot: int) -> tuple[Pool, int] | None:
        """Where exact bytes of the page lie. Nothing else is ever encoded, so losses cannot add up."""
        pages = self._state.pages
        if pages.exact[slot] != NOWHERE:
            return "hbm", int(pages.exact[slot])
        return ("host", int(pages.host[slot])) if pages.host_kind[slot] == Kind.EXACT else None

    def quantize(self, slot: int, act: Act, dst_pool: Pool, form: Kind) -> bool:
        """Encode the page's exact bytes into a packed `form`, as `act`."""
        state, pages, model = self._state, self._state.pages, self._state.model_of(slot)
        source = self._exact_source(slot)
        if source is None or (form is Kind.QUANTIZED and not model.ready):
            return False
        src_pool, src = source
        destination = self._reserve(dst_pool, form, slot)
        if destination is None:
            return False
        move = self._flights.take_off(slot, act, dst_pool, model.form(form), destination)
        checksum = int(pages.checksum[slot]) if src_pool == "host" else 0
        count, key = int(pages.count[slot]), int(pages.id[slot])
        where = (src_pool, src, checksum, dst_pool, destination)
        state.out.append(Quantize(move.number, model.geometry, model.state, count, *where, key, form))
        self._flights.charge(move, model.geometry.page_bytes)
        return True

    def _reserve(self, pool: Pool, form: Kind, slot: int) -> int | None:
        state, model = self._state, self._state.model_of(slot)
        if pool == "host":
            return self._room.allocate(model.form(form), slot, self.compress)
        return state.hbm.allocate(model.form(form)) if may_take_frame(state, model, form) else None
