"""What went wrong with a session and is not told yet: steps are not waited for, so the next one raises it."""

from __future__ import annotations

from tierkv.errors import PagesLost, TierKVError


class Troubles:
    """Of session `session`. Call it with the session's lock held."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._error: TierKVError | None = None
        self.lost: list[tuple[int, int]] = []
        """Token ranges that no replica holds."""
        self.broken: TierKVError | None = None
        """The table is not the daemon's any more: every further step raises it."""

    @property
    def everything_lost(self) -> bool:
        """The daemon knows nothing of the session."""
        return isinstance(self.broken, PagesLost)

    def told(self, error: TierKVError) -> None:
        """A report was refused: raised once."""
        self._error = error

    def broke(self, error: TierKVError) -> None:
        """The session cannot go on; the first reason stands."""
        self.broken = self.broken or error

    def cropped(self, length: int) -> None:
        """Tokens from `length` on are forgotten, lost ones among them."""
        self.lost = [(start, min(stop, length)) for start, stop in self.lost if start < length]

    def check(self) -> None:
        """Raise what happened, if anything did."""
        if self.broken is not None:
            raise self.broken
        if self.lost:
            raise PagesLost(
                f"the daemon lost tokens {self.lost} of session {self._session}: "
                f"crop to {self.lost[0][0]} and prefill again",
                tuple(self.lost),
            )
        if self._error is not None:
            error, self._error = self._error, None
            raise error
