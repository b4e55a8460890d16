"""Losses kept as they are measured, so that an interrupted run can go on (`--resume`).

A form's name stands for it: after a codec or its state has changed, start without `--resume`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from tierkv.benchmarks.quant.inputs import Text
from tierkv.benchmarks.quant.quality import Loss

Found = dict[str, dict[str, Loss]]
"""By text (a hash of its tokens), then by form."""

logger = logging.getLogger(__name__)


class Parts:
    """Reads `file` where `resume` says so, and writes it anew at each `keep`."""

    def __init__(self, file: Path, resume: bool) -> None:
        self.file = file
        self._found: Found = {}
        if resume and file.is_file():
            try:
                self._found = msgspec.json.decode(file.read_bytes(), type=Found)
            except msgspec.MsgspecError as error:
                logger.warning(
                    "%s is not what was written there (%s): all inputs are measured anew", file, error
                )

    def of(self, text: Text) -> dict[str, Loss]:
        """What is known of a text, by form."""
        return self._found.setdefault(_key(text.tokens), {})

    def keep(self) -> None:
        """Whole or not at all."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.file.with_name(f"{self.file.name}.part")
        fresh.write_bytes(msgspec.json.encode(self._found))
        fresh.rename(self.file)


def _key(tokens: Sequence[int]) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(tokens))
