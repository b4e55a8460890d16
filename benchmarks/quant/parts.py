"""Losses kept as they are measured.

A form's name and the texts that it is fitted on stand for it: after a codec has changed, start without `--resume`.
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
    """By text (a hash of its tokens and of those of the texts that forms are fitted on), then by form."""

    def __init__(self, file: Path, fitted_on: Sequence[Text], resume: bool) -> None:
        super().__init__(file, resume, Loss)
        self._fitted_on = [text.tokens for text in fitted_on]

    def of(self, text: Text) -> dict[str, Loss]:
        """What is known of a text, by form."""
        return self.under(xxhash.xxh3_64_hexdigest(msgspec.json.encode([text.tokens, self._fitted_on])))
