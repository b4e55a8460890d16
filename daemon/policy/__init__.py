"""Score policies: pure functions over per-token arrays, selectable by name."""

from __future__ import annotations

from collections.abc import Callable

from tierkv.daemon.policy.contract import Policy, Thresholds, TokenState
from tierkv.daemon.policy.memdecay import MemDecay
from tierkv.errors import ConfigError

POLICIES: dict[str, Callable[[], Policy]] = {MemDecay.name: MemDecay}


def get(name: str) -> Policy:
    """The policy of that name with its paper's defaults. Raises `ConfigError`."""
    if name not in POLICIES:
        raise ConfigError(f"policy {name!r} does not exist; use one of {', '.join(POLICIES)}")
    return POLICIES[name]()


__all__ = ["POLICIES", "Policy", "Thresholds", "TokenState", "get"]
