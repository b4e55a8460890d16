"""Policies by name and settings, and as TOML files (what a calibration writes and a study reads).

    policy = "memdecay"
    rho = 0.9

    [half_life]          # regions that are left out keep their default
    plan = 52.0

    [thresholds]
    offload_below = 0.1

Settings are the fields of the policy's dataclass. Nothing is ignored: a key that does not exist is an error.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Final, get_args

import msgspec
import numpy as np

from tierkv.daemon.policy.contract import Aggregate, Policy, Thresholds
from tierkv.daemon.policy.ema import Ema
from tierkv.daemon.policy.full import Full
from tierkv.daemon.policy.h2o import H2O
from tierkv.daemon.policy.lift import MemDecayLift
from tierkv.daemon.policy.memdecay import MemDecay
from tierkv.daemon.policy.random import Random
from tierkv.daemon.policy.snapkv import SnapKV
from tierkv.daemon.policy.streaming import Streaming
from tierkv.daemon.policy.tova import Tova
from tierkv.errors import ConfigError
from tierkv.regions import REGION_NAMES, Region, parse_region

POLICIES: Final[dict[str, type[Policy]]] = {
    policy.name: policy
    for policy in (MemDecay, MemDecayLift, Ema, H2O, Streaming, Random, Tova, SnapKV, Full)
}

BY_REGION = ("base", "half_life")
"""Settings that are a table of regions."""


def get(name: str, /, **settings: object) -> Policy:
    """The policy of that name, its defaults replaced by `settings`.

    Tables may be partial, and be given with regions (or their names) and with `Thresholds` or their names as keys.

    Raises:
        ConfigError: no such policy, setting or region, or a value of the wrong type or out of range.
    """
    if name not in POLICIES:
        raise ConfigError(
            f"policy {name!r} does not exist{_suggest(name, POLICIES)}; use one of {', '.join(POLICIES)}"
        )
    kind = POLICIES[name]
    default = msgspec.convert({}, kind)
    known = [field.name for field in fields(kind)]
    values: dict[str, object] = {}
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(
                f"policy {name!r} has no setting {key!r}{_suggest(key, known)}; it has {', '.join(known)}"
            )
        if key == "thresholds":
            given = value._asdict() if isinstance(value, Thresholds) else value
            merged = default.thresholds._asdict() | _table(name, key, given, Thresholds._fields)
            value = list(merged.values())
        elif key in BY_REGION:
            labels = {(k.label if isinstance(k, Region) else k): v for k, v in _items(name, key, value)}
            regions = {parse_region(k): v for k, v in _table(name, key, labels, REGION_NAMES).items()}
            value = getattr(default, key) | regions
        elif key == "aggregate" and value not in get_args(Aggregate):
            raise ConfigError(
                f"policy {name!r}: aggregate = {value!r} does not exist; use one of {', '.join(get_args(Aggregate))}"
            )
        values[key] = value
    try:
        policy = msgspec.convert(msgspec.to_builtins(values, enc_hook=_plain), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policy {name!r}: {_say(error)}; its settings are {', '.join(known)}") from None
    if any(map(math.isnan, policy.thresholds)):
        raise ConfigError(
            f"policy {name!r}: a threshold is not a number; use inf or -inf for always and never"
        )
    return policy


def load(file: Path) -> Policy:
    """The policy that a TOML file describes.

    Raises:
        ConfigError: the file cannot be read, or see `get`.
    """
    file = Path(file)
    try:
        if file.exists() and not file.is_file():
            raise ConfigError(f"the policy file {file} cannot be read: it is no file")
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
        name = settings.pop("policy", None)
        if not isinstance(name, str):
            raise ConfigError(f'the policy file {file} does not say which policy; write policy = "memdecay"')
        try:
            return get(name, **settings)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the policy file {file} cannot be read: {error}") from None
    except RecursionError:
        raise ConfigError(f"the policy file {file} cannot be read: it is nested too deeply") from None


def dumps(policy: Policy) -> str:
    """The TOML that `load` reads back as an equal policy: every setting, tables last."""
    plain: list[str] = [f'policy = "{policy.name}"']
    tables: list[str] = []
    for field in fields(policy):
        value = getattr(policy, field.name)
        if field.name == "thresholds":
            rows = value._asdict().items()
        elif field.name in BY_REGION:
            rows = [(region.label, value[region]) for region in Region]
        else:
            plain.append(f"{field.name} = {_toml(value)}")
            continue
        tables.append("\n".join([f"[{field.name}]", *(f"{key} = {_toml(row)}" for key, row in rows)]))
    return "\n\n".join(["\n".join(plain), *tables]) + "\n"


def _plain(value: object) -> object:
    """A number of numpy (a calibration's) as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _toml(value: object) -> str:
    """A number as Python writes it (TOML reads the same; numpy's too), a name in quotes."""
    if isinstance(value, str):
        return f'"{value}"'
    return repr(value if type(value) is int else float(value))  # type: ignore[arg-type]  # settings are numbers


def _items(name: str, key: str, value: object) -> Iterable[tuple[object, object]]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"policy {name!r}: {key} = {value!r} is not a table")
    return value.items()


def _table(name: str, key: str, value: object, known: tuple[str, ...]) -> dict[str, object]:
    table: dict[str, object] = {}
    for row, entry in _items(name, key, value):
        if row not in known:
            raise ConfigError(
                f"policy {name!r}: {key} has no {row!r}{_suggest(str(row), known)}; it has {', '.join(known)}"
            )
        table[str(row)] = entry
    return table


def _suggest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _say(error: msgspec.ValidationError) -> str:
    """`Expected `float`, got `str` - at `$.rho`` as `rho: expected float, got str`."""
    what, _, where = str(error).replace("`", "").partition(" - at $.")
    return f"{where}: {what[0].lower()}{what[1:]}"
