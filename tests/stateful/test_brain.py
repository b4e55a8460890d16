"""The brain under random workers, failing moves, late acknowledgements and owner restarts.

After every event the invariants are checked (`validate=True`) and every worker reads its whole table back.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.stateful.world import LARGE, SMALL, WorkerSession, World
from tierkv.daemon import events
from tierkv.daemon.brain_config import BrainConfig
from tierkv.daemon.pages import Guard
from tierkv.daemon.policy import Thresholds
from tierkv.hint_messages import (
    AgentHint,
    DependsOn,
    HintKind,
    Pause,
    Prefetch,
    Resume,
    Retain,
    Supersede,
)
from tierkv.protocol import Done, Failure, Reserved, SessionOptions
from tierkv.regions import Region, Run

FRAME = SMALL.page_bytes
tokens = st.integers(0, 30)
hints = st.one_of(
    st.builds(Pause, st.sampled_from([-1.0, 0.0, 0.2, 3.0, 1e6]), st.sampled_from(["", "search", "build"])),
    st.builds(Resume),
    st.builds(Prefetch, tokens, tokens, st.sampled_from([-1, 2, 4])),
    st.builds(Retain, st.sampled_from([0.0, 0.5, 1e6])),
    st.builds(Supersede, tokens, tokens),
    st.builds(DependsOn, tokens, tokens),
    st.none(),
)
names = st.sampled_from(["", "a", "b"])
agents = st.builds(
    AgentHint, step_id=names, parent_step_id=names, ttl=st.sampled_from([0.0, 1.0]),
    expected_tool_duration_ms=st.sampled_from([0.0, 500.0]), reuse_hint=st.sampled_from(["", "unlikely"]),
)  # fmt: skip
runs = st.lists(st.builds(Run, st.sampled_from(list(Region)), st.integers(1, 7)), min_size=1, max_size=3)


class BrainMachine(RuleBasedStateMachine):
    @initialize(
        hbm_frames=st.integers(6, 14),
        host_frames=st.sampled_from([0, 3, 12, 60]),
        demotion=st.sampled_from(["pressure", "eager"]),
        backup=st.sampled_from(["on_seal", "on_demote", "never"]),
        straddle=st.booleans(),
        codec=st.sampled_from(["k3v2"]),
        middle=st.sampled_from(["", "int8", "nf4"]),
        watermark=st.sampled_from([0.05, 0.3]),
        drop_below=st.sampled_from([0.0, 2.0]),
        digest_share=st.sampled_from([0.0, 0.2, 0.5]),
        promotion_batch=st.sampled_from([1, 2 * FRAME, 8 << 20]),
    )
    def start(
        self, hbm_frames: int, host_frames: int, demotion: Literal["pressure", "eager"],
        backup: Literal["on_seal", "on_demote", "never"], straddle: bool, codec: str, drop_below: float,
        digest_share: float, middle: str, watermark: float, promotion_batch: int,
    ) -> None:  # fmt: skip
        self.drop_below = drop_below
        self.world = World(
            BrainConfig(
                hbm_bytes=hbm_frames * FRAME + 1024,
                host_bytes=host_frames * FRAME,
                codec=codec,
                middle=middle,
                low_watermark=watermark,
                high_watermark=2 * watermark,
                page_tokens=4,
                straddle=straddle,
                demotion=demotion,
                backup=backup,
                digest_share=digest_share,
                digest_layers=1,
                sink_tokens=4,
                recent_tokens=6,
                thresholds=Thresholds(0.5, 0.3, drop_below, 0.55),
                min_residency_steps=1,
                max_moves_in_flight=4,
                promotion_batch=promotion_batch,
            )
        )
        if drop_below > 0 and host_frames < 60:
            self.world.lost_before = 1  # full host may drop
        self.world.attach("a")
        self.world.attach("b")

    def pick(self, data: st.DataObject) -> WorkerSession:
        ids = sorted(self.world.sessions)
        return self.world.sessions[data.draw(st.sampled_from(ids))]

    def some_session(self) -> bool:
        return bool(self.world.sessions)

    @precondition(lambda self: self.world.clients)
    @rule(
        data=st.data(),
        large=st.booleans(),
        ladder=st.sampled_from(["tiered", "tiered", "drop", "exact"]),
        budget=st.sampled_from([0, 0, 4 * FRAME]),
        pins=st.sampled_from([None, {}, {"system": "exact", "plan": "attendable"}]),
    )
    def open(
        self, data: st.DataObject, large: bool, ladder: str, budget: int, pins: dict[str, str] | None
    ) -> None:
        client = data.draw(st.sampled_from(sorted(self.world.clients)))
        geometry = LARGE if large and not budget else SMALL
        self.world.open(client, geometry, SessionOptions(ladder=ladder, hbm_budget=budget, pins=pins))

    @precondition(some_session)
    @rule(data=st.data(), pages=st.integers(1, 3))
    def reserve(self, data: st.DataObject, pages: int) -> None:
        result = self.world.reserve(self.pick(data), pages)
        assert isinstance(result, Reserved) or (
            isinstance(result, Failure) and result.code in ("backpressure", "out-of-capacity")
        ), result

    @precondition(some_session)
    @rule(data=st.data(), runs=runs, steps=st.integers(0, 2), poison=st.sampled_from([False, False, True]))
    def write(self, data: st.DataObject, runs: list[Run], steps: int, poison: bool) -> None:
        self.world.writes_poison = poison
        result = self.world.write(self.pick(data), runs, steps)
        assert not isinstance(result, Failure), result

    @precondition(some_session)
    @rule(data=st.data(), seed=st.integers(0, 99))
    def observe(self, data: st.DataObject, seed: int) -> None:
        session = self.pick(data)
        if session.length:
            mass = np.random.default_rng(seed).dirichlet(np.ones(session.length)).astype(np.float32)
            self.world.ask(events.Observed, session.client, session.id, session.step, mass)

    @precondition(some_session)
    @rule(data=st.data(), mass=st.sampled_from([0.0, 0.3, 1.0]), seconds=st.sampled_from([0.0, 0.5]))
    def recall(self, data: st.DataObject, mass: float, seconds: float) -> None:
        session = self.pick(data)
        pages = [row.page for row in session.rows] or [7]
        wanted = data.draw(st.lists(st.sampled_from(pages), max_size=4))
        self.world.recall(session, wanted, mass, seconds)

    @precondition(some_session)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        session = self.pick(data)
        self.world.crop(session, data.draw(st.integers(0, session.length)))

    @precondition(some_session)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.world.fork(self.pick(data))

    @precondition(some_session)
    @rule(data=st.data(), acknowledge=st.booleans())
    def adopt(self, data: st.DataObject, acknowledge: bool) -> None:
        self.world.adopt_plans(self.pick(data), acknowledge)

    @precondition(some_session)
    @rule(data=st.data(), level=st.sampled_from(["none", "attendable", "exact"]))
    def pin(self, data: st.DataObject, level: str) -> None:
        session = self.pick(data)
        if session.length:
            start = data.draw(st.integers(0, session.length - 1))
            self.world.ask(events.Pinned, session.client, session.id, start, session.length, level)

    @precondition(some_session)
    @rule(data=st.data(), hint=hints, agent=st.none() | agents)
    def hint(self, data: st.DataObject, hint: HintKind | None, agent: AgentHint | None) -> None:
        """Any hint, of tokens that are there or not: refused or taken, it loses nothing."""
        session = self.pick(data)
        result = self.world.ask(events.Hinted, session.client, session.id, hint, agent)
        if isinstance(hint, Prefetch | Supersede | DependsOn):
            there = 0 <= hint.start < hint.stop <= session.length
            assert there == isinstance(result, Done), result
        else:
            assert isinstance(result, Done) or result.code == "out-of-capacity", result

    @precondition(some_session)
    @rule(data=st.data())
    def explain(self, data: st.DataObject) -> None:
        """It leaves no trace, and tells the score and the guard by which the brain decides."""
        session, brain = self.pick(data), self.world.brain
        if not session.length:
            return
        token = data.draw(st.integers(0, session.length - 1))
        pages = brain.state.pages
        before = {name: getattr(pages, name).tobytes() for name in pages._arrays}
        told = brain.explain(session.id, token=token)
        assert before == {name: getattr(pages, name).tobytes() for name in pages._arrays}
        assert session.rows[told.page].page == told.id
        assert told.start <= token < told.start + told.tokens
        for member in brain.state.sessions[session.id].family:
            brain.state.sessions[member].stale = True
        brain.scores.refresh()
        slot = pages.index[told.id]
        assert told.score == pytest.approx(float(pages.score[slot]), rel=1e-5)
        guards = [Guard[name.upper()] for name in told.guards.values()]
        assert max(guards, default=Guard.NONE) == pages.guard[slot]
        assert told.why and told.next

    @precondition(some_session)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.world.close(self.pick(data))

    @precondition(lambda self: self.world.moves)
    @rule(data=st.data())
    def move_ends(self, data: st.DataObject) -> None:
        self.world.finish_move(data.draw(st.sampled_from(sorted(self.world.moves))))

    @precondition(lambda self: self.world.moves)
    @rule(data=st.data(), reason=st.sampled_from(["io", "codec", "non-finite"]))
    def move_fails(self, data: st.DataObject, reason: str) -> None:
        self.world.fail_move(data.draw(st.sampled_from(sorted(self.world.moves))), reason)

    @rule(seconds=st.sampled_from([0.05, 0.3, 5.0]))
    def tick(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.feed(events.Tick())

    @rule(expired=st.booleans(), client=st.sampled_from(["a", "b"]))
    def lease(self, expired: bool, client: str) -> None:
        self.world.feed(events.LeaseExpired(client) if expired else events.LeaseRenewed(client))

    @rule(client=st.sampled_from(["a", "b"]))
    def worker_dies(self, client: str) -> None:
        if client in self.world.clients:
            self.world.kill(client)
            self.world.attach(client)

    @rule()
    def owner_restarts(self) -> None:
        self.world.restart_owner()

    @invariant()
    def pools_are_never_overdrawn(self) -> None:
        snapshot = self.world.brain.snapshot()
        assert 0 <= snapshot.hbm_used <= snapshot.hbm_capacity
        assert 0 <= snapshot.host_used <= snapshot.host_capacity

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for client in ("a", "b"):
            world.feed(events.LeaseRenewed(client))
        world.settle()
        for session in list(world.sessions.values()):
            world.close(session)
        world.settle()
        for client in list(world.clients):
            world.kill(client)
        snapshot = world.brain.snapshot()
        assert snapshot.hbm_used == 0 and snapshot.host_used == 0, "closed sessions left bytes behind"
        assert len(world.brain.state.pages) == 0 and not world.brain.state.models


TestBrain = BrainMachine.TestCase
TestBrain.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
