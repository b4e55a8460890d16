"""What the brain remembers, and the few primitive changes that keep it coherent.

Three rules live here. *Touch*: a replica change is told to every session that names the page. *Retire*: memory that
a worker could still read is reused only after every session that names the page has acknowledged a later table
version. *Discard*: memory that nobody names any more is free at once, unless a move still reads or writes it.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon.absence import Absence
from tierkv.daemon.allocator import PoolAllocator, SizeClass, aligned
from tierkv.daemon.brain_config import BrainConfig
from tierkv.daemon.counters import Counters
from tierkv.daemon.digest_choice import chosen_form
from tierkv.daemon.events import Instruction, SendPlan
from tierkv.daemon.middle import middle_below, middle_class, middle_codec
from tierkv.daemon.pages import Guard, Ladder, Outcome, PageStore
from tierkv.daemon.policy import get as get_policy
from tierkv.daemon.sessions import Client, Model, Session
from tierkv.daemon.waste import Waste
from tierkv.errors import BudgetTooSmall, ConfigError, GeometryMismatch, UnknownSession
from tierkv.geometry import Geometry, fingerprint
from tierkv.prefetch.digests import DigestForm
from tierkv.protocol import BlankPage, PageChange, PageEntry, Plan, TableState
from tierkv.quant import get as get_codec
from tierkv.regions import Region
from tierkv.table import NOWHERE, Kind

Pool = Literal["hbm", "host"]
PAGE_ID_EPOCH_SHIFT = 40
"""Page ids are `epoch << 40 | n`, so that an adopting owner never gives out an id that a worker holds."""

SESSIONS_NAMED = 8
"""Open sessions that an error names."""


class Retirement(NamedTuple):
    """Memory that waits for sessions to acknowledge; `waits` shrinks as they do."""

    pool: Pool
    size_class: SizeClass
    offset: int
    waits: set[int]
    whole_frame: bool


class State:
    """The brain's memory. Owned by one thread: the one that calls `Brain.handle`."""

    def __init__(self, config: BrainConfig) -> None:
        self.config = config
        self.codec = get_codec(config.codec)
        self.middle = middle_codec(config.middle) if config.middle else None
        self.policy = get_policy(config.policy) if isinstance(config.policy, str) else config.policy
        self.thresholds = config.thresholds or self.policy.thresholds
        self.middle_below = middle_below(config.middle_below, self.thresholds)
        self.pages = PageStore()
        self.sessions: dict[int, Session] = {}
        self.budgeted: set[int] = set()  # sessions with a budget of their own
        self.absent: dict[int, Absence] = {}  # paused sessions
        self.clients: dict[str, Client] = {}
        self.models: dict[str, Model] = {}
        self.hbm = PoolAllocator(config.hbm_bytes)
        self.host = PoolAllocator(config.host_bytes)
        self.retirements: dict[int, Retirement] = {}
        self.retiring_frames = 0  # HBM bytes of whole frames among them
        self.retiring_host = 0  # host bytes among them
        self.retiring_items = Counter[SizeClass]()  # low-bit slots in HBM among them
        self.sharing: dict[int, set[int]] = {}  # slots named by several sessions -> those sessions
        self.dirty: set[int] = set()  # sessions with a plan to send
        self.quiet: set[int] = set()  # sessions whose plan may wait for the next tick (host replicas only)
        self.counters = Counters()
        self.waste = Waste(config.waste_limit)
        self.out: list[Instruction] = []
        self.now = 0.0
        self.draining = False
        self._model_index = 0
        self._next_page = 1
        self._next_session = 1
        self._next_retirement = 1
        self.models_by_index: dict[int, Model] = {}

    # Names ---------------------------------------------------------------------------------------------------

    def pool(self, name: Pool) -> PoolAllocator:
        return self.hbm if name == "hbm" else self.host

    def session(self, session: int, client: str) -> Session:
        """The client's session; raises `UnknownSession` (also for another client's)."""
        found = self.sessions.get(session)
        if found is None or found.client != client:
            raise UnknownSession(f"session {session} is not open for this worker; open one first")
        return found

    def any_session(self, session: int) -> Session:
        """The session, whoever has it; raises `UnknownSession`, which names some that are open."""
        found = self.sessions.get(session)
        if found is None:
            some = ", ".join(str(number) for number in list(self.sessions)[-SESSIONS_NAMED:])
            more = (
                f" ({len(self.sessions)} are; these are the latest)"
                if len(self.sessions) > SESSIONS_NAMED
                else ""
            )
            raise UnknownSession(f"session {session} is not open; open: {some or 'none'}{more}")
        return found

    def new_page_id(self) -> int:
        page = self.config.epoch << PAGE_ID_EPOCH_SHIFT | self._next_page
        self._next_page += 1
        return page

    def new_session_id(self) -> int:
        """Unique among owners too: adopted sessions keep the ids of an earlier epoch."""
        session = self.config.epoch << PAGE_ID_EPOCH_SHIFT | self._next_session
        self._next_session += 1
        return session

    def model_of(self, slot: int) -> Model:
        return self.models_by_index[int(self.pages.model[slot])]

    def sharers(self, slot: int) -> set[int]:
        """Sessions that name the page."""
        return self.sharing.get(slot) or {int(self.pages.owner[slot])}

    def owner_of(self, slot: int) -> Session | None:
        """The session that owns the page, if it is still open."""
        return self.sessions.get(int(self.pages.owner[slot]))

    def count_outcome(self, outcome: str, session: Session | None, pages: int = 1) -> None:
        """Pages that attention was expected on: used, late, wasted or cancelled."""
        self.counters.prefetched[outcome] += pages
        if session is not None:
            session.ledger.prefetched[outcome] += pages

    # Models --------------------------------------------------------------------------------------------------

    def register_model(self, model_id: str, geometry: Geometry, digest: DigestForm | None = None) -> Model:
        """The model of this id and geometry, new or known.

        Args:
            digest: the form of its digests; by default what the configuration and calibrations say.

        Raises:
            GeometryMismatch: its pages hold another number of tokens than this daemon's.
            BudgetTooSmall: the pool does not hold two of its pages.
            ConfigError: the codec cannot pack them, the middle form saves nothing, or its digests need a calibration.
        """
        digest = digest or chosen_form(self.config, model_id, geometry)
        forms = f"{self.config.codec}, {self.config.middle}" if self.config.middle else self.config.codec
        key = fingerprint(geometry, model_id, f"{forms}, {digest.name}")
        if key in self.models:
            return self.models[key]
        if geometry.page_tokens != self.config.page_tokens:
            raise GeometryMismatch(
                f"pages of {geometry.page_tokens} tokens; this daemon's pages hold {self.config.page_tokens}"
            )
        frame, packed = aligned(geometry.page_bytes), self.codec.page_bytes(geometry)
        if packed > frame:
            raise ConfigError(
                f"a page of {self.codec.name} takes {packed:,} bytes, more than the {frame:,} of an exact one: "
                "let fewer layers be exact"
            )
        quant = SizeClass(frame, min(frame, aligned(packed)))
        middle = None if self.middle is None else middle_class(self.middle, geometry, quant)
        if 2 * frame > self.hbm.size:
            raise BudgetTooSmall(
                f"the HBM pool of {self.hbm.size:,} bytes holds {self.hbm.size // frame} pages of {frame:,} bytes; "
                "two are the least: start the daemon with a larger --hbm"
            )
        self._model_index += 1
        model = Model(
            key, self._model_index, model_id, geometry,
            exact=SizeClass(frame, frame),
            quant=quant,
            digest=SizeClass(frame, min(frame, digest.shape(geometry, self.config.digest_layers).nbytes)),
            state_bytes=4 * (self.codec.state_floats(geometry) + digest.state_floats(geometry)),
            digest_form=digest,
            middle=middle,
        )  # fmt: skip
        self.models[key] = model
        self.models_by_index[model.index] = model
        return model

    def forget_model(self, model: Model) -> None:
        """Forget a model that no session and no page needs: its codec state goes too."""
        pages = self.pages
        if model.sessions or model.fitting or np.any(pages.live & (pages.model == model.index)):
            return  # the last move on its pages will ask again
        if model.state_offset != NOWHERE:
            self.hbm.release_block(model.state_offset)
        del self.models[model.key], self.models_by_index[model.index]

    # Touch ---------------------------------------------------------------------------------------------------

    def touch(self, slot: int, quiet: bool = False) -> None:
        """The page's replicas changed: its sessions get a plan (at the next tick if `quiet`)."""
        for session in self.sharers(slot):
            if session in self.sessions:
                self.sessions[session].changed.add(slot)
                (self.quiet if quiet else self.dirty).add(session)

    def flush(self) -> None:
        """Send one plan to every session whose table changed."""
        for session_id in sorted(self.dirty):
            session = self.sessions.get(session_id)
            if session is None:
                continue
            session.version += 1
            changes = [self._change(slot) for slot in sorted(session.changed)]
            session.changed.clear()
            self.quiet.discard(session_id)
            model = session.model
            plan = Plan(session.id, session.version, changes, model.state, model.digest_form.name)
            self.out.append(SendPlan(session.client, plan))
        self.dirty.clear()

    def table(self, session: Session) -> TableState:
        """The whole table, as a new version; replaces plans that were not sent yet."""
        session.version += 1
        session.changed.clear()
        self.dirty.discard(session.id)
        self.quiet.discard(session.id)
        pages = self.pages
        rows = []
        for slot, count in zip(session.pages.view.tolist(), session.counts.view.tolist(), strict=True):
            new = self._change(slot)
            host = (new.host_kind, new.host_offset, new.host_checksum, new.digest)
            rows.append(PageEntry(new.page, int(pages.region[slot]), count, new.kind, new.offset, *host))
        blanks = [BlankPage(int(pages.id[slot]), int(pages.exact[slot])) for slot in session.blanks]
        return TableState(
            session.id, session.version, session.length, rows, blanks, session.model.state, session.tail_open,
            session.model.digest_form.name,
        )  # fmt: skip

    def _change(self, slot: int) -> PageChange:
        pages, kind = self.pages, Kind(int(self.pages.kind[slot]))
        offset = NOWHERE if kind is Kind.NONE else int(pages.replica(kind)[slot])
        return PageChange(
            int(pages.id[slot]), int(kind), offset,
            int(pages.host_kind[slot]), int(pages.host[slot]), int(pages.checksum[slot]), int(pages.digest[slot]),
        )  # fmt: skip

    # Retire --------------------------------------------------------------------------------------------------

    def retire(self, pool: Pool, size_class: SizeClass, offset: int, slot: int) -> None:
        """The replica at `offset` leaves the page: reuse its memory once every session that could read it says so."""
        waits = {session for session in self.sharers(slot) if session in self.sessions}
        if not waits:
            self.pool(pool).release(size_class, offset)
            return
        number, self._next_retirement = self._next_retirement, self._next_retirement + 1
        whole = pool == "hbm" and size_class.item == size_class.frame
        self.retirements[number] = Retirement(pool, size_class, offset, waits, whole)
        self.retiring_frames += size_class.frame * whole
        self.retiring_host += size_class.item if pool == "host" else 0
        self.retiring_items[size_class] += pool == "hbm" and not whole
        for session_id in waits:
            session = self.sessions[session_id]
            session.retiring.append((session.version + 1, number))
            session.retiring_bytes += size_class.item if pool == "hbm" else 0
            self.dirty.add(session_id)

    def acknowledge(self, session: Session, version: int) -> None:
        """The worker reads table `version` or a later one."""
        session.acked = max(session.acked, min(version, session.version))
        while session.retiring and session.retiring[0][0] <= session.acked:
            self._settle(session, session.retiring.popleft()[1])

    def _settle(self, session: Session, number: int) -> None:
        retirement = self.retirements[number]
        retirement.waits.discard(session.id)
        if retirement.pool == "hbm":
            session.retiring_bytes -= retirement.size_class.item
        if not retirement.waits:
            del self.retirements[number]
            self.retiring_frames -= retirement.size_class.frame * retirement.whole_frame
            self.retiring_host -= retirement.size_class.item if retirement.pool == "host" else 0
            self.retiring_items[retirement.size_class] -= (
                retirement.pool == "hbm" and not retirement.whole_frame
            )
            self.pool(retirement.pool).release(retirement.size_class, retirement.offset)

    # Pages and sessions --------------------------------------------------------------------------------------

    def share(self, slot: int, session: Session) -> None:
        """One more session names the page."""
        self.sharing.setdefault(slot, {int(self.pages.owner[slot])}).add(session.id)
        self.pages.refs[slot] += 1

    def unname(self, slot: int, session: Session) -> None:
        """The session does not name the page any more (it said so, or is dead)."""
        self.pages.refs[slot] -= 1
        if self.pages.refs[slot] == 0:
            self.discard(slot)
            return
        names = self.sharing[slot]
        names.discard(session.id)
        if int(self.pages.owner[slot]) == session.id:
            self._hand_over(slot, session, self.sessions[min(names)])
        if len(names) == 1:
            del self.sharing[slot]

    def _hand_over(self, slot: int, session: Session, heir: Session) -> None:
        """A shared page's owner leaves; what the page remembers in decode steps becomes the heir's."""
        pages, ahead = self.pages, heir.step - session.step
        pages.owner[slot] = heir.id
        pages.moved_step[slot] += ahead  # NEVER stays so
        pages.promoted_step[slot] += ahead
        if pages.wanted_until[slot] > 0:
            pages.wanted_until[slot] = max(0, pages.wanted_until[slot] + ahead)

    def discard(self, slot: int) -> None:
        """Free a page that nobody names; while a move runs on it, the move's end does."""
        if self.pages.recalled[slot] == Outcome.PENDING:
            self.pages.recalled[slot] = Outcome.NONE
            self.count_outcome("wasted", self.owner_of(slot))
            self.waste.count(wasted=True)
        if self.pages.moving[slot]:
            self.pages.doomed[slot] = True
            return
        self.sharing.pop(slot, None)
        self.release_replicas(slot)
        self.pages.remove(slot)

    def release_replicas(self, slot: int) -> None:
        pages, model = self.pages, self.model_of(slot)
        for form in model.forms:
            self.release_replica(slot, form)
        if pages.host[slot] != NOWHERE:
            self.host.release(self.host_class(slot), int(pages.host[slot]))
        if pages.digest[slot] != NOWHERE:
            self.hbm.release(model.digest, int(pages.digest[slot]))
        pages.host[slot] = pages.digest[slot] = NOWHERE

    def release_replica(self, slot: int, form: Kind) -> None:
        """Free a replica in HBM that nobody reads, if there is one."""
        offsets = self.pages.replica(form)
        if offsets[slot] != NOWHERE:
            self.hbm.release(self.model_of(slot).form(form), int(offsets[slot]))
            offsets[slot] = NOWHERE

    def retire_replica(self, slot: int, form: Kind) -> None:
        """A replica in HBM leaves its page (`retire`), if there is one."""
        offsets = self.pages.replica(form)
        if offsets[slot] != NOWHERE:
            self.retire("hbm", self.model_of(slot).form(form), int(offsets[slot]), slot)
            offsets[slot] = NOWHERE

    def host_class(self, slot: int) -> SizeClass:
        """Of a page's replica in host memory."""
        return self.model_of(slot).form(int(self.pages.host_kind[slot]) or Kind.EXACT)

    def page_bytes(self, model: Model, form: int) -> int:
        """Bytes that are read and written of a replica of this form."""
        if form == Kind.EXACT:
            return model.geometry.page_bytes
        codec = self.middle if form == Kind.MIDDLE else self.codec
        assert codec is not None
        return codec.page_bytes(model.geometry)

    def enroll(self, session: Session) -> None:
        """A session is there: its client, model and family know it from now on."""
        self.sessions[session.id] = session
        self.clients[session.client].sessions.add(session.id)
        session.model.sessions.add(session.id)
        session.family.add(session.id)
        if session.options.hbm_budget:
            self.budgeted.add(session.id)

    def is_lost(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which pages have no replica left."""
        lost: NDArray[np.bool_] = (self.pages.kind[slots] == Kind.NONE) & (self.pages.host[slots] == NOWHERE)
        return lost

    def mark_absence(self, session: Session) -> None:
        """Pages of the session and of those it shares pages with know when they are wanted again: the soonest of the
        sessions that name one says so. Linear in the pages of the family.
        """
        pages, family = self.pages, [self.sessions[number] for number in session.family]
        for member in family:
            pages.back_at[member.pages.view], pages.held[member.pages.view] = np.inf, False
        for member in family:
            slots, absence = member.pages.view, self.absent.get(member.id)
            pages.back_at[slots] = np.minimum(pages.back_at[slots], self._back_at(member.id))
            if absence is not None and absence.near:
                pages.held[absence.pages] = True

    def paused_within(self, family: set[int]) -> bool:
        """Any of the sessions is paused."""
        return not self.absent.keys().isdisjoint(family)

    def _back_at(self, session: int) -> float:
        return self.absent[session].back_at if session in self.absent else 0.0

    def close(self, session: Session) -> None:
        """Everything the session held comes back."""
        while session.retiring:
            self._settle(session, session.retiring.popleft()[1])
        del self.sessions[session.id]
        paused = self.paused_within(session.family)
        self.absent.pop(session.id, None)
        for names in (self.dirty, self.quiet, self.budgeted, session.family):
            names.discard(session.id)
        for slot in session.pages.view.tolist():
            self.unname(slot, session)
        for slot in session.blanks:
            self.unname(slot, session)
        if paused and session.family:  # those who stay may be alone with pages now
            self.mark_absence(self.sessions[min(session.family)])
        self.clients[session.client].sessions.discard(session.id)
        session.model.sessions.discard(session.id)
        self.forget_model(session.model)

    def hbm_bytes_of(self, session: Session) -> int:
        """HBM bytes that the session's replicas, blanks and retiring memory take, and that moves are writing."""
        slots, model = session.pages.view, session.model
        exact = int(np.count_nonzero(self.pages.exact[slots] != NOWHERE)) + len(session.blanks)
        quant = int(np.count_nonzero(self.pages.quant[slots] != NOWHERE))
        packed = quant * model.quant.item
        if model.middle is not None:
            packed += int(np.count_nonzero(self.pages.middle[slots] != NOWHERE)) * model.middle.item
        digests = int(np.count_nonzero(self.pages.digest[slots] != NOWHERE)) * model.digest.item
        coming = int(self.pages.coming[slots].sum())
        return exact * model.exact.item + packed + digests + coming + session.retiring_bytes

    def may_hold_digest(self, session: Session | None) -> bool:
        """One more digest fits into the session's own budget, and into the share of it that digests, those being made
        included, may take (always without one): else a long session's digests would fill it, and nothing of it could
        give way.
        """
        if session is None or not session.options.hbm_budget:
            return True
        budget, size = session.options.hbm_budget, session.model.digest.item
        slots = session.pages.view
        held = np.count_nonzero((self.pages.digest[slots] != NOWHERE) | self.pages.summarizing[slots]) + 1
        fits = self.hbm_bytes_of(session) + size <= budget
        return fits and int(held) * size <= self.config.digest_share * budget

    def kept_for_low_bit(self, model: Model) -> int:
        """Free frames (one or none) that wait for low-bit pages: while no slot is free for one, or, with a middle form,
        not for all that a frame of it holds. Else nothing could become low-bit any more.
        """
        return int(self.hbm.free_items(model.quant) < (model.middle.items if model.middle else 1))

    def kept_for_middle(self, model: Model) -> int:
        """Free frames (one or none) that wait for pages of the middle form: while none has a free slot and exact pages
        may still take one. Else every frame would be given out, and the rung would never grow.
        """
        if model.middle is None or self.hbm.free_items(model.middle):
            return 0
        pages = self.pages
        taking = pages.live & pages.sealed & (pages.model == model.index) & (pages.kind == Kind.EXACT)
        taking &= (pages.ladder == Ladder.TIERED) & (pages.guard <= Guard.ATTENDABLE) & ~pages.refused
        return int(np.any(taking))

    def kept_for_digests(self, model: Model) -> int:
        """Free frames (one or none) that wait for digests of the model's pages: while none has a free slot, up to their
        share of HBM.
        """
        if not self.config.host_bytes or self.hbm.free_items(model.digest):
            return 0
        most = int(self.config.digest_share * self.hbm.size) // model.digest.frame
        return int(self.hbm.frames_of(model.digest) < most)

    def region_label(self, slot: int) -> str:
        return Region(int(self.pages.region[slot])).label
