"""Settings of the forms that pages take: the middle one, and codecs of single layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.daemon.test_config import _no_outside_settings  # noqa: F401  # used by every test
from tierkv.daemon.config import DaemonConfig, load_config
from tierkv.daemon.incarnation import brain_config
from tierkv.errors import ConfigError

# The middle form -------------------------------------------------------------------------------------------------


def test_there_is_no_middle_form_unless_it_is_set(tmp_path: Path) -> None:
    file = tmp_path / "tierkv.toml"
    assert load_config().config.middle == ""
    file.write_text('middle = "nf4"\nmiddle_below = 0.8\n')
    given = load_config(file=file).config
    assert (given.middle, given.middle_below) == ("nf4", 0.8)
    brain = brain_config(given, 1 << 20, 1 << 20, 1)
    assert (brain.middle, brain.middle_below) == ("nf4", 0.8)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"middle": "k3v2"},
            "middle = 'k3v2'.*is not one of kivi2, int8, nf4, nor empty for none: attention sums",
        ),
        ({"middle": "nf5"}, "did you mean 'nf4'"),
        (
            {"middle": "nf4", "backup": "never"},
            "middle = 'nf4' with backup = \"never\": a page becomes low-bit from",
        ),
        ({"middle": "nf4", "host": 0}, "middle = 'nf4' with host = 0"),
        ({"middle_below": 0.5}, "middle_below = 0.5 without a middle form"),
    ],
)
def test_a_middle_form_that_cannot_be_is_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(given)


# Layers ----------------------------------------------------------------------------------------------------------


def test_layers_may_have_codecs_of_their_own_from_every_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tierkv.toml"
    assert load_config().config.low_bit_form == "k3v2"
    given = load_config({"layer_codecs": "-1=kivi2, 00=k3v2"}).config
    assert given.layer_codecs == {"-1": "kivi2", "0": "k3v2"}
    assert given.low_bit_form == "k3v2,0=k3v2,-1=kivi2"
    monkeypatch.setenv("TIERKV_LAYER_CODECS", "3=kivi2")
    assert load_config().config.low_bit_form == "k3v2,3=kivi2"
    monkeypatch.delenv("TIERKV_LAYER_CODECS")
    file.write_text('codec = "kivi2"\n[layer_codecs]\n0 = "k3v2"\n"-2" = "k3v2"\n')
    from_file = load_config(file=file).config
    assert from_file.low_bit_form == "kivi2,0=k3v2,-2=k3v2"
    again = DaemonConfig(**json.loads(from_file.model_dump_json()))
    assert again == from_file, "an owner restarts with what it was given"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("0=kivi3", "layer_codecs = '0=kivi3'.*has 'kivi3' for layer 0.*did you mean 'kivi2'"),
        ("first=kivi2", "names 'first', which is not a layer"),
        ("0", "is not a list of layers"),
        ("0=kivi2,00=k3v2", "names a layer twice"),
    ],
)
def test_a_layers_codec_that_cannot_be_is_refused(given: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config({"layer_codecs": given})
