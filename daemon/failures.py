"""Errors as the answers that tell them."""

from __future__ import annotations

from tierkv.errors import Backpressure, TierKVError
from tierkv.protocol import Failure


def refusal(error: TierKVError) -> Failure:
    """What was asked cannot be, or not now."""
    return Failure(error.code, str(error), error.retry_after if isinstance(error, Backpressure) else 0.0)


def fault(error: Exception) -> Failure:
    """The daemon itself failed."""
    return Failure(TierKVError.code, f"{type(error).__name__} in the daemon: {error}")
