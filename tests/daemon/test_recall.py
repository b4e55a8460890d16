"""Claims about what cold pages leave behind, and how they come back."""

from __future__ import annotations

import numpy as np
import pytest

from tests.daemon.test_brain import FRAME, append, opened, world
from tests.stateful.world import SMALL, WorkerSession, World
from tierkv.daemon import events
from tierkv.daemon.acts import Act
from tierkv.daemon.allocator import SizeClass, aligned
from tierkv.daemon.brain import Brain
from tierkv.daemon.brain_config import BrainConfig
from tierkv.daemon.pages import Goal
from tierkv.prefetch.deviation import DEVIATION
from tierkv.protocol import Audit, Failure, Ready, Reserved, SessionOptions
from tierkv.quant import get
from tierkv.regions import Region, Run
from tierkv.table import NOWHERE, Kind

LOW_BIT_IN_A_FRAME = FRAME // aligned(get("k3v2").page_bytes(SMALL))
DIGEST = DEVIATION.shape(SMALL, 0).nbytes


def with_cold_pages(pages: int = 160, **options: object) -> tuple[World, WorkerSession]:
    """A session whose first pages lie in host: twelve frames hold the rest. Nothing comes back by itself."""
    options = {
        "digest_share": 0.25,
        "hbm_frames": 12,
        "host_frames": 200,
        "min_residency_steps": 8,
        **options,
    }
    w = world(**options)  # type: ignore[arg-type]
    session = opened(w)
    append(w, session, pages)
    w.settle()
    return w, session


def with_a_budget() -> tuple[World, WorkerSession]:
    """A session of 60 pages within six of 30 frames."""
    w = world(hbm_frames=30, host_frames=200, digest_share=0.2)
    session = w.open("a", SMALL, SessionOptions(hbm_budget=6 * FRAME))
    assert session is not None
    append(w, session, 60)
    w.settle()
    return w, session


def fill_up(w: World) -> None:
    """Cold pages come back by themselves while there is room: then there is none."""
    for _ in range(20):
        w.now += 0.3
        w.feed(events.Tick())
        w.settle()


def cold(session: WorkerSession) -> list[int]:
    """Rows of cold pages."""
    return [row for row, page in enumerate(session.rows) if page.kind == Kind.NONE]


def ids(session: WorkerSession, rows: list[int]) -> list[int]:
    return [session.rows[row].page for row in rows]


def observe(
    w: World, session: WorkerSession, page_mass: dict[int, float], audit: Audit | None = None
) -> None:
    """Masses of whole pages by row; every other page has nothing."""
    mass = np.zeros(session.length, np.float32)
    starts = np.cumsum([0] + [len(row.stamps) for row in session.rows])
    for row, value in page_mass.items():
        mass[starts[row] : starts[row + 1]] = value / len(session.rows[row].stamps)
    w.ask(events.Observed, session.client, session.id, session.step, mass, audit)


def wait(w: World, session: WorkerSession, request: int, seconds: float = 5.0) -> Ready:
    """Let moves end and plans be adopted until the answer is there."""
    for _ in range(int(seconds / 0.05)):
        if request in w.answers:
            break
        for number in list(w.moves):
            w.finish_move(number)
        w.adopt_plans(session, acknowledge=True)
        w.now += 0.05
        w.feed(events.Tick())
    answer = w.answers.pop(request)
    assert isinstance(answer, Ready)
    w.adopt_plans(session, acknowledge=True)
    assert session.version >= answer.version
    return answer


def ask(w: World, session: WorkerSession, rows: list[int], mass: float, seconds: float = 2.0) -> int:
    return w.recall(session, ids(session, rows), mass, seconds)


def test_every_page_that_leaves_hbm_leaves_a_digest_in_it() -> None:
    w, session = with_cold_pages(pages=100, digest_share=0.5)
    fill_up(w)
    rows = cold(session)
    assert len(rows) > 5
    assert all(session.rows[row].digest != NOWHERE for row in rows)
    warm = [page for page in session.rows if page.kind != Kind.NONE]
    assert all(page.digest == NOWHERE for page in warm), "only cold pages keep one"


def test_digests_take_no_more_than_their_share_of_hbm() -> None:
    """An eighth of sixteen frames is two frames of digests: what leaves beyond has none, and is counted."""
    w, session = with_cold_pages(pages=400, hbm_frames=16, host_frames=500, digest_share=0.125)
    held = sum(session.rows[row].digest != NOWHERE for row in cold(session))
    assert held == 2 * (FRAME // DIGEST)
    assert w.brain.state.counters.without_digest >= len(cold(session)) - held


def test_pages_that_left_without_a_digest_get_one_when_there_is_room() -> None:
    w, session = with_cold_pages(pages=400, hbm_frames=16, host_frames=500, digest_share=0.125)
    bare = [row for row in cold(session) if session.rows[row].digest == NOWHERE]
    length = sum(len(row.stamps) for row in session.rows[: bare[0] + 1])
    w.crop(session, length)  # every later page goes, and their digests with them
    for _ in range(20):
        w.now += 0.1
        w.feed(events.Tick())
        w.settle()
    assert all(session.rows[row].digest != NOWHERE for row in cold(session))


def test_without_a_share_pages_leave_no_digest() -> None:
    _, session = with_cold_pages(digest_share=0.0)
    assert cold(session)
    assert all(row.digest == NOWHERE for row in session.rows)


def test_a_step_gets_the_pages_that_it_waits_for() -> None:
    w, session = with_cold_pages()
    wanted = cold(session)[:5]
    wait(w, session, ask(w, session, wanted, mass=0.5))
    assert [session.rows[row].kind for row in wanted] == [Kind.QUANTIZED] * 5
    assert w.brain.state.counters.moved_pages["host", "quantized", "recall"] == 5


def test_only_pages_that_get_less_attention_give_way() -> None:
    """Every low-bit page is given more than what is estimated for the wanted one: it stays where it is."""
    w, session = with_cold_pages()
    fill_up(w)
    warm = [row for row in range(len(session.rows)) if session.rows[row].kind != Kind.NONE]
    observe(w, session, dict.fromkeys(warm, 0.02))
    wanted = cold(session)[0]
    wait(w, session, ask(w, session, [wanted], mass=0.01))
    assert session.rows[wanted].kind == Kind.NONE
    wait(w, session, ask(w, session, [wanted], mass=0.05))
    assert session.rows[wanted].kind == Kind.QUANTIZED


def test_the_least_attended_page_gives_way() -> None:
    w, session = with_cold_pages()
    fill_up(w)
    low = [row for row, page in enumerate(session.rows) if page.kind == Kind.QUANTIZED]
    masses = {row: 0.01 + 0.001 * place for place, row in enumerate(reversed(low))}
    observe(w, session, masses)
    wait(w, session, ask(w, session, cold(session)[:1], mass=0.9))
    gone = [row for row in low if session.rows[row].kind == Kind.NONE]
    assert set(gone) <= set(low[-3:]) and low[-1] in gone


def test_a_recalled_page_stays_while_others_leave() -> None:
    """Its score is the lowest of all: an ordinary choice would send it straight back."""
    w, session = with_cold_pages()
    wanted = cold(session)[:3]
    wait(w, session, ask(w, session, wanted, mass=0.5))
    append(w, session, 6)
    assert [session.rows[row].kind for row in wanted] == [Kind.QUANTIZED] * 3


def test_a_recall_ends_at_its_deadline_and_counts_what_came_late() -> None:
    w, session = with_cold_pages()
    wanted = cold(session)[:2]
    request = ask(w, session, wanted, mass=0.5, seconds=0.2)
    assert request not in w.answers
    w.now += 0.3
    w.feed(events.Tick())  # no move has ended
    assert isinstance(w.answers.pop(request), Ready)
    assert w.brain.state.counters.prefetched["late"] == 2


def test_more_pages_than_low_bit_slots_are_answered_with_what_fits() -> None:
    w, session = with_cold_pages()
    wanted = cold(session)
    wait(w, session, ask(w, session, wanted, mass=0.9))
    back = [row for row in wanted if session.rows[row].kind == Kind.QUANTIZED]
    assert 0 < len(back) < len(wanted)
    assert back == wanted[: len(back)], "the most wanted come first"


def test_pages_of_others_and_pages_that_are_here_are_no_error() -> None:
    w, session = with_cold_pages()
    other = opened(w)
    warm = next(row for row in session.rows if row.kind != Kind.NONE)
    assert isinstance(w.answers.pop(w.recall(other, [session.rows[0].page, 12345], 0.5)), Ready)
    assert isinstance(w.answers.pop(w.recall(session, [warm.page], 0.5)), Ready)


def test_a_recall_is_refused_for_a_session_that_is_not_there() -> None:
    w, session = with_cold_pages()
    answer = w.ask(events.Recalled, "a", session.id + 1, (), (), 1.0)
    assert isinstance(answer, Failure) and answer.code == "unknown-session"


def test_a_damaged_host_replica_is_lost_and_never_read() -> None:
    w, session = with_cold_pages()
    wanted = cold(session)[:1]
    request = ask(w, session, wanted, mass=0.9)
    while request not in w.answers:
        for number, move in list(w.moves.items()):
            if isinstance(move, events.Quantize) and move.src_pool == "host":
                w.lost_before = 1
                w.fail_move(number, "checksum")
            else:
                w.finish_move(number)
        w.adopt_plans(session, acknowledge=True)
        w.now += 0.05
        w.feed(events.Tick())
    w.settle()
    assert session.rows[wanted[0]].host_kind == Kind.NONE
    assert w.brain.state.counters.lost_pages == 1
    assert w.brain.state.counters.checksum_failures == 1


def test_what_estimates_keep_naming_comes_back_in_the_background() -> None:
    w, session = with_cold_pages(min_residency_steps=0)
    wanted = cold(session)[3]
    for _ in range(8):
        session.step += 1
        observe(w, session, {wanted: 0.2})
        w.now += 0.3
        w.feed(events.Tick())
        w.settle()
    assert session.rows[wanted].kind == Kind.QUANTIZED


def test_a_page_that_comes_back_gives_its_digest_up() -> None:
    w, session = with_cold_pages()
    wanted = cold(session)[:4]
    wait(w, session, ask(w, session, wanted, mass=0.9))
    w.settle()
    assert [session.rows[row].digest for row in wanted] == [NOWHERE] * 4


def test_audits_are_counted() -> None:
    w, session = with_cold_pages()
    observe(w, session, {0: 0.5}, Audit(0.75, 0.9, 0.25, 0.2, 3))
    counters = w.brain.state.counters
    assert counters.needed_cold == 3
    assert counters.last_audit == Audit(0.75, 0.9, 0.25, 0.2, 3)
    assert sum(counters.attention_recall.counts) == 1
    assert w.brain.snapshot().flat()["attention_recall"] == 0.75


def test_a_new_owner_keeps_the_digests_of_cold_pages() -> None:
    w, session = with_cold_pages()
    before = {row: session.rows[row].digest for row in cold(session)}
    w.restart_owner()
    w.settle()
    assert {row: session.rows[row].digest for row in cold(session)} == before
    assert Region.USER in {Region(row.region) for row in session.rows}


def reading_host(w: World) -> list[int]:
    """Recalls in flight."""
    return [
        number
        for number, move in w.moves.items()
        if isinstance(move, events.Quantize) and move.src_pool == "host"
    ]


def session_digest(w: World, slot: int) -> SizeClass:
    return w.brain.state.model_of(slot).digest


def test_a_recall_is_answered_when_its_session_closes_meanwhile() -> None:
    w, session = with_cold_pages(pages=110)
    request = ask(w, session, cold(session)[:2], mass=0.5)
    assert request not in w.answers
    w.close(session)
    answer = w.answers.pop(request)
    assert isinstance(answer, Failure) and answer.code == "unknown-session"


def test_a_draining_daemon_still_brings_pages_back() -> None:
    w, session = with_cold_pages(pages=110)
    w.feed(events.Draining())
    wanted = cold(session)[:2]
    wait(w, session, ask(w, session, wanted, mass=0.5))
    assert [session.rows[row].kind for row in wanted] == [Kind.QUANTIZED] * 2


def test_a_recall_waits_until_a_new_owner_has_adopted_everybody() -> None:
    w, session = with_cold_pages(pages=110)
    wanted = cold(session)[:2]
    w.config = BrainConfig(**{**vars(w.config), "epoch": 2})
    w.brain, session.plans = Brain(w.config, validate=True), []
    w.moves.clear()
    w.feed(events.Attached(session.client, (w._state(session),)))
    request = ask(w, session, wanted, mass=0.5)
    assert request not in w.answers
    w.feed(events.AdoptionEnded())
    wait(w, session, request)
    assert [session.rows[row].kind for row in wanted] == [Kind.QUANTIZED] * 2


def test_a_slot_that_goes_to_another_page_is_not_brought_back_for_the_earlier_one() -> None:
    w, session = with_cold_pages(pages=110)
    first, *later = cold(session)[:3]
    request = ask(w, session, [first, *later], mass=0.5)
    slots = [w.brain.state.pages.index[page] for page in ids(session, later)]
    for number in list(w.moves):
        w.moves.pop(number)  # none of them ends
    w.crop(session, sum(len(row.stamps) for row in session.rows[: first + 1]))
    for slot in slots:  # as if pages of others had taken them, and had become cold
        assert slot not in w.brain.recall._waiting[session.id].left
    assert request not in w.answers


def test_a_page_leaves_without_a_digest_when_none_can_be_made() -> None:
    """Every digest fails, for ever: room is made all the same."""
    w = world(hbm_frames=12, host_frames=200, digest_share=0.25)
    session = opened(w)
    written = 0
    for _ in range(1000):
        if isinstance(w.reserve(session, 1), Reserved):
            w.write(session, [Run(Region.USER, 4)], 1)
            written += 1
        if written == 120:
            break
        for number, move in list(w.moves.items()):
            if isinstance(move, events.Summarize):
                w.fail_move(number, "io")
            elif number in w.moves:
                w.finish_move(number)
        w.adopt_plans(session, acknowledge=True)
        w.now += 0.01
    assert written == 120
    assert cold(session)
    assert w.brain.state.counters.without_digest >= len(cold(session))


def test_two_moves_that_find_the_same_host_replica_damaged_lose_it_once() -> None:
    """A late digest and a recall read one replica."""
    w, session = with_cold_pages(pages=110)
    row = cold(session)[0]
    state, moves = w.brain.state, w.brain.moves
    slot = state.pages.index[session.rows[row].page]
    state.retire("hbm", session_digest(w, slot), int(state.pages.digest[slot]), slot)
    state.pages.digest[slot] = NOWHERE
    state.touch(slot)
    w.feed(events.LeaseRenewed("a"))
    w.settle()
    assert moves.launch.digest(slot) and moves.promote(slot, Goal.LOWBIT, "recall")
    w.feed(events.LeaseRenewed("a"))  # the orders go out
    both = [number for number, move in moves.flying.items() if move.slot == slot]
    assert len(both) == 2
    w.lost_before = 1
    for number in both:
        w.fail_move(number, "checksum")
    assert w.brain.state.counters.lost_pages == 1
    w.settle()


def test_a_lost_page_keeps_no_digest() -> None:
    w, session = with_cold_pages(pages=110)
    fill_up(w)
    row = cold(session)[0]
    assert session.rows[row].digest != NOWHERE
    ask(w, session, [row], mass=0.9)
    w.lost_before = 1
    for _ in range(10):
        for number in list(w.moves):
            if number in reading_host(w):
                w.fail_move(number, "checksum")
            elif number in w.moves:
                w.finish_move(number)
        w.adopt_plans(session, acknowledge=True)
        w.now += 0.05
        w.feed(events.LeaseRenewed("a"))
    assert (session.rows[row].host_kind, session.rows[row].digest) == (Kind.NONE, NOWHERE)


def test_a_page_that_the_codec_refuses_is_not_tried_again_and_again() -> None:
    w, session = with_cold_pages(pages=110)
    row = cold(session)[0]
    slot = w.brain.state.pages.index[session.rows[row].page]
    tried = 0
    for _ in range(20):
        w.now += 0.3
        ask(w, session, [row], mass=0.9, seconds=0.1)
        w.feed(events.Tick())
        mine = [number for number, move in w.brain.moves.flying.items() if move.slot == slot]
        tried += len(mine)
        for number in mine:
            w.fail_move(number, "non-finite")
        w.settle()
    assert tried == 1


def test_a_page_is_not_recalled_while_it_is_compressed() -> None:
    """Compressed, its exact replica's memory is free for others while the recall may still read it."""
    w, session = with_cold_pages(pages=110)
    row = cold(session)[0]
    slot = w.brain.state.pages.index[session.rows[row].page]
    assert w.brain.moves.launch.compress(slot)
    assert w.brain.moves.promote(slot, Goal.LOWBIT, "recall")
    assert [move.act for move in w.brain.moves.flying.values() if move.slot == slot] == [Act.COMPRESS]
    w.feed(events.LeaseRenewed("a"))  # the orders go out
    w.settle()
    w.settle()
    assert session.rows[row].kind == Kind.QUANTIZED


def test_digests_do_not_fill_a_sessions_own_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ninety digests are more than the six frames that the session may hold. Those being made count, too."""
    assert 90 * DIGEST > 6 * FRAME
    w = world(hbm_frames=30, host_frames=200, digest_share=0.2)
    session = w.open("a", SMALL, SessionOptions(hbm_budget=6 * FRAME))
    assert session is not None
    held: list[int] = []

    def look() -> None:
        """After every event."""
        made = np.count_nonzero(w.brain.state.pages.digest[w.brain.state.pages.slots()] != NOWHERE)
        making = sum(move.act is Act.DIGEST for move in w.brain.moves.flying.values())
        held.append(int(made) + making)

    monkeypatch.setattr(w, "check_reads", look)
    append(w, session, 90)
    fill_up(w)
    assert 0 < max(held) <= 0.2 * 6 * FRAME / DIGEST


def test_pages_on_their_way_back_count_in_the_sessions_budget() -> None:
    w, session = with_a_budget()
    request = ask(w, session, cold(session)[:16], mass=0.9)
    held = w.brain.state.sessions[session.id]
    while request not in w.answers:
        assert w.brain.state.hbm_bytes_of(held) <= 6 * FRAME  # what moves are writing is counted
        for number in list(w.moves)[:1]:
            w.finish_move(number)
        w.adopt_plans(session, acknowledge=True)
        w.now += 0.05
        w.feed(events.LeaseRenewed("a"))
    assert w.brain.state.counters.recalled_pages > 0
