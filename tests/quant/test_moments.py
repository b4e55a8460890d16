"""What moments must be, and what a file of them is worth when it is damaged, foreign or of another model."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.quant import NAMES, get
from tierkv.quant.moments import (
    VERSION,
    About,
    KeyTransform,
    Moments,
    check,
    load,
    load_keys,
    plain_keys,
    read_about,
    save,
    standard,
)

GEOMETRY = Geometry(2, 3, 4, "float32")
ABOUT = About("models/tiny@0123456789abcdef", 2, 3, 4, "float32", ("prose: types", "code: argparse"), 1234)

KEYS = plain_keys(GEOMETRY)


def random_moments(seed: int = 0) -> Moments:
    random = np.random.default_rng(seed)

    def square() -> np.ndarray:
        half = random.standard_normal((2, 3, 4, 6)).astype(np.float32)
        return half @ half.swapaxes(-1, -2)

    mean = random.standard_normal((2, 3, 4)).astype(np.float32)
    return Moments(mean, *(square() for _ in Moments._fields[1:]))


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    moments, path = random_moments(), tmp_path / "new" / "a.npz"
    save(path, moments, KEYS, ABOUT)
    read, about = load(path)
    assert about == ABOUT == read_about(path)
    for before, after in zip(moments, read, strict=True):
        np.testing.assert_array_equal(before, after)
    assert [entry.name for entry in path.parent.iterdir()] == ["a.npz"]


def test_a_file_gives_back_how_keys_are_transformed(tmp_path: Path) -> None:
    keys = KeyTransform(*(np.random.default_rng(1).random(part.shape, np.float32) + 1 for part in KEYS))
    save(tmp_path / "a.npz", random_moments(), keys, ABOUT)
    read, about = load_keys(tmp_path / "a.npz")
    assert about == ABOUT
    for before, after in zip(keys, read, strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (KEYS._replace(variance=KEYS.variance[:, :, :8]), "pages_variance is float32 of shape"),
        (KEYS._replace(axes=KEYS.axes.astype(np.float64)), "pages_axes is float64"),
        (KEYS._replace(mean=np.full_like(KEYS.mean, np.nan)), "pages_mean holds NaN"),
        (KEYS._replace(weights=KEYS.weights - 2), "weights holds one below 0"),
        (KEYS._replace(variance=0 * KEYS.variance), "a variance that is 0|not above 0"),
    ],
)
def test_a_transform_that_cannot_be_is_not_saved(tmp_path: Path, bad: KeyTransform, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        save(tmp_path / "a.npz", random_moments(), bad, ABOUT)


def test_a_later_calibration_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    save(path, random_moments(0), KEYS, ABOUT)
    save(path, random_moments(1), KEYS, ABOUT)
    np.testing.assert_array_equal(load(path)[0].key_fisher, random_moments(1).key_fisher)


def test_what_cannot_be_written_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    save(path, random_moments(), KEYS, ABOUT)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="it says"):
        save(path, random_moments(), KEYS, msgspec.structs.replace(ABOUT, layers=3))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="name another file"):
        save(tmp_path / "file" / "a.npz", random_moments(), KEYS, ABOUT)
    assert path.read_bytes() == before and {entry.name for entry in tmp_path.iterdir()} == {"a.npz", "file"}


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.7, 0.999])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "a.npz"
    save(path, random_moments(), KEYS, ABOUT)
    os.truncate(path, int(kept * path.stat().st_size))
    with pytest.raises(ConfigError, match=r"a\.npz is not a whole calibration.*tierkv calibrate"):
        load(path)


def test_a_flipped_bit_is_seen(tmp_path: Path) -> None:
    path, moments = tmp_path / "a.npz", random_moments()
    save(path, moments, KEYS, ABOUT)
    data = bytearray(path.read_bytes())
    data[data.index(moments.query_second.tobytes()) + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="not a whole calibration"):
        load(path)


def test_a_file_whose_damage_reads_as_a_password_is_not_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    save(path, random_moments(), KEYS, ABOUT)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1  # a flag of the first entry in zip's directory: encrypted
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="not a whole calibration"):
        read_about(path)


@pytest.mark.parametrize("member", ["about", "pages_mean"])
@pytest.mark.parametrize("damage", [b"no array", b"\x93NUMPY\x01\x00\x07\x00{'a': (\n"])
def test_a_file_of_which_a_member_is_no_array_is_not_a_whole_one(
    tmp_path: Path, member: str, damage: bytes
) -> None:
    """Its checksums are right: it was written so."""
    whole, path = tmp_path / "whole.npz", tmp_path / "a.npz"
    save(whole, random_moments(), KEYS, ABOUT)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, damage if name == f"{member}.npy" else source.read(name))
    with pytest.raises(ConfigError, match=r"a\.npz is not a whole calibration"):
        load_keys(path)


def test_files_of_others_are_refused_by_name(tmp_path: Path) -> None:
    text, array, archive, pickled = (tmp_path / name for name in ("t.npz", "n.npz", "z.npz", "p.npz"))
    text.write_text("moments")
    with array.open("wb") as stream:
        np.save(stream, np.zeros(3))
    np.savez(archive, weights=np.zeros(3))
    np.savez(pickled, about=np.array([{"version": VERSION}], dtype=object), allow_pickle=True)
    for path in (text, array, archive, pickled):
        with pytest.raises(ConfigError, match=rf"{path.name} is not a whole calibration.*tierkv calibrate"):
            load(path)
    with pytest.raises(ConfigError, match=r"nowhere\.npz cannot be read"):
        load(tmp_path / "nowhere.npz")


def test_a_file_of_another_version_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    said = msgspec.json.encode({"version": VERSION + 1, **msgspec.structs.asdict(ABOUT)})
    np.savez(path, about=np.frombuffer(said, np.uint8), **random_moments()._asdict())
    with pytest.raises(ConfigError, match=f"version {VERSION + 1}, and this tierkv reads {VERSION}"):
        load(path)


def test_moments_that_cannot_be_are_refused(tmp_path: Path) -> None:
    good = random_moments()
    assert check(good) == (2, 3, 4)
    lopsided, infinite = good.value_metric.copy(), good.key_mean.copy()
    lopsided[1, 2, 0, 3] += 1
    infinite[0, 0, 0] = np.inf
    for bad, said in (
        (good._replace(key_mean=good.key_mean[0]), "key_mean has the shape"),
        (good._replace(value_fisher=good.value_fisher[:1]), "value_fisher is float32 of shape"),
        (good._replace(key_covariance=good.key_covariance.astype(np.float64)), "key_covariance is float64"),
        (good._replace(key_mean=infinite), "key_mean holds NaN or infinity"),
        (good._replace(value_metric=lopsided), "value_metric is not symmetric"),
    ):
        with pytest.raises(ConfigError, match=said):
            check(bad)
        with pytest.raises(ConfigError, match=said):
            save(tmp_path / "a.npz", bad, KEYS, ABOUT)
    assert not list(tmp_path.iterdir())


def test_a_model_is_known_by_its_hash_wherever_it_lies() -> None:
    assert ABOUT.is_of("models/tiny@0123456789abcdef")
    assert ABOUT.is_of("/elsewhere/tiny@0123456789abcdef")
    assert not ABOUT.is_of("models/tiny@0123456789abcdee")
    plain = msgspec.structs.replace(ABOUT, model_id="a@1")  # a version, no hash
    assert plain.is_of("a@1") and not plain.is_of("b@1")


def test_pages_of_any_dtype_and_length_are_fitted_from_moments_of_their_shape() -> None:
    assert ABOUT.fits(GEOMETRY) and ABOUT.fits(Geometry(2, 3, 4, "bfloat16", 32))
    assert not any(ABOUT.fits(Geometry(*shape, "float32")) for shape in ((1, 3, 4), (2, 1, 4), (2, 3, 8)))


def test_standard_moments_are_those_of_normal_values() -> None:
    moments = standard(GEOMETRY)
    assert check(moments) == (2, 3, 4)
    draws = np.random.default_rng(0).standard_normal((100_000, 4))
    np.testing.assert_allclose(moments.value_second[1, 2], draws.T @ draws / len(draws), atol=0.02)
    np.testing.assert_allclose(moments.key_mean[1, 2], draws.mean(0), atol=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_every_codec_fits_a_state_of_the_announced_size_from_moments(name: str) -> None:
    codec, geometry = get(name), Geometry(2, 3, 64, "float32")
    state = codec.fit_moments(geometry, standard(geometry))
    assert (state.dtype, state.size) == (np.float32, codec.state_floats(geometry))
    assert np.isfinite(state).all()
