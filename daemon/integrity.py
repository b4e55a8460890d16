"""The invariants, checked after every event in tests and simulations."""

from __future__ import annotations

from collections import Counter

from tierkv.daemon.acts import Act
from tierkv.daemon.allocator import PoolAllocator
from tierkv.daemon.moves import Moves
from tierkv.daemon.pages import FORMS, Goal
from tierkv.daemon.state import State
from tierkv.table import NOWHERE, Kind


def check_integrity(state: State, moves: Moves) -> None:
    """Raises AssertionError when an invariant does not hold: bytes with two owners or none, a page without a
    replica, references that no table accounts for."""
    state.hbm.check_integrity()
    state.host.check_integrity()
    _check_bytes(state, moves)
    _check_pages(state)
    _check_sessions(state)


def _check_bytes(state: State, moves: Moves) -> None:
    """Every byte in use belongs to exactly one replica, retiring replica, move destination or codec state."""
    pages = state.pages
    used: dict[str, Counter[int]] = {"hbm": Counter(), "host": Counter()}
    sizes: dict[str, int] = {"hbm": 0, "host": 0}
    coming = Counter[int]()

    def own(pool: str, offset: int, size: int) -> None:
        used[pool][offset] += 1
        sizes[pool] += size

    for slot in pages.slots().tolist():
        model = state.model_of(slot)
        for form in FORMS:
            if pages.replica(form)[slot] != NOWHERE:
                own("hbm", int(pages.replica(form)[slot]), model.form(form).item)
        if pages.host[slot] != NOWHERE:
            own("host", int(pages.host[slot]), state.host_class(slot).item)
        if pages.digest[slot] != NOWHERE:
            own("hbm", int(pages.digest[slot]), model.digest.item)
    for retirement in state.retirements.values():
        own(retirement.pool, retirement.offset, retirement.size_class.item)
    for move in moves.flying.values():
        if move.act not in (Act.FORK, Act.FIT):
            own(move.pool, move.destination, move.size_class.item)
            coming[move.slot] += move.size_class.item * (move.pool == "hbm")
    for model in state.models.values():
        if model.state_offset != NOWHERE:
            own("hbm", model.state_offset, model.state_bytes)
    for slot in pages.slots().tolist():
        assert pages.coming[slot] == coming[slot], "bytes on their way to a page are miscounted"
    for pool, counts in used.items():
        twice = [offset for offset, n in counts.items() if n > 1]
        assert not twice, f"{pool} bytes at {twice[:3]} have two owners"
        allocator = state.pool("hbm" if pool == "hbm" else "host")
        assert set(counts) == _items(allocator), f"{pool}: allocated items and owners differ"
        assert sizes[pool] <= allocator.used_bytes


def _items(pool: PoolAllocator) -> set[int]:
    """Offsets of all items in use."""
    items = set(pool._blocks)
    for (size_class, frame), free in pool._frames.items():
        items |= {frame + i * size_class.item for i in range(size_class.items)} - free
    return items


def _check_pages(state: State) -> None:
    pages = state.pages
    for slot in pages.slots().tolist():
        if pages.doomed[slot]:
            assert pages.moving[slot] > 0 and pages.refs[slot] == 0
            continue
        kind = Kind(int(pages.kind[slot]))
        assert (kind == Kind.EXACT) <= (pages.exact[slot] != NOWHERE), "an exact page without its replica"
        assert (kind == Kind.QUANTIZED) <= (pages.quant[slot] != NOWHERE), (
            "a low-bit page without its replica"
        )
        assert (kind == Kind.MIDDLE) <= (pages.middle[slot] != NOWHERE), "a middle page without its replica"
        assert kind in (Kind.EXACT, Kind.MIDDLE) or pages.middle[slot] == NOWHERE, "a page goes down two ways"
        assert (pages.host[slot] != NOWHERE) == (pages.host_kind[slot] != Kind.NONE)
        assert kind == Kind.EXACT or pages.exact[slot] == NOWHERE
        assert not pages.lossy[slot] or (
            pages.exact[slot] == NOWHERE and pages.host_kind[slot] != Kind.EXACT
        ), "a page without exact bytes has an exact replica: it was made from a lossy one"
        assert pages.digest[slot] == NOWHERE or kind == Kind.NONE or pages.goal[slot] == Goal.HOST, (
            "a page in HBM keeps a digest"
        )
        if not pages.sealed[slot]:
            assert kind == Kind.EXACT, "an open page was moved"
        assert pages.refs[slot] >= 1


def _check_sessions(state: State) -> None:
    pages, refs = state.pages, Counter[int]()
    for session in state.sessions.values():
        slots = session.pages.view.tolist()
        counts = session.counts.view.tolist()
        refs.update(slots)
        refs.update(session.blanks)
        assert session.length == sum(counts) == len(session.tokens)
        starts = [sum(counts[:row]) for row in range(len(counts))] if len(counts) < 256 else None
        assert starts is None or starts == session.starts.view.tolist()
        assert all(1 <= count <= pages.count[slot] for slot, count in zip(slots, counts, strict=True))
        assert all(pages.count[slot] == 0 and not pages.sealed[slot] for slot in session.blanks)
        assert session.tail_open <= (bool(slots) and not pages.sealed[slots[-1]])
        assert all(pages.sealed[slot] for slot in slots[:-1]), "only the last page is open"
        assert session.acked <= session.version
        assert session.id in session.family and session.family <= set(state.sessions)
        assert session.retiring_bytes >= 0
    for slot in pages.slots().tolist():
        assert pages.refs[slot] == refs[slot], (
            f"page slot {slot}: {pages.refs[slot]} references, {refs[slot]} tables"
        )
    waiting = Counter(s for r in state.retirements.values() for s in r.waits)
    for session in state.sessions.values():
        assert waiting[session.id] == len(session.retiring)
    assert set(waiting) <= set(state.sessions), "memory waits for a session that is gone"
