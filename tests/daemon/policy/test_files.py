"""Policies in files: what `dumps` writes `load` reads, and mistakes are named."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierkv.daemon import policy
from tierkv.daemon.policy import Policy, Thresholds
from tierkv.daemon.policy.memdecay import MemDecay
from tierkv.errors import ConfigError
from tierkv.regions import REGION_NAMES, Region

NUMBERS = st.floats(0, 1e6, allow_subnormal=False)
SHARES = st.floats(0, 1, exclude_max=True)
SETTINGS: dict[str, st.SearchStrategy[object]] = {
    "aggregate": st.sampled_from(["mean", "max", "top2", "relief"]),
    "thresholds": st.builds(Thresholds, *[st.floats(allow_nan=False)] * 4),
    "base": st.dictionaries(st.sampled_from(Region), NUMBERS),
    "half_life": st.dictionaries(st.sampled_from(REGION_NAMES), st.floats(1e-3, allow_nan=False)),
    **dict.fromkeys(["rho", "a"], SHARES),
    **dict.fromkeys(["alpha", "tau_factor", "beta"], NUMBERS),
    **dict.fromkeys(["sink_tokens", "near_tokens", "recent_tokens", "seed"], st.integers(0, 10**9)),
    **dict.fromkeys(["window", "kernel"], st.integers(1, 10**3)),
}


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    name = draw(st.sampled_from(sorted(policy.POLICIES)))
    known = [field.name for field in fields(policy.POLICIES[name])]
    chosen = draw(st.sets(st.sampled_from(known)))
    return policy.get(name, **{key: draw(SETTINGS[key]) for key in sorted(chosen)})


def write(folder: Path, text: str) -> Path:
    file = folder / "policy.toml"
    file.write_text(text)
    return file


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=policies())
def test_what_is_written_is_read_back_equal(tmp_path: Path, chosen: Policy) -> None:
    assert policy.load(write(tmp_path, policy.dumps(chosen))) == chosen


def test_a_file_may_name_a_few_settings_only(tmp_path: Path) -> None:
    chosen = policy.load(
        write(
            tmp_path,
            'policy = "memdecay"\nrho = 0.5\n[base]\nplan = 2\n[half_life]\nsystem = inf\n'
            "[thresholds]\noffload_below = 0.2\n",
        )
    )
    default = MemDecay()
    assert isinstance(chosen, MemDecay)
    assert (chosen.rho, chosen.alpha, chosen.base[Region.PLAN]) == (0.5, default.alpha, 2.0)
    assert chosen.base[Region.USER] == default.base[Region.USER]
    assert chosen.half_life[Region.SYSTEM] == float("inf")
    assert chosen.thresholds == default.thresholds._replace(offload_below=0.2)


def test_a_file_shows_every_setting() -> None:
    shown = tomllib.loads(policy.dumps(MemDecay()))
    assert set(shown) == {"policy", *(field.name for field in fields(MemDecay))}
    assert shown["half_life"]["retrieval"] == 66.0 and set(shown["base"]) == set(REGION_NAMES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('policy = "memdecay"\nrhoo = 0.5', r"'rhoo' \(did you mean 'rho'\?\).*tau_factor"),
        ('policy = "memdecya"', r"did you mean 'memdecay'"),
        ("rho = 0.5", 'write policy = "memdecay"'),
        ('policy = "memdecay"\n[base]\nplann = 1.0', r"base has no 'plann' \(did you mean 'plan'\?\)"),
        ('policy = "memdecay"\n[thresholds]\ndrop = 1.0', r"'drop' \(did you mean 'drop_below'\?\)"),
        ('policy = "memdecay"\nrho = "high"', "rho: expected float, got str"),
        ('policy = "memdecay"\nrho = 1.0', "rho: expected float < 1"),
        ('policy = "memdecay"\nalpha = nan', "alpha: expected float >= 0"),
        ('policy = "memdecay"\nalpha = inf', "alpha: expected float <= 1000000"),
        ('policy = "memdecay"\n[thresholds]\ndrop_below = nan', "threshold is not a number"),
        ('policy = "memdecay"\n[base]\nplan = inf', "base.*<= 1000000"),
        ('policy = "memdecay"\n[half_life]\nplan = 0', "half_life.*>= 0.001"),
        ('policy = "memdecay"\nbase = 1.0', "is not a table"),
        ('policy = "h2o"\naggregate = "median"', "aggregate = 'median' .*mean, max, top2, relief"),
        ('policy = "h2o"\n[base]\nplan = 1.0', "no setting 'base'"),
        ("policy = ", "cannot be read"),
    ],
)
def test_mistakes_are_named_with_the_file(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        policy.load(write(tmp_path, text))
    assert "policy.toml" in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        policy.load(tmp_path / "absent.toml")


def test_numbers_of_numpy_are_written_as_numbers(tmp_path: Path) -> None:
    half_life = {region: np.float64(3.5) for region in Region}
    chosen = MemDecay(rho=np.float64(0.75), half_life=half_life)
    read = policy.load(write(tmp_path, policy.dumps(chosen)))
    assert isinstance(read, MemDecay)
    assert (read.rho, read.half_life[Region.PLAN]) == (0.75, 3.5)
    assert policy.get("memdecay", rho=np.float64(0.75), half_life=half_life) == read
