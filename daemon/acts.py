"""What moves do: the acts, the form that each of them writes, and a move in flight."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tierkv.daemon.allocator import SizeClass
from tierkv.daemon.events import RequestToken
from tierkv.daemon.state import Pool
from tierkv.table import Kind


class Act(Enum):
    """What a move does; the value is `(source, destination)` for counters."""

    BACKUP = ("hbm", "host")
    ENCODE = ("hbm", "quantized")
    SOFTEN = ("hbm", "middle")
    PACK = ("quantized", "host")  # a low-bit replica goes to host as it is
    PACK_MIDDLE = ("middle", "host")
    RELOCATE = ("quantized", "quantized")
    RELOCATE_MIDDLE = ("middle", "middle")
    PROMOTE = ("host", "hbm")
    RECALL = ("host", "quantized")
    RECALL_MIDDLE = ("host", "middle")
    COMPRESS = ("host", "host")  # an exact host replica becomes low-bit
    DIGEST = ("host", "digest")  # what a cold page leaves in HBM
    FORK = ("hbm", "hbm")
    FIT = ("hbm", "codec")


ENCODES = {Kind.MIDDLE: Act.SOFTEN, Kind.QUANTIZED: Act.ENCODE}
PACKS = {Kind.MIDDLE: Act.PACK_MIDDLE, Kind.QUANTIZED: Act.PACK}
RELOCATES = {Kind.MIDDLE: Act.RELOCATE_MIDDLE, Kind.QUANTIZED: Act.RELOCATE}
RECALLS = {Kind.MIDDLE: Act.RECALL_MIDDLE, Kind.QUANTIZED: Act.RECALL}
"""The acts of a packed form."""

RETURNS = (Act.PROMOTE, Act.RECALL, Act.RECALL_MIDDLE)
"""Acts that bring a page back."""

HOST_FORM = {Act.BACKUP: Kind.EXACT, Act.PACK: Kind.QUANTIZED, Act.PACK_MIDDLE: Kind.MIDDLE}
"""The form that an act writes into host memory."""

HBM_FORM = {act: form for acts in (ENCODES, RELOCATES, RECALLS) for form, act in acts.items()}
"""The form that an act writes into HBM."""


class Move(NamedTuple):
    number: int
    act: Act
    slot: int  # the page read; for FIT the first of them
    pool: Pool  # of the destination
    size_class: SizeClass
    destination: int
    others: tuple[int, ...] = ()  # FORK: the new page; FIT: the other pages read
    request: RequestToken = 0
