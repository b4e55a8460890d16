"""What a client hands to its line (`tierkv.line`), and what the line asks of its client."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tierkv.fence import Fence
from tierkv.protocol import Attached, Operation, Plan, Result

RESEND_SECONDS = 1.0
"""First wait for an answer, which then doubles."""


@dataclass(eq=False, slots=True)
class Call:
    """A request and what to do with its answer. `done` runs once, on the line's thread or a driver's; be quick.

    `session` is -1 where the operation names none that exists. `number` orders the session's foldable operations
    (commits and observations); 0 for all others.
    """

    op: Operation
    done: Callable[[Result], object]
    session: int = -1
    number: int = 0
    buffers: list[bytes] = field(default_factory=list)
    deadline: float = 0.0  # monotonic; 0: none
    after: Fence | None = None  # leaves when it is passed, and after those before it that wait for one
    id: int = 0
    frames: list[bytes] = field(default_factory=list)
    due: float = 0.0
    wait: float = RESEND_SECONDS


class Attachment(NamedTuple):
    """An attach that succeeded. `folded` maps each session handed over to the last `Call.number` it contains."""

    stream: socket.socket
    reply: Attached
    folded: dict[int, int]


class Host(Protocol):
    """What the line asks of its client, from its own thread or a driver's."""

    def attach(self, timeout: float) -> Attachment:
        """Attach, handing sessions over. `OwnerUnavailable` when there is nobody (yet)."""
        ...

    def plans(self, plans: list[Plan]) -> None: ...

    def take_seen(self) -> dict[int, int]:
        """Table versions adopted since the last call, by session, which kernels are done with those before."""
        ...

    def unseen(self) -> bool:
        """There are others, which wait for kernels."""
        ...


__all__ = ["RESEND_SECONDS", "Attachment", "Call", "Host"]
