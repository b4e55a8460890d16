"""Which form a model's digests have, what room its state gets, and what a new owner makes of another's."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.stateful.world import WorkerSession, World
from tierkv.daemon import events
from tierkv.daemon.allocator import aligned
from tierkv.daemon.brain import Brain
from tierkv.daemon.brain_config import BrainConfig
from tierkv.daemon.policy import Thresholds
from tierkv.geometry import Geometry
from tierkv.prefetch.digest_settings import DigestSetting
from tierkv.prefetch.transform_digests import TransformForm
from tierkv.protocol import Failure, Reserved, SessionOptions
from tierkv.quant import get
from tierkv.quant.moments import About
from tierkv.regions import Region, Run
from tierkv.table import NOWHERE, Kind

PAGED = Geometry(2, 1, 64, "float32", 16)
FRAME = aligned(PAGED.page_bytes)
FORM = TransformForm(12)
STATE = 4 * (get("k3v2").state_floats(PAGED) + FORM.state_floats(PAGED))
KNOWN = (About("model-2", 2, 1, 64, "float32", ("a text",), 100),)


def config(
    digest: DigestSetting = "auto", known: tuple[About, ...] = KNOWN, epoch: int = 1, frames: int = 12
) -> BrainConfig:
    return BrainConfig(
        frames * FRAME + aligned(STATE) + 4096, 200 * FRAME, epoch, sink_tokens=16, recent_tokens=32, pins=(),
        thresholds=Thresholds(0.0, 0.0, 0.0, 0.0), low_watermark=0.0, high_watermark=0.0, digest_share=0.5,
        digest=digest, digest_bytes=12, digest_models=known,
    )  # fmt: skip


def world(digest: DigestSetting = "auto", known: tuple[About, ...] = KNOWN, frames: int = 12) -> World:
    made = World(config(digest, known, frames=frames))
    made.attach("a")
    return made


def opened(w: World) -> WorkerSession:
    session = w.open("a", PAGED, SessionOptions())
    assert session is not None
    return session


def append(w: World, session: WorkerSession, pages: int) -> None:
    for _ in range(pages):
        for _ in range(100):
            if isinstance(w.reserve(session, 1), Reserved):
                break
            w.now += 0.01
            w.settle()
        assert not isinstance(w.write(session, [Run(Region.USER, 16)], 0), Failure)
        w.adopt_plans(session, acknowledge=True)
    w.settle()


def restarted(w: World, **changed: object) -> None:
    w.config = BrainConfig(**{**vars(w.config), **changed})
    w.restart_owner()
    w.settle()


def cold_digests(session: WorkerSession) -> list[int]:
    return [row.digest for row in session.rows if row.kind == Kind.NONE and row.digest != NOWHERE]


def test_a_calibrated_models_digests_are_short_and_its_state_lies_behind_the_codecs() -> None:
    w = world()
    session = opened(w)
    assert session.digest == "transform-12"
    (model,) = w.brain.state.models.values()
    assert model.state_bytes == STATE
    assert model.digest.item == aligned(2 * 12)
    assert not model.ready
    append(w, session, 160)
    assert model.ready and session.codec_state == model.state
    assert cold_digests(session)


def test_no_digest_is_made_before_its_state() -> None:
    w = world()
    session = opened(w)
    (model,) = w.brain.state.models.values()
    append(w, session, 1)
    slot = int(w.brain.state.pages.slots()[0])
    launch = w.brain.moves.launch
    assert not model.ready and not launch.digest(slot)
    append(w, session, 160)
    assert model.ready and cold_digests(session)


def test_a_model_without_a_calibration_has_deviations_unless_that_is_refused() -> None:
    assert opened(world("auto", known=())).digest == opened(world("deviation")).digest == "deviation"
    w = world("transform", known=())
    result = w.ask(events.Opened, "a", "model-2", PAGED, SessionOptions())
    assert isinstance(result, Failure) and "run tierkv calibrate" in result.message


def test_a_new_owner_keeps_digests_whose_state_lies_in_hbm_whatever_calibrations_it_knows() -> None:
    """The state is not fitted anew, as a codec's is not."""
    w = world()
    session = opened(w)
    append(w, session, 160)
    before = [row.digest for row in session.rows]
    restarted(w, digest_models=(), digest="deviation")
    assert [row.digest for row in session.rows] == before and session.digest == "transform-12"
    (model,) = w.brain.state.models.values()
    assert model.state == session.codec_state and model.state_bytes == STATE
    append(w, session, 5)


def test_sessions_of_two_owners_may_have_digests_of_two_forms() -> None:
    w = world(known=(), frames=60)
    old = opened(w)
    append(w, old, 40)
    w.feed(events.Tick())  # fits the codec
    w.settle()
    w.adopt_plans(old, acknowledge=True)
    restarted(w, digest_models=KNOWN)
    assert old.digest == "deviation"
    new = opened(w)
    assert new.digest == "transform-12"
    assert len({model.key for model in w.brain.state.models.values()}) == 2


def test_a_session_with_a_form_that_there_is_not_is_lost() -> None:
    w = world()
    session = opened(w)
    append(w, session, 3)
    session.digest = "box"
    brain = Brain(config(epoch=2), validate=True)
    (answer,) = brain.handle(events.Attached("a", (w._state(session),)), 0.0)
    assert answer == events.Adopted("a", ((session.id, 0, 48),))


def test_a_session_whose_model_has_no_state_yet_gets_what_the_new_owner_chooses() -> None:
    w = world()
    session = opened(w)
    restarted(w, digest_models=())
    (model,) = w.brain.state.models.values()
    assert model.digest_form.name == "deviation"
    append(w, session, 160)
    assert session.digest == "deviation" and cold_digests(session)


def test_deviations_of_a_model_that_was_never_fitted_stay_deviations() -> None:
    """They have no state, and lie in HBM all the same."""
    w = world(known=())
    session = opened(w)
    w.writes_poison = True  # the codec refuses such pages
    append(w, session, 60)
    assert session.codec_state == NOWHERE and cold_digests(session)
    before = [row.digest for row in session.rows]
    restarted(w, digest_models=KNOWN)
    (model,) = w.brain.state.models.values()
    assert model.digest_form.name == "deviation" and [row.digest for row in session.rows] == before
    restarted(w, digest_models=(), digest="transform")
    assert session.digest == "deviation" and cold_digests(session)


@pytest.mark.parametrize("stale_first", [True, False])
def test_sessions_that_share_pages_stay_of_one_model(stale_first: bool) -> None:
    """One of them has not read the plan yet that names the state."""
    w = world(frames=60)
    old = opened(w)
    append(w, old, 8)
    w.fork(old)
    w.settle()
    child = next(session for session in w.sessions.values() if session is not old)
    fitted, stale = (child, old) if stale_first else (old, child)
    for _ in range(40):
        assert isinstance(w.reserve(fitted, 1), Reserved)
        w.write(fitted, [Run(Region.USER, 16)], 0)
        w.feed(events.Tick())
        for move in list(w.moves):
            w.finish_move(move)
    w.adopt_plans(fitted, acknowledge=True)
    assert fitted.codec_state != NOWHERE and stale.codec_state == NOWHERE
    restarted(w, digest_models=())
    (model,) = w.brain.state.models.values()
    w.adopt_plans(stale, acknowledge=True)
    assert model.digest_form.name == fitted.digest == "transform-12"
    assert model.state == fitted.codec_state and model.sessions == {old.id, child.id}


def test_a_calibrated_model_is_served_where_pages_fill_hbm_and_its_digests_state_finds_no_room() -> None:
    known = (*KNOWN, msgspec.structs.replace(KNOWN[0], model_id="model-3"))
    for setting, form in (("auto", "deviation"), ("transform", None)):
        w = world("auto", known)
        append(w, opened(w), 160)
        w.brain.state.config = replace(w.config, digest=setting)
        result = w.ask(events.Opened, "a", "model-3", PAGED, SessionOptions())
        models = {model.model_id: model.digest_form.name for model in w.brain.state.models.values()}
        assert models.get("model-3") == form and isinstance(result, Failure) == (form is None)
        assert w.brain.state.hbm.free_bytes < aligned(STATE)
