"""The middle rung: an optional second packed form between exact and low-bit, attended in place like both.

Attention has one query and one sum for the space of the low-bit form, and adds pages of the middle form to the sum of
exact ones: so its codec packs values as they are (`Codec.in_model_space`). A page takes it only with an exact copy in
host memory: its low-bit form is made from that, never from the middle one, so losses do not add up.
"""

from __future__ import annotations

import math

from tierkv.daemon.allocator import SizeClass, aligned
from tierkv.daemon.policy import Thresholds
from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.quant import NAMES, Codec, get

MIDDLE_NAMES = tuple(name for name in NAMES if get(name).in_model_space and name != "exact")
"""Codecs that may be the middle form."""

WHY_ONLY_THOSE = (
    "attention sums its pages with exact ones, so its codec must pack values as they are, without a state"
)


def middle_codec(name: str) -> Codec:
    """Raises `ConfigError`: this codec cannot be the middle form."""
    if name not in MIDDLE_NAMES:
        names = ", ".join(MIDDLE_NAMES)
        raise ConfigError(f"{name} cannot be the middle form, which is one of {names}: {WHY_ONLY_THOSE}")
    return get(name)


def middle_class(codec: Codec, geometry: Geometry, low_bit: SizeClass) -> SizeClass:
    """What pages of the middle form take, several to a frame.

    Raises:
        ConfigError: a frame holds one only, or no fewer than of the low-bit form.
    """
    frame, item = low_bit.frame, aligned(codec.page_bytes(geometry))
    found = SizeClass(frame, min(frame, item))
    if found.items < 2:
        raise ConfigError(
            f"middle = {codec.name} saves nothing in HBM: a page of it takes {item:,} bytes, and the frame of a "
            f"{geometry.dtype} page has {frame:,}, which is room for one; take nf4, or none"
        )
    if found.items >= low_bit.items:
        raise ConfigError(
            f"middle = {codec.name} is no rung above low-bit: a frame of {frame:,} bytes holds {found.items} pages of "
            f"it and {low_bit.items} of the low-bit form; take a larger form, or none"
        )
    return found


def middle_below(given: float | None, thresholds: Thresholds) -> float:
    """The score below which a page may take the middle form; unless given, halfway between those around it."""
    if given is not None:
        return given
    halfway = (thresholds.quantize_below + thresholds.promote_above) / 2
    return thresholds.quantize_below if math.isnan(halfway) else halfway
