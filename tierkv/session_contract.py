"""What a session needs of its client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tierkv.fence import Fence
from tierkv.opening import Opener
from tierkv.protocol import Observing
from tierkv.residency import Pools

if TYPE_CHECKING:
    from tierkv.session import Session


class Daemon(Pools, Opener, Protocol):
    """The client as its sessions see it."""

    reserve_ahead: int

    @property
    def observing(self) -> Observing: ...

    def check_process(self) -> None: ...

    def fence(self) -> Fence | None:
        """Passed when this thread's kernels are done with the pool; None: they are."""
        ...

    def adopted(self, session: int, version: int, fence: Fence | None) -> None:
        """A plan is in use: acknowledge it soon after `fence`, before which kernels read what was there before."""
        ...

    def forget(self, session: int) -> None: ...

    def enroll(self, session: Session) -> None: ...
