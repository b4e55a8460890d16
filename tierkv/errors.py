"""Every error that tierkv raises on purpose.

TierKVError
├── ConfigError              a setting that cannot work (sizes, paths, names)
├── ProtocolError            a frame that cannot be read, or a version that does not match
├── StateDirectoryLocked     another daemon owns this state directory
├── UnsupportedModel         attention that pages cannot serve, refused at attach
├── OwnerUnavailable         no daemon answered before the deadline (retryable)
├── RequestError             the daemon understood the request and refused it
│   ├── UnknownSession
│   ├── UnknownRegion
│   ├── GeometryMismatch
│   └── BudgetTooSmall
├── CapacityError
│   ├── Backpressure         room is being made: retry after `retry_after` seconds
│   └── OutOfCapacity        every tier is full and nothing may be dropped (not retryable)
└── PagesLost                token ranges whose bytes no replica holds any more

Each class has a `code`, its name on the wire; `from_wire` turns a code back into its class.
"""

from __future__ import annotations

from typing import ClassVar


class TierKVError(Exception):
    """Base of the tree. The message says what happened, the value, and what to do next."""

    code: ClassVar[str] = "error"


class ConfigError(TierKVError):
    code = "config"


class ProtocolError(TierKVError):
    code = "protocol"


class StateDirectoryLocked(TierKVError):
    code = "state-directory-locked"


class UnsupportedModel(TierKVError):
    code = "unsupported-model"


class OwnerUnavailable(TierKVError):
    code = "owner-unavailable"


class RequestError(TierKVError):
    code = "request"


class UnknownSession(RequestError):
    code = "unknown-session"


class UnknownRegion(RequestError):
    code = "unknown-region"


class GeometryMismatch(RequestError):
    code = "geometry-mismatch"


class BudgetTooSmall(RequestError):
    code = "budget-too-small"


class CapacityError(TierKVError):
    code = "capacity"


class Backpressure(CapacityError):
    """Room is being made. `retry_after` is in seconds."""

    code = "backpressure"

    def __init__(self, message: str = "the pool is full for the moment", retry_after: float = 0.005) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class OutOfCapacity(CapacityError):
    code = "out-of-capacity"


class PagesLost(TierKVError):
    """`ranges` are half-open token ranges `[start, stop)` of the session that must be prefilled again."""

    code = "pages-lost"

    def __init__(self, message: str, ranges: tuple[tuple[int, int], ...] = ()) -> None:
        super().__init__(message)
        self.ranges = ranges


def _tree(root: type[TierKVError]) -> dict[str, type[TierKVError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def from_wire(code: str, message: str, retry_after: float = 0.0) -> TierKVError:
    """The error that a reply of the daemon names; unknown codes become `TierKVError`."""
    kind = _tree(TierKVError).get(code, TierKVError)
    if kind is Backpressure:
        return Backpressure(message, retry_after)
    return kind(message)


__all__ = [
    "Backpressure",
    "BudgetTooSmall",
    "CapacityError",
    "ConfigError",
    "GeometryMismatch",
    "OutOfCapacity",
    "OwnerUnavailable",
    "PagesLost",
    "ProtocolError",
    "RequestError",
    "StateDirectoryLocked",
    "TierKVError",
    "UnknownRegion",
    "UnknownSession",
    "UnsupportedModel",
    "from_wire",
]
