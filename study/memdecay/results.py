"""Answers to probes, one JSON object a line, appended as they come: an interrupted study goes on where it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import xxhash

from tierkv.errors import ConfigError


class Probed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One probe of one episode under one arm."""

    tier: str
    policy: str
    budget: float
    scenario: str
    variant: int
    region: str
    right: bool
    kept: int  # tokens that were left, or of the tiered arm: bytes of HBM at most
    of: int  # of so many
    settings: str
    """Fingerprint of what made the answer; of the seeds of chance each has its own."""


Key = tuple[str, str, float, str, int, str]
"""tier, policy, budget, scenario, variant, settings: the probes of one episode under one arm come together."""


def fingerprint(settings: str) -> str:
    return xxhash.xxh3_64_hexdigest(settings.encode())


def key(probed: Probed) -> Key:
    return (probed.tier, probed.policy, probed.budget, probed.scenario, probed.variant, probed.settings)


class Results:
    """The answers in `file`, and the verbs that add to them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._probed = list(_read(file)) if file.exists() else []
        self._keys = {key(one) for one in self._probed}

    def __iter__(self) -> Iterator[Probed]:
        return iter(self._probed)

    def __contains__(self, wanted: Key) -> bool:
        return wanted in self._keys

    def add(self, probed: Iterable[Probed]) -> None:
        """Written in one piece: an episode under an arm is there whole or not at all."""
        new = list(probed)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as stream:
            stream.write(b"".join(msgspec.json.encode(one) + b"\n" for one in new))
        self._probed += new
        self._keys |= {key(one) for one in new}


def _read(file: Path) -> Iterator[Probed]:
    """Every whole line. A last line that was cut off by an interruption is cut from the file."""
    whole = file.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end < len(whole):
        with file.open("rb+") as stream:
            stream.truncate(end)
    decoder = msgspec.json.Decoder(Probed)
    for number, line in enumerate(whole[:end].splitlines(), 1):
        try:
            yield decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{file}, line {number} is not an answer of this study: {error}; move the file away to start afresh"
            ) from error
