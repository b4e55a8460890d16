"""Which calibration a model's codec state comes from, and what happens without one."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

import tierkv
from tests.faults.pages import SMALL, step
from tests.tierkv.local_daemon import until
from tierkv.commands import app
from tierkv.daemon import calibrations
from tierkv.daemon.calibrations import UNCALIBRATED, Calibrations
from tierkv.daemon.config import DaemonConfig, load_config
from tierkv.daemon.incarnation import Incarnation
from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.prefetch.transform_digests import flat_state
from tierkv.quant import get
from tierkv.quant.contract import Floats
from tierkv.quant.moments import About, Moments, load, plain_keys, save, standard
from tierkv.quant.rotated import K3V2

GEOMETRY = Geometry(2, 3, 64, "bfloat16")
MODEL = "tiny@0123456789abcdef"
OTHER = "tiny@fedcba9876543210"


class FromMoments(K3V2):
    takes_moments: ClassVar[bool] = True

    def fit_moments(self, geometry: Geometry, moments: Moments) -> Floats:
        if moments.key_mean[0, 0, 0] < 0:
            raise ConfigError("a mean below 0")
        return np.full(self.state_floats(geometry), moments.key_mean[0, 0, 0], np.float32)


def write(
    file: Path, mean: float, model: str = MODEL, geometry: Geometry = GEOMETRY, at: float = 1e9
) -> Path:
    """A calibration whose mean key marks it, as of a time."""
    moments = standard(geometry)
    moments.key_mean[:] = mean
    shape = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)
    save(file, moments, plain_keys(geometry), About(model, *shape, "float32", ("a text",), 100))
    os.utime(file, (at, at))
    return file


def fitted(place: Path | None, model: str = MODEL, geometry: Geometry = GEOMETRY) -> tuple[float | None, str]:
    """The mean key by which the calibration is known, and what is told of the model."""
    found = Calibrations(place)
    state = found.fit(FromMoments(), model, geometry)
    return None if state is None else float(state[0]), found.fits[model]


def test_the_models_own_file_is_found_in_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "b.npz", 0.5, OTHER)
    mine = write(tmp_path / "a.npz", 0.25)
    assert fitted(tmp_path) == (0.25, f"calibrated ({mine})")
    assert fitted(tmp_path, OTHER)[0] == 0.5
    assert fitted(tmp_path, "tiny@1") == (None, UNCALIBRATED)


def test_the_latest_of_several_counts_and_one_written_meanwhile_is_found(tmp_path: Path) -> None:
    found = Calibrations(tmp_path / "calibrations")  # a folder that is not there yet
    assert found.fit(FromMoments(), MODEL, GEOMETRY) is None
    for name, mean, at in (("b.npz", 0.75, 2e9), ("a.npz", 0.5, 1e9)):
        write(tmp_path / "calibrations" / name, mean, at=at)
    state = found.fit(FromMoments(), MODEL, GEOMETRY)
    assert state is not None and state[0] == 0.75
    assert found.fits == {MODEL: f"calibrated ({tmp_path / 'calibrations' / 'b.npz'})"}


def test_one_file_may_be_named(tmp_path: Path) -> None:
    file = write(tmp_path / "moments.bin", 0.25)
    assert fitted(file)[0] == 0.25
    assert fitted(file, OTHER) == (None, UNCALIBRATED)
    assert fitted(None) == (None, UNCALIBRATED)


@pytest.mark.parametrize("fault", ["damaged", "another shape", "refused by the codec"])
def test_a_file_that_cannot_be_used_is_named_in_the_log_and_an_earlier_one_counts(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    latest = tmp_path / "new.npz"
    shape = Geometry(1, 3, 64, "bfloat16") if fault == "another shape" else GEOMETRY
    write(latest, -1.0 if fault == "refused by the codec" else 0.5, geometry=shape, at=2e9)
    if fault == "damaged":
        os.truncate(latest, 1000)
        os.utime(latest, (2e9, 2e9))
    with caplog.at_level(logging.WARNING):
        assert fitted(tmp_path) == (None, UNCALIBRATED)
        write(tmp_path / "old.npz", 0.25, at=1e9)
        assert fitted(tmp_path)[0] == 0.25
    said = caplog.messages[0]
    assert {"damaged": "new.npz", "another shape": "(1, 3, 64)", "refused by the codec": "below 0"}[
        fault
    ] in said
    assert caplog.messages[1] == f"model {MODEL} is {UNCALIBRATED}"


def test_a_state_that_is_not_finite_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Overflows(FromMoments):
        def fit_moments(self, geometry: Geometry, moments: Moments) -> Floats:
            return super().fit_moments(geometry, moments) * np.float32(np.inf)

    write(tmp_path / "a.npz", 0.25)
    found = Calibrations(tmp_path)
    assert found.fit(Overflows(), MODEL, GEOMETRY) is None
    assert found.fits == {MODEL: UNCALIBRATED}
    assert "a.npz" in caplog.messages[0] and "not finite" in caplog.messages[0]


def test_digests_are_made_by_the_latest_calibration_that_was_there_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "old.npz", 0.5)
    (tmp_path / "broken.npz").write_bytes(b"PK")
    found = Calibrations(tmp_path, digests=True)
    assert "broken.npz" in caplog.messages[0]
    write(tmp_path / "new.npz", 0.25, at=2e9)
    (about,) = found.digest_models
    assert about.model_id == MODEL
    plain = flat_state(plain_keys(GEOMETRY))
    np.testing.assert_array_equal(found.digest_state(MODEL, GEOMETRY), plain)
    for model, geometry in ((OTHER, GEOMETRY), (MODEL, Geometry(2, 3, 64, "bfloat16", 8))):
        with pytest.raises(ValueError, match="no calibration"):
            found.digest_state(model, geometry)
    assert Calibrations(tmp_path).digest_models == ()


def test_a_place_that_may_not_be_looked_into_holds_no_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(self: Path, **_: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(self))

    place = tmp_path / "private" / "calibrations"
    monkeypatch.setattr(Path, "stat", denied)
    assert fitted(place) == (None, UNCALIBRATED)
    assert "Permission denied" in caplog.messages[0]
    with pytest.raises(ConfigError, match=r"cannot be looked into.*Permission denied"):
        calibrations.check(place)


def test_a_place_that_is_named_must_be_there_and_hold_what_it_says(tmp_path: Path) -> None:
    calibrations.check(tmp_path)
    calibrations.check(write(tmp_path / "a.npz", 0.5))
    (tmp_path / "b.npz").write_bytes(b"PK")
    for place, said in (
        (tmp_path / "c.npz", "does not exist"),
        (tmp_path / "b.npz", "not a whole calibration"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config({"calibration": place})
        assert DaemonConfig(calibration=place).calibration == place  # an owner that restarts goes on


def test_by_default_calibrations_are_looked_for_beside_the_cached_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_CACHE", str(tmp_path))
    config, origins = load_config({})
    assert (config.calibration, origins["calibration"]) == (tmp_path / "calibrations", "default")
    assert load_config({"calibration": ""}).config.calibration is None


@pytest.mark.parametrize("calibrated", [True, False])
def test_a_daemon_fits_a_model_from_its_calibration_and_its_status_says_so(
    calibrated: bool, tmp_path: Path
) -> None:
    file = write(tmp_path / "moments" / "a.npz", 0.5, MODEL if calibrated else OTHER, SMALL)
    flags = {"hbm": 16 * SMALL.page_bytes, "host": 1 << 20, "codec": "klt2", "calibration": file.parent}
    owner = Incarnation(*load_config(flags | {"state_dir": tmp_path / "s"}))
    try:
        owner.service.mover.warmed.wait(60)
        assert owner.status()["calibrations"] == {}
        with tierkv.connect(tmp_path / "s") as client:
            session = client.open(SMALL, MODEL)
            for _ in range(30):  # more than the pool holds exactly
                step(client, session, 1, 16)
            until(lambda: client.stats(session.id)["pages_quantized"] > 0)
            told = f"calibrated ({file})" if calibrated else UNCALIBRATED
            assert owner.status()["calibrations"] == {MODEL: told}
            shown = CliRunner().invoke(app, ["status", "--state-dir", str(tmp_path / "s")])
            assert f"{MODEL}: {told}" in shown.output
            session.begin(0)
            from_moments = get("klt2").fit_moments(SMALL, load(file)[0])
            same = np.array_equal(session.pool.codec_state, from_moments)
            session.end()
            assert same == calibrated
    finally:
        owner.stop(drain=False)


@pytest.mark.parametrize("form", ["transform-12", "deviation"])
def test_a_calibrated_models_session_reads_the_digests_that_the_daemon_is_set_to(
    form: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "moments" / "a.npz", 0.5, geometry=SMALL)
    flags = {"hbm": 32 * SMALL.page_bytes, "host": 1 << 20, "digest_share": 0.5, "calibration": file.parent}
    digest = {"digest": form.partition("-")[0], "digest_bytes": 12}
    owner = Incarnation(*load_config(flags | digest | {"state_dir": tmp_path / "s"}))
    try:
        owner.service.mover.warmed.wait(60)
        with tierkv.connect(tmp_path / "s") as client:
            if form != "deviation":
                with pytest.raises(ConfigError, match="no calibration of 'tiny@fedcba9876543210'"):
                    client.open(SMALL, OTHER)
            session = client.open(SMALL, MODEL)
            until(lambda: owner.status()["digests"] == {MODEL: [form]})
            shown = CliRunner().invoke(app, ["status", "--state-dir", str(tmp_path / "s")])
            assert f"{MODEL}: {form}" in shown.output
            session.begin(0)
            digests = session.pool.digests
            assert (digests is None) == (form != "deviation")  # its state is not fitted yet
            session.end()
            for _ in range(60):
                step(client, session, 1, 16)
            until(lambda: client.stats(session.id)["pages_quantized"] > 0)
            session.begin(0)
            digests = session.pool.digests
            assert digests is not None and digests.shape.record_bytes == (12 if form != "deviation" else 72)
            session.end()
    finally:
        owner.stop(drain=False)
