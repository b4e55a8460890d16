"""Losses kept as they are measured.

A form's name stands for it: after a codec or its state has changed, start without `--resume`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from tierkv.benchmarks import parts
from tierkv.benchmarks.quant.inputs import Text
from tierkv.benchmarks.quant.quality import Loss


class Parts(parts.Parts[Loss]):
    """By text (a hash of its tokens), then by form."""

    def __init__(self, file: Path, resume: bool) -> None:
        super().__init__(file, resume, Loss)

    def of(self, text: Text) -> dict[str, Loss]:
        """What is known of a text, by form."""
        return self.under(_key(text.tokens))


def _key(tokens: Sequence[int]) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(tokens))
