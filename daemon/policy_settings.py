"""A policy's settings as values that any JSON keeps: what the daemon's configuration carries of a policy file.

The file is read once, where the daemon starts: an owner that Ray restarts has these values, whatever became of it.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from typing import TypeAlias

from tierkv.daemon.policy import Policy, dumps, get

Value: TypeAlias = int | float | str
Settings: TypeAlias = dict[str, Value | dict[str, Value]]

INFINITE = {"inf": math.inf, "-inf": -math.inf}
"""Numbers that JSON lacks, by name."""


def settings_of(policy: Policy) -> Settings:
    """Every setting but the policy's name, in the shape of its TOML; infinite numbers as `inf` and `-inf`."""
    settings = tomllib.loads(dumps(policy))
    del settings["policy"]
    return _changed(settings, _named)


def policy_of(name: str, settings: Settings) -> Policy:
    """The policy of that name with those settings; the others keep their default. Raises `ConfigError`."""
    return get(name, **_changed(settings, _number))


def _changed(settings: Settings, change: Callable[[Value], Value]) -> Settings:
    return {
        key: {k: change(v) for k, v in value.items()} if isinstance(value, dict) else change(value)
        for key, value in settings.items()
    }


def _named(value: Value) -> Value:
    return value if isinstance(value, str) or math.isfinite(value) else str(value)


def _number(value: Value) -> Value:
    return INFINITE.get(value, value) if isinstance(value, str) else value
