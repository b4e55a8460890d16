"""Figures kept as they are measured, so that an interrupted run can go on (`--resume`)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Parts(Generic[T]):
    """Two levels of names over figures of type `kind`. Reads `file` where `resume` says so, and writes it anew at each
    `keep`.
    """

    def __init__(self, file: Path, resume: bool, kind: type[T]) -> None:
        self.file = file
        self._found: dict[str, dict[str, T]] = {}
        if resume and file.is_file():
            try:
                self._found = msgspec.json.decode(file.read_bytes(), type=dict[str, dict[str, kind]])  # type: ignore[valid-type]
            except msgspec.MsgspecError as error:
                logger.warning(
                    "%s is not what was written there (%s): everything is measured anew", file, error
                )

    def under(self, name: str) -> dict[str, T]:
        """What is known there; a caller adds to it."""
        return self._found.setdefault(name, {})

    def keep(self) -> None:
        """Whole or not at all."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.file.with_name(f"{self.file.name}.part")
        fresh.write_bytes(msgspec.json.encode(self._found))
        fresh.rename(self.file)
